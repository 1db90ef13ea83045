"""One restore, on all ranks together.

Report -> frozen plan -> move and verify -> vote -> load -> loaded.

The session is a generator (see ``actions``). Rank 0 is the one writer of the frozen inventory;
every rank derives the same plan from it and the plan's fingerprint is agreed in the vote. What
turned out to be damaged or silent is taken off the inventory and all ranks start the next attempt
together; nobody resumes alone. The vote and the "loaded" decision are one compare-and-set each
(P19): who times out tries ``abort`` and obeys the result.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recovery.actions import Await, CompareSet, Got, Publish, StoreLost
from recovery.errors import RecoveryError
from recovery.frozen import Frozen, decode_frozen, encode_frozen
from recovery.inventory import (
    Inventory,
    Report,
    check_all_report,
    decode_reports,
    encode_report,
    merge_report_lists,
    merge_reports,
)
from recovery.manifest import Generation
from recovery.plan import NONE, OWN, PEERS, Read, RestorePlan, protection
from recovery.sources import Sources
from recovery.topology import Topology
from recovery.tree import (
    GatherFailed,
    GatherSpoiled,
    dump,
    encode_words,
    gather,
    merge_texts,
    name_ranks,
    silent_ranks,
    texts_from,
)
from recovery.vote import Verdict, abort, count, encode_vote, merge_votes, read_verdict

ATTEMPTS_MAX = 64
ALL_RESTORE = "all ranks must call restore() before the first save(), or none"
"""What is to be done where some ranks may have called one and some the other."""


@dataclass(frozen=True)
class Move:
    """Serve and fetch every read of ``plan`` that concerns this rank, decode, verify.

    The shard is checked against the live objects too; nothing changes in them.
    Answer: MoveResult.
    """

    plan: RestorePlan
    attempt: int


@dataclass(frozen=True)
class MoveResult:
    """How a rank's reads went.

    ``bad``: reads whose bytes failed. ``silent``: reads whose bytes did not come, which says
    nothing of the bytes. ``wrong``: the fragments, each verified, that decoded to a shard of
    another digest. ``error``: what no other source can mend (keys that do not match, say).
    """

    bad: tuple[Read, ...] = ()
    wrong: tuple[int, ...] = ()
    error: str = ""
    silent: tuple[Read, ...] = ()

    def describe(self, generation: Generation) -> str:
        """What failed of ``generation``, in words; there is something."""
        wrong = ", ".join(map(str, self.wrong))
        found = [
            *(f"{read.words()} is damaged or missing" for read in self.bad),
            *(f"{read.words()} did not come" for read in self.silent),
            *([f"fragments {wrong} together give other bytes than were saved"] if wrong else []),
            *([self.error] if self.error else []),
        ]
        return f"{generation.describe()}: {'; '.join(found)}"


@dataclass(frozen=True)
class Doubt:
    """Others could not verify these (owner, fragment or WHOLE) of ``generation`` in our arena.

    Look at them, and withdraw the records of those that are damaged, so that they are mended.
    Answer: None.
    """

    generation: Generation
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Load:
    """Change the live objects. Answer: "" or what went wrong."""


@dataclass(frozen=True)
class NoteFailure:
    """Record in the arena that loading ``generation`` failed with ``error``. Answer: None."""

    generation: Generation
    error: str


@dataclass(frozen=True, kw_only=True)
class RestoreContext:
    """What a rank knows at the start. ``number`` counts the restores of this incarnation."""

    rank: int
    topology: Topology
    report: Report
    number: int


@dataclass(frozen=True)
class RestoreOutcome:
    """``generation`` None: nothing was restored and the live objects are as they were.

    ``protection``: how many more nodes may die without losing the restored generation. ``plan`` is
    what was done. ``world_saved`` differs from the job's world only when the restore was refused
    for it. ``kept``, ``kept_protection``: see ``Choice``.
    """

    generation: Generation | None
    reason: str
    source: str = NONE
    protection: int = -1
    plan: RestorePlan | None = None
    world_saved: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)
    kept: Generation | None = None
    kept_protection: int = -1


class RestoreAborted(RecoveryError):
    """All ranks gave this restore up before any of them changed its state."""


class RestoreHalfDone(RecoveryError):
    """Some rank failed after the vote: live objects may differ, the processes must be restarted."""


def restore_session(
    context: RestoreContext, *, load_state: bool = True
) -> Generator[Any, Any, RestoreOutcome]:
    """Restore the newest recoverable generation on all ranks, or find that there is none.

    With ``load_state`` False only the choice is made: the outcome names the generation that
    ``restore`` would take, and no byte is moved. Raises RestoreAborted (nothing changed) or
    RestoreHalfDone.
    """
    try:
        return (yield from _restore(context, load_state=load_state))
    except StoreLost as lost:
        # This rank has not voted, so nobody can have gone on to load.
        raise RestoreAborted(f"rank {context.rank} lost the store: {lost}") from lost


def _restore(context: RestoreContext, *, load_state: bool) -> Generator[Any, Any, RestoreOutcome]:
    prefix = f"restore/{context.number}"
    inventory, give_up = yield from _inventory(prefix, context)
    sources = None
    if inventory is not None:
        sources = Sources(inventory, context.topology, {}, give_up=give_up)
    for attempt in range(ATTEMPTS_MAX):
        key = f"{prefix}/{attempt}"
        if sources is not None:
            gone = sources.give_up
            value = abort(gone) if gone else encode_frozen(sources.freeze())
            yield Publish(f"{key}/frozen", value)
        frozen, plan = _thaw(context, (yield from _read_frozen(context, prefix, attempt)))
        if plan is None or not load_state:
            return _outcome(frozen, plan, context)
        result = yield Move(plan, attempt)
        try:
            verdict = yield from _vote(context, key, plan, result)
            if verdict is None:
                yield from _load(context, prefix, plan.generation)
                return _outcome(frozen, plan, context)
        except StoreLost as lost:
            raise _half_done(
                plan.generation, f"rank {context.rank} lost the store: {lost}"
            ) from lost
        doubted = {(owner, part) for owner, part, source in verdict.bad if source == context.rank}
        if doubted:
            yield Doubt(plan.generation, tuple(sorted(doubted)))
        if sources is not None:
            sources = sources.after(plan, frozen.rejected, verdict)
    raise RestoreAborted(
        f"rank {context.rank}: {ATTEMPTS_MAX} attempts to restore each met new damage or silence; "
        "start the job again"
    )


def _inventory(
    prefix: str, context: RestoreContext
) -> Generator[Any, Any, tuple[Inventory | None, str]]:
    """On rank 0 all that the ranks hold, or nothing and why all must give up; elsewhere None."""
    key, world = f"{prefix}/inventory", context.topology.world
    value = dump([encode_report(context.report)])
    try:
        merged = yield from gather(key, context.rank, world, value, merge_report_lists)
        if merged is None:
            return None, ""
        reports = decode_reports(merged)
        check_all_report(reports, world)
        return merge_reports(reports), ""
    except GatherFailed as failed:
        raise _no_inventory(failed.missing) from failed
    except StoreLost:
        raise  # it says nothing of what others hold, and only rank 0 may write for all
    except RecoveryError as error:
        return Inventory(()), f"what a rank says that it holds cannot be read: {error}"


def _thaw(context: RestoreContext, raw: bytes) -> tuple[Frozen, RestorePlan | None]:
    if raw.startswith(b"abort:"):
        raise RestoreAborted(raw.removeprefix(b"abort:").decode("utf-8", "replace"))
    try:
        frozen = decode_frozen(raw)
        return frozen, frozen.plan(context.topology)
    except RecoveryError as error:
        # The same on every rank: all read the same bytes.
        raise RestoreAborted(f"rank 0's word of what to restore cannot be used: {error}") from error


def _outcome(frozen: Frozen, plan: RestorePlan | None, context: RestoreContext) -> RestoreOutcome:
    choice = frozen.choice
    if choice.generation is None:
        return RestoreOutcome(None, choice.reason, lost=choice.lost)
    if plan is None:
        reason = (
            f"{choice.generation.describe()} was saved by {choice.world} ranks and this job has "
            f"{context.topology.world}: start it with {choice.world} ranks to go on from there"
        )
        return RestoreOutcome(None, reason, world_saved=choice.world, lost=choice.lost)
    source = OWN if all(rebuild.source == OWN for rebuild in plan.rebuilds) else PEERS
    left = protection(frozen.inventory, plan.generation, context.topology)
    return RestoreOutcome(
        plan.generation,
        choice.reason,
        source,
        left,
        plan,
        choice.world,
        choice.lost,
        choice.kept,
        choice.kept_protection,
    )


def _by_rank(rank: int, text: str) -> str:
    """``text`` with the rank in front, unless it says so itself."""
    prefix = f"rank {rank}: "
    return text if text.startswith(prefix) else prefix + text


def _vote(
    context: RestoreContext, key: str, plan: RestorePlan, result: MoveResult
) -> Generator[Any, Any, Verdict | None]:
    """None: go. Else what to leave out in the next attempt. Raises RestoreAborted."""
    rank, world = context.rank, context.topology.world
    mine = encode_vote(
        plan.fingerprint(),
        bad=result.bad,
        silent=result.silent,
        wrong=[(rank, result.wrong)] if result.wrong else [],
        errors=[_by_rank(rank, result.error)] if result.error else [],
    )
    moving = max((plan.received_bytes(one) for one in range(world)), default=0)
    try:
        merged = yield from gather(
            f"{key}/moved", rank, world, mine, merge_votes, watch=f"{key}/vote", moving_bytes=moving
        )
        proposal = count(merged) if merged is not None else None
    except GatherFailed as failed:
        if failed.decided is not None:
            # Who moved for long need not wait for what others, who did not, have given up.
            return _obey(failed.decided)
        proposal = abort(f"no vote from {name_ranks(failed.missing)}")
    except RecoveryError as error:
        proposal = abort(f"what a rank votes cannot be read: {error}")
    if proposal is not None:
        return _obey(bytes((yield CompareSet(f"{key}/vote", proposal))))
    answer = yield Await((f"{key}/vote",), "the vote", None, moving)
    if isinstance(answer, Got):
        return _obey(answer.values[f"{key}/vote"])
    late = yield from silent_ranks(f"{key}/moved", world)
    raw = yield CompareSet(f"{key}/vote", abort(f"no vote from {name_ranks(late)}"))
    return _obey(bytes(raw))


def _obey(raw: bytes) -> Verdict | None:
    try:
        return read_verdict(raw)
    except RecoveryError as error:
        raise RestoreAborted(str(error)) from error


def _load(
    context: RestoreContext, prefix: str, generation: Generation
) -> Generator[Any, Any, None]:
    error = yield Load()
    if error:
        yield NoteFailure(generation, error)
    key, done = f"{prefix}/loaded", f"{prefix}/done"
    errors = [f"rank {context.rank}: {error}"] if error else []
    try:
        merged = yield from gather(
            done, context.rank, context.topology.world, dump(errors), merge_texts
        )
        if merged is not None:
            said = "; ".join(texts_from(merged))
            raw = yield CompareSet(key, _failed(said) if said else b"loaded")
        else:
            answer = yield Await((key,), "the loaded decision")
            if not isinstance(answer, Got):
                raise GatherFailed((yield from silent_ranks(done, context.topology.world)), None)
            raw = answer.values[key]
    except GatherFailed as failed:
        text = f"no word of loading from {name_ranks(failed.missing)}"
        raw = yield CompareSet(key, _failed(text))
    except GatherSpoiled as spoiled:
        raw = yield CompareSet(key, _failed(f"a word of loading cannot be read: {spoiled}"))
    if bytes(raw) != b"loaded":
        said = bytes(raw).decode("utf-8", "replace").removeprefix("failed:")
        raise _half_done(generation, said)


def _failed(words: str) -> bytes:
    return b"failed:" + encode_words(words)


def _half_done(generation: Generation, why: str) -> RestoreHalfDone:
    return RestoreHalfDone(
        f"{generation.describe()}: {why}; "
        "ranks may hold different states now, so this process must end and be restarted"
    )


def _read_frozen(context: RestoreContext, prefix: str, attempt: int) -> Generator[Any, Any, bytes]:
    key = f"{prefix}/{attempt}/frozen"
    answer = yield Await((key,), "the frozen inventory of rank 0")
    if isinstance(answer, Got):
        return answer.values[key]
    late = yield from silent_ranks(f"{prefix}/inventory", context.topology.world)
    raise _no_inventory(late)


def _no_inventory(missing: Sequence[int]) -> RestoreAborted:
    return RestoreAborted(
        f"no inventory from {name_ranks(missing)} before the deadline (late, dead, or without a "
        f"call of restore()): {ALL_RESTORE}"
    )
