"""One generation, from its offers to its decision: the save session (see also ``ledger``)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from erasure.digest import digest
from recovery.actions import Await, CompareSet, Decided, Got, Missing, Publish, StoreLost
from recovery.blame import late_in_group, not_come
from recovery.errors import RecoveryError
from recovery.layout import Fragment, Layout
from recovery.ledger import ABORTED, COMMITTED, HELD
from recovery.manifest import Generation
from recovery.offer import check_offer, encode_offer
from recovery.tree import (
    FANOUT,
    GatherFailed,
    GatherSpoiled,
    encode_words,
    gather,
    name_ranks,
    silent_ranks,
)


def decision_key(generation: Generation) -> str:
    """Store key of the one decision about ``generation`` (P1)."""
    return f"decision/{generation.id}"


def parse_decision(raw: bytes) -> tuple[str, str]:
    """(COMMITTED | ABORTED, reason)."""
    word, _, reason = raw.decode("utf-8", "replace").partition(":")
    if word not in (COMMITTED, ABORTED):
        raise RecoveryError(f"decision is {raw[:64]!r}, expected committed or aborted")
    return word, reason


def abort_value(reason: str) -> bytes:
    """The decision "aborted", with a bounded reason."""
    return f"{ABORTED}:".encode() + encode_words(reason)


@dataclass(frozen=True)
class Incoming:
    """A fragment that a peer has offered to this rank, with the length of the owner's shard.

    ``shard_digest``: the digest of that shard in hex where it is known before, else "".
    """

    fragment: Fragment
    shard_bytes: int
    shard_digest: str = ""


@dataclass(frozen=True)
class Connect:
    """Be connected to every rank in ``peers``. Answer: Mapping[int, str], what failed, by peer."""

    peers: tuple[int, ...]


@dataclass(frozen=True)
class Settle:
    """For each offer: choose a slot that is not base, mark it invalid, grow it, post its receive.

    Answer: Mapping[Fragment, str]: "" when ready, else the reason why not.
    """

    offers: tuple[Incoming, ...]


@dataclass(frozen=True)
class Exchange:
    """Digest, encode, send ``send``; receive and verify what was settled; seal own and held slots.

    Answer: ExchangeResult.
    """

    send: tuple[Fragment, ...]


@dataclass(frozen=True)
class Prepared:
    """This rank is about to report HELD: from now on it obeys the decision only (P1).

    Answer: None.
    """


@dataclass(frozen=True)
class ExchangeResult:
    """What became of the bytes.

    ``shard_digest`` is that of the own shard, ``received`` has the shard digests of the fragments
    that were received and verified, ``failures`` says in words what went wrong.
    """

    shard_digest: bytes
    received: Mapping[Fragment, bytes] = field(default_factory=dict)
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """Everything that a rank's save session knows at its start.

    ``incarnation`` is that of the rank's arena; ``held_root`` is that function over those of all
    ranks, agreed at start-up, so that HELD from an arena that was replaced in between does not
    count (P4).
    """

    rank: int
    layout: Layout
    generation: Generation
    base: Generation | None
    shard_bytes: int
    incarnation: str
    held_root: bytes


@dataclass(frozen=True)
class SaveOutcome:
    """How a generation ended at this rank. ``held`` tells whether this rank ever reported HELD."""

    state: str
    reason: str
    held: bool = False


class _Abort(Exception):
    """Inside a save session: give this generation up."""


def save_session(context: SaveContext) -> Generator[Any, Any, SaveOutcome]:
    """Protect one staged shard and learn its generation's decision (P1, P4, P6).

    Offer -> READY -> bytes -> acknowledgements -> HELD -> decision.
    Ends with what the decision key says, whoever wrote it. With the store lost the outcome is
    UNDECIDED (state HELD): the driver keeps every slot and calls ``resolve`` when the store is
    back.
    """
    held = False
    try:
        try:
            yield from _protect(context)
            yield Prepared()
            held = True
            raw = yield from _decide(context)
        except _Abort as abort:
            value = abort_value(f"rank {context.rank}: {abort}")
            raw = yield CompareSet(decision_key(context.generation), value)
    except StoreLost as lost:
        return SaveOutcome(HELD, f"the store was lost: {lost}", held)
    state, reason = parse_decision(raw)
    if state == COMMITTED and not held:
        raise RecoveryError(
            f"{context.generation.describe()} was committed without rank {context.rank}"
        )
    return SaveOutcome(state, reason, held)


def resolve(context: SaveContext, reason: str) -> Generator[Any, Any, SaveOutcome]:
    """Abort a generation that this rank cannot finish, or read its decision if there is one."""
    value = abort_value(f"rank {context.rank}: {reason}")
    raw = yield CompareSet(decision_key(context.generation), value)
    state, why = parse_decision(raw)
    return SaveOutcome(state, why)


def _protect(context: SaveContext) -> Generator[Any, Any, None]:
    yield from _settle(context)
    result: ExchangeResult = yield Exchange(context.layout.sent_by(context.rank))
    if result.failures:
        late = yield from late_in_group(context.layout, context.generation.id, context.rank)
        raise _Abort("; ".join((*result.failures, *([late] if late else []))))
    yield from _acknowledge(context, result)


def _settle(context: SaveContext) -> Generator[Any, Any, None]:
    """Offer, connect, answer what was offered, and go on only when every holder is READY.

    Connect only after every peer's offer: by then it has told which pairs it broke off in the
    generation before, and no side keeps a channel that the other has given up (P21).
    """
    rank, gen, peers = context.rank, context.generation.id, context.layout.peers_of(context.rank)
    sent, held = context.layout.sent_by(rank), context.layout.held_by(rank)
    mine = encode_offer(context.layout.redundancy.code, context.shard_bytes, context.base)
    yield Publish(f"offer/{gen}/{rank}", mine)
    raws = yield from _await(context, {f"offer/{gen}/{peer}": peer for peer in peers}, "offer")
    cut_off: Mapping[int, str] = yield Connect(peers)
    if cut_off:
        raise _Abort("; ".join(cut_off.values()))
    try:
        sizes = [check_offer(raws[f"offer/{gen}/{f.owner}"], mine, f.owner) for f in held]
    except RecoveryError as error:
        raise _Abort(str(error)) from error
    answers = yield Settle(tuple(map(Incoming, held, sizes)))
    for fragment in held:
        yield Publish(
            f"ready/{gen}/{fragment.owner}/{fragment.index}", encode_words(answers[fragment])
        )
    ready = yield from _await(
        context, {f"ready/{gen}/{rank}/{f.index}": f.holder for f in sent}, "READY"
    )
    for fragment in sent:
        refusal = ready[f"ready/{gen}/{rank}/{fragment.index}"].decode("utf-8", "replace")
        if refusal:
            raise _Abort(f"rank {fragment.holder} refused fragment {fragment.index}: {refusal}")
    refused = [f"owner {f.owner}: {reason}" for f, reason in answers.items() if reason]
    if refused:
        raise _Abort("cannot hold what was offered: " + "; ".join(refused))


def _acknowledge(context: SaveContext, result: ExchangeResult) -> Generator[Any, Any, None]:
    """Acknowledge what was verified, and go on only when every holder has our shard's digest."""
    rank, gen = context.rank, context.generation.id
    sent, held = context.layout.sent_by(rank), context.layout.held_by(rank)
    for fragment in held:
        yield Publish(
            f"ack/{gen}/{fragment.owner}/{fragment.index}", result.received[fragment].hex().encode()
        )
    acks = yield from _await(
        context, {f"ack/{gen}/{rank}/{f.index}": f.holder for f in sent}, "acknowledgement"
    )
    for fragment in sent:
        if acks[f"ack/{gen}/{rank}/{fragment.index}"] != result.shard_digest.hex().encode():
            raise _Abort(f"rank {fragment.holder} acknowledged another shard digest than ours")


def _decide(context: SaveContext) -> Generator[Any, Any, bytes]:
    """Report HELD up the tree; the root commits; all read the decision or abort at the deadline."""
    key, world = decision_key(context.generation), context.layout.topology.world
    prefix = f"held/{context.generation.id}"
    try:
        root = yield from gather(
            prefix, context.rank, world, context.incarnation.encode(), merge_held, watch=key
        )
    except GatherFailed as failed:
        if failed.decided is not None:
            return failed.decided
        raise _Abort(f"not HELD by {name_ranks(failed.missing)} at the deadline") from failed
    except GatherSpoiled as spoiled:
        raise _Abort(f"HELD cannot be read: {spoiled}") from spoiled
    if root is not None:
        if root != context.held_root:
            raise _Abort("HELD was reported by an arena that is not the one agreed at start-up")
        return bytes((yield CompareSet(key, COMMITTED.encode())))
    answer = yield Await((key,), "the decision")
    if isinstance(answer, Got):
        return answer.values[key]
    late = yield from silent_ranks(prefix, world)
    raise _Abort(f"no decision at the deadline, for want of {name_ranks(late)}")


def merge_held(values: Sequence[bytes]) -> bytes:
    """HELD of a subtree: a digest over the arenas' incarnations in it."""
    return digest(b"".join(values)).hex().encode()


def held_root(incarnations: Sequence[str]) -> bytes:
    """What the root reads when every rank reported HELD from the arena agreed at start-up."""
    level = [incarnation.encode() for incarnation in incarnations]
    while len(level) > 1:
        level = [merge_held(level[i : i + FANOUT]) for i in range(0, len(level), FANOUT)]
    return level[0]


def _await(
    context: SaveContext, ranks: Mapping[str, int], what: str
) -> Generator[Any, Any, Mapping[str, bytes]]:
    """Values of the keys, or an abort that names the ranks whose ``what`` did not come."""
    if not ranks:
        return {}
    answer = yield Await(tuple(sorted(ranks)), what, watch=decision_key(context.generation))
    if isinstance(answer, Decided):
        raise _Abort("decided elsewhere")
    if isinstance(answer, Missing):
        when = " by the deadline"
        root = yield from late_in_group(context.layout, context.generation.id, context.rank, when)
        raise _Abort(root or not_come(what, sorted({ranks[key] for key in answer.keys}), when))
    values: Mapping[str, bytes] = answer.values
    return values


@dataclass
class KeyLog:
    """Which store keys a rank wrote for which generation, and when they may go (P5).

    Keys of a generation go when one at least two later is *committed*: HELD of every rank for that
    later one proves that every rank has read the earlier decisions. Never after aborts alone. Each
    rank removes what it published; the root besides removes decisions and admissions.
    """

    entries: list[tuple[int, set[str]]] = field(default_factory=list)

    def open(self, sequence: int) -> set[str]:
        """Keys written from now on belong to the generation with this admit sequence."""
        if not self.entries or self.entries[-1][0] != sequence:
            self.entries.append((sequence, set()))
        return self.entries[-1][1]

    def expired(self, committed_sequence: int) -> list[str]:
        """Keys to delete after ``committed_sequence`` was committed; they are forgotten here."""
        gone = [keys for sequence, keys in self.entries if sequence <= committed_sequence - 2]
        self.entries = [entry for entry in self.entries if entry[0] > committed_sequence - 2]
        return sorted(key for keys in gone for key in keys)
