"""Mending: the base is made fully protected again, without a new save (rule P10).

    call -> reports of a coding group -> frozen -> repair plan -> regrow -> READY -> bytes -> result
    of the group -> results of all groups -> over

Each coding group works on its own. Who has not reported by the deadline counts as lost and the rest
mend around it. Every ending is one compare-and-set (the group's ``result``, then ``over``): who
times out, or has to end, tries its own word and obeys what stands there. A mend has a name that
ranks derive alike: restores so far, newest decided admission, attempt. Who calls for one sets
``CALL_KEY`` to its name, where idle ranks find it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.actions import Await, CompareSet, Decided, Got, Missing, Publish, StoreLost
from recovery.commit import Connect, Exchange, ExchangeResult, Incoming, Settle
from recovery.errors import RecoveryError
from recovery.inventory import Report, decode_reports, encode_report, merge_reports
from recovery.layout import Fragment, Layout
from recovery.manifest import Generation
from recovery.plan import RestorePlan
from recovery.repair import Repair, make_repair
from recovery.tree import dump, encode_words, load, name_ranks

DONE, PART, LOST, GIVEN_UP, FAILED = "done", "part", "ranks lost", "given up", "failed"
"""How a mend ends: fully protected; as far as could be with every rank there, or around lost ones;
for a restore, a save or an end; or not."""
KNOWN = (DONE, PART, LOST)
"""Ends after which it is known how protected the base is."""
_WORST_FIRST = (FAILED, GIVEN_UP, LOST, PART, DONE)
WAITS_OF_OTHERS = 4
"""So many deadlines may pass one after another for those who do mend."""
CALL_KEY = "mend/call"
"""Holds the name of the newest mend that was called for."""


@dataclass(frozen=True)
class Regrow:
    """Serve and fetch every read of ``plan`` that concerns this rank.

    Where the plan has reads for this rank, its shard, verified, goes into an own slot.
    Answer: str, "" or what went wrong.
    """

    plan: RestorePlan


@dataclass(frozen=True, kw_only=True)
class MendContext:
    """What a rank knows at the start; ``report`` has what its arena holds of ``generation``."""

    rank: int
    layout: Layout
    name: str
    generation: Generation
    report: Report


@dataclass(frozen=True)
class MendOutcome:
    """How a mend ended.

    ``protection``: how many more nodes may be lost now, -1 when that is not known. ``repair`` is
    what this rank's group set out to do, None when it did not come to that. ``placed``: fragments
    of the group that were made and are held now. ``agreed``: it is the end that all obey, and not
    only what this rank has seen of it.
    """

    state: str
    protection: int
    reason: str
    repair: Repair | None = None
    placed: frozenset[Fragment] = frozenset()
    agreed: bool = False


class _GiveUp(Exception):
    """Inside a mend: this rank cannot go on, and says so for its group."""


class _Over(Exception):
    """Inside a mend: the group's result stands already."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        self.raw = raw


def mend_name(restores: int, sequence: int, attempt: int) -> str:
    """Name of the ``attempt``-th mend between admission ``sequence`` and the next."""
    return f"{restores}.{sequence}.{attempt}"


def parse_name(raw: bytes) -> tuple[int, int, int]:
    """(restores, sequence, attempt) of a mend's name, or RecoveryError."""
    match = re.fullmatch(rb"(\d{1,9})\.(\d{1,18})\.(\d{1,9})", raw)
    if match is None:
        raise RecoveryError(f"name of a mend is {raw[:64]!r}")
    restores, sequence, attempt = (int(part) for part in match.groups())
    return restores, sequence, attempt


def result_key(name: str, group: int) -> str:
    """Store key of a group's one result."""
    return f"mend/{name}/{group}/result"


def frozen_key(name: str, group: int) -> str:
    """Store key of the reports that a group mends by."""
    return f"mend/{name}/{group}/frozen"


def over_key(name: str) -> str:
    """Store key of the one end of a mend."""
    return f"mend/{name}/over"


def decided_keys(name: str, layout: Layout, rank: int) -> set[str]:
    """Keys set by compare-and-set that ``rank`` is to remove one day: its group's, the end."""
    group = layout.group_of(rank)
    keys = {over_key(name)} if rank == 0 else set()
    if rank == layout.ranks_of_group(group)[0]:
        keys |= {result_key(name, group), frozen_key(name, group)}
    return keys


def give_way(name: str, group: int, why: str) -> Generator[Any, Any, None]:
    """End a mend for a restore, for a save, or for the end of this process."""
    yield CompareSet(result_key(name, group), encode_words(f"{GIVEN_UP}:-1:{why}"))
    # Nobody waits for reports any more: with none, all look for the result.
    yield CompareSet(frozen_key(name, group), dump([]))
    yield CompareSet(over_key(name), encode_words(f"{GIVEN_UP}:-1:{why}"))


def mend_session(context: MendContext) -> Generator[Any, Any, MendOutcome]:
    """Take part in one mend, from this rank's report to its end. Never raises for what fails."""
    repair: Repair | None = None
    placed: frozenset[Fragment] = frozenset()
    key = result_key(context.name, context.layout.group_of(context.rank))
    try:
        try:
            repair = yield from _freeze(context)
            yield from _regrow(context, repair)
            refused = yield from _exchange(context, repair)
            placed, value = yield from _gather(context, repair, refused)
            raw = yield CompareSet(key, value)
        except (_GiveUp, RecoveryError) as error:
            if isinstance(error, StoreLost):
                raise
            raw = yield CompareSet(key, encode_words(f"{FAILED}:-1:rank {context.rank}: {error}"))
        except _Over as over:
            raw = over.raw
        state, protection, reason = yield from _conclude(context, repair, bytes(raw))
    except StoreLost as lost:
        return MendOutcome(FAILED, -1, f"the store was lost: {lost}", repair, placed)
    except RecoveryError as error:
        # The end itself cannot be read: by nobody, so all take it alike.
        return MendOutcome(FAILED, -1, str(error), repair, placed)
    return MendOutcome(state, protection, reason, repair, placed, agreed=True)


def parse_result(raw: bytes) -> tuple[str, int, str]:
    """(state, protection, reason), or RecoveryError."""
    state, _, rest = raw.decode("utf-8", "replace").partition(":")
    number, _, reason = rest.partition(":")
    digits = number.removeprefix("-")
    if state not in _WORST_FIRST or not digits.isdecimal() or len(digits) > 9:
        raise RecoveryError(f"result of a mend is {raw[:64]!r}")
    return state, int(number), reason


def _freeze(context: MendContext) -> Generator[Any, Any, Repair]:
    """Report, and derive the repair from what the first rank to have enough has frozen."""
    group = context.layout.group_of(context.rank)
    prefix, frozen_at = f"mend/{context.name}/{group}", frozen_key(context.name, group)
    keys = {f"{prefix}/report/{rank}": rank for rank in context.layout.ranks_of_group(group)}
    mine = f"{prefix}/report/{context.rank}"
    yield Publish(mine, dump(encode_report(context.report)))
    answer = yield Await(tuple(keys), "reports for mending", frozen_at)
    if isinstance(answer, Missing):
        there = tuple(key for key in keys if key not in answer.keys)
        answer = yield Await(there, "reports for mending", look=True)
    if isinstance(answer, Decided):
        raw = answer.value
    elif isinstance(answer, Got):
        reports = [load(answer.values[key], "a report") for key in sorted(answer.values)]
        raw = yield CompareSet(frozen_at, dump(reports))
    else:
        raise _GiveUp("a report for mending has vanished")
    result = result_key(context.name, group)
    over = yield Await((result,), "an end of it before it began", look=True)
    if isinstance(over, Got):
        raise _Over(over.values[result])
    frozen = decode_reports(bytes(raw))
    alive = tuple(sorted(report.rank for report in frozen))
    if len(set(alive)) != len(alive) or not set(alive) <= set(keys.values()):
        raise RecoveryError(f"reports of ranks {alive} were frozen for group {group}")
    inventory = merge_reports(frozen)
    repair = make_repair(inventory, context.generation, context.layout, group, alive)
    if context.rank not in alive:
        yield from _watch_on(context, repair)
    return repair


def _watch_on(context: MendContext, repair: Repair) -> Generator[Any, Any, None]:
    """Too late to be in it: the others mend around this rank, and it obeys their result."""
    key = result_key(context.name, context.layout.group_of(context.rank))
    what = "the others' result of mending"
    answer = yield from _await_others((key,), what, None, repair.moving_bytes())
    if isinstance(answer, Got):
        raise _Over(answer.values[key])
    raise _GiveUp("its report came too late, and no result of the others came")


def _regrow(context: MendContext, repair: Repair) -> Generator[Any, Any, None]:
    moves = repair.moves()
    if moves is None:
        return
    if moves.rebuilds[context.rank].reads or moves.reads_from(context.rank):
        error = yield Regrow(moves)
        if error:
            raise _GiveUp(error)


def _exchange(context: MendContext, repair: Repair) -> Generator[Any, Any, dict[Fragment, str]]:
    """Settle and move the missing fragments; those that their holders refused, with the reason."""
    rank = context.rank
    prefix = f"mend/{context.name}/ready"
    receives = repair.received_by(rank)
    cut_off: Mapping[int, str] = yield Connect(repair.peers_of(rank))
    if cut_off:
        raise _GiveUp("; ".join(cut_off.values()))
    kinds = {f: repair.kind_of(f.owner) for f in receives}
    answers = yield Settle(
        tuple(Incoming(f, kind.shard_bytes, kind.shard_digest) for f, kind in kinds.items())
    )
    for f in receives:
        yield Publish(f"{prefix}/{f.owner}/{f.index}", answers[f].encode())
    ready = {f"{prefix}/{rank}/{f.index}": f for f in repair.sent_by(rank)}
    answer = yield from _await(context, tuple(sorted(ready)), "READY", repair.moving_bytes())
    if isinstance(answer, Missing):
        raise _GiveUp(f"no READY from {name_ranks(_holders(ready, answer))}")
    said = {f: answer.values[key].decode("utf-8", "replace") for key, f in ready.items()}
    sends = tuple(f for f, refusal in said.items() if not refusal)
    result: ExchangeResult = yield Exchange(sends)
    if result.failures:
        raise _GiveUp("; ".join(result.failures))
    return {f: refusal for f, refusal in said.items() if refusal}


def _gather(
    context: MendContext, repair: Repair, refused: Mapping[Fragment, str]
) -> Generator[Any, Any, tuple[frozenset[Fragment], bytes]]:
    """Tell what was refused; from everybody's word, what is placed now and the group's result."""
    prefix = f"mend/{context.name}/sent"
    mine = [[f.owner, f.index, f.holder, why] for f, why in sorted(refused.items())]
    yield Publish(f"{prefix}/{context.rank}", dump(mine))
    alive = [stripe.owner for stripe in repair.stripes]
    keys = {f"{prefix}/{rank}": rank for rank in {*alive, *_held_by(repair), context.rank}}
    answer = yield from _await(context, tuple(sorted(keys)), "word of it", repair.moving_bytes())
    if isinstance(answer, Missing):
        late = sorted(keys[key] for key in answer.keys)
        raise _GiveUp(f"no word of having mended from {name_ranks(late)}")
    not_placed, words = set(), list(repair.lacking)
    for key in sorted(keys):
        for fragment, why in _refusals(answer.values[key], keys[key]):
            not_placed.add(fragment)
            words.append(
                f"rank {fragment.holder} refused fragment {fragment.index} of owner "
                f"{fragment.owner}: {why}"
            )
    sends = {f for stripe in repair.stripes for f in stripe.sends}
    placed = frozenset(sends - not_placed)
    state = LOST if repair.lost else PART if words else DONE
    return placed, encode_words(f"{state}:{repair.protection(placed)}:{'; '.join(words)}")


def _refusals(raw: bytes, rank: int) -> list[tuple[Fragment, str]]:
    """What a rank says was refused of its fragments; RecoveryError when it cannot be read."""
    rows = load(raw, f"word of rank {rank}")
    known = isinstance(rows, list) and all(
        isinstance(row, list)
        and [type(part) for part in row] == [int, int, int, str]
        and min(row[:3]) >= 0
        for row in rows
    )
    if not known:
        raise RecoveryError(f"word of rank {rank} of having mended is {str(rows)[:200]!r}")
    return [(Fragment(owner, index, holder), why) for owner, index, holder, why in rows]


def _held_by(repair: Repair) -> set[int]:
    return {f.holder for stripe in repair.stripes for f in stripe.sends}


def _holders(ready: Mapping[str, Fragment], answer: Missing) -> list[int]:
    return sorted({ready[key].holder for key in answer.keys})


def _conclude(
    context: MendContext, repair: Repair | None, mine: bytes
) -> Generator[Any, Any, tuple[str, int, str]]:
    """The end of the mend, which is that of its worst group."""
    over = over_key(context.name)
    groups = range(len(context.layout.groups))
    results = [parse_result(mine)]
    if len(groups) > 1 and results[0][0] != GIVEN_UP:
        keys = {result_key(context.name, group): group for group in groups}
        # Nothing is known of what the other groups move: as much as ours might.
        moving_bytes = repair.moving_bytes_max() if repair is not None else 0
        answer = yield from _await_others(tuple(keys), "results of all groups", over, moving_bytes)
        if isinstance(answer, Decided):
            return parse_result(answer.value)
        if isinstance(answer, Got):
            results = [parse_result(answer.values[key]) for key in keys]
        else:
            silent = sorted(keys[key] for key in answer.keys)
            results.append((FAILED, -1, f"no result of coding groups {silent}"))
    state = min((result[0] for result in results), key=_WORST_FIRST.index)
    protection = min(result[1] for result in results)
    reason = "; ".join(result[2] for result in results if result[2])
    raw = yield CompareSet(over, encode_words(f"{state}:{protection}:{reason}"))
    return parse_result(bytes(raw))


def _await_others(
    keys: tuple[str, ...], what: str, watch: str | None, moving_bytes: int
) -> Generator[Any, Any, Got | Missing | Decided]:
    """Wait for what others do in several waits, each of which may take them its whole deadline."""
    answer: Got | Missing | Decided = Missing(keys)
    for _ in range(WAITS_OF_OTHERS):
        answer = yield Await(keys, what, watch, moving_bytes)
        if not isinstance(answer, Missing):
            break
    return answer


def _await(
    context: MendContext, keys: tuple[str, ...], what: str, moving_bytes: int = 0
) -> Generator[Any, Any, Got | Missing]:
    if not keys:
        return Got({})
    watch = result_key(context.name, context.layout.group_of(context.rank))
    answer = yield Await(keys, what, watch, moving_bytes)
    if isinstance(answer, Decided):
        raise _Over(answer.value)
    if not isinstance(answer, Got | Missing):
        raise TypeError(f"the driver answered an Await with {answer!r}")
    return answer
