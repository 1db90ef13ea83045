"""Who holds what, and which generation that allows to restore.

Every rank reports the slots of its own arena. Merged reports of all ranks are an inventory;
``choose`` picks the newest generation that can be rebuilt for every owner and says in words why
anything newer was passed over. Holdings of one owner count together only when they agree on code,
length and shard digest, so a fragment that belongs to another shard is never combined with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from erasure.code import Code
from erasure.digest import DIGEST_BYTES
from recovery.errors import ManifestError, RecoveryError
from recovery.manifest import MAX_WORLD, WHOLE, Generation, SlotRecord, payload_bytes
from recovery.tree import dump, load, name_ranks

IDENTICAL_FAILURES_MAX = 2
"""After this many identical failures to load a generation, restore steps back one (P19)."""
FAILURES_MAX = 4
"""After so many of any kind too: an error may say something else each time."""


@dataclass(frozen=True, order=True)
class ShardKind:
    """What must agree before fragments are combined."""

    k: int
    m: int
    shard_bytes: int
    shard_digest: str

    @property
    def code(self) -> Code:
        return Code(self.k, self.m)


@dataclass(frozen=True, order=True)
class Holding:
    """A slot with a valid record: ``fragment`` (or WHOLE) of ``owner``, held by ``rank``."""

    generation: Generation
    owner: int
    fragment: int
    rank: int
    world: int
    kind: ShardKind

    @property
    def length(self) -> int:
        return payload_bytes(self.kind.code, self.fragment, self.kind.shard_bytes)


@dataclass(frozen=True)
class Report:
    """What one rank's arena holds. ``failures``: generations that failed to load too often."""

    rank: int
    holdings: tuple[Holding, ...] = ()
    committed: Generation | None = None
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """All reports together; ``committed`` is the newest one that any rank knows to be committed."""

    holdings: tuple[Holding, ...]
    committed: Generation | None = None
    failures: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """The generation to restore, or None, with the reason.

    ``world`` is the number of ranks that saved it. ``lost`` has the owners that cannot be rebuilt
    in the newest generation that was passed over for them, with the cause. ``kept``: the next older
    generation, when it is there for every owner and survives more losses, ``kept_protection``, than
    the chosen one: until that is mended, it must be kept (P10).
    """

    generation: Generation | None
    world: int
    reason: str
    lost: Mapping[int, str] = field(default_factory=dict)
    kept: Generation | None = None
    kept_protection: int = -1


def report_of(rank: int, job: str, records: Iterable[SlotRecord], **facts: Any) -> Report:
    """The report of ``rank`` from the valid records of its arena that belong to ``job``."""
    holdings = [
        Holding(
            r.generation,
            r.owner,
            r.fragment,
            rank,
            r.world,
            ShardKind(r.k, r.m, r.shard_bytes, r.shard_digest.hex()),
        )
        for r in records
        if r.job == job
    ]
    return Report(rank, tuple(sorted(holdings)), **facts)


def failures_of(attempts: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
    """Generation ids whose load failed too often: in the same way, or in all."""
    found = {gen for gen, _, count in attempts if count >= IDENTICAL_FAILURES_MAX}
    for gen in {gen for gen, _, _ in attempts}:
        if sum(count for one, _, count in attempts if one == gen) >= FAILURES_MAX:
            found.add(gen)
    return tuple(sorted(found))


def merge_reports(reports: Iterable[Report]) -> Inventory:
    """All reports as one inventory, the same in whatever order they come."""
    reports = sorted(reports, key=lambda report: report.rank)
    committed = [report.committed for report in reports if report.committed]
    return Inventory(
        tuple(sorted(holding for report in reports for holding in report.holdings)),
        max(committed, default=None),
        frozenset(gen for report in reports for gen in report.failures),
    )


def shard_sets(holdings: Iterable[Holding]) -> dict[int, dict[ShardKind, tuple[Holding, ...]]]:
    """Holdings of one generation by owner and by kind, sorted."""
    found: dict[int, dict[ShardKind, list[Holding]]] = {}
    for holding in sorted(holdings):
        found.setdefault(holding.owner, {}).setdefault(holding.kind, []).append(holding)
    return {
        owner: {kind: tuple(some) for kind, some in kinds.items()} for owner, kinds in found.items()
    }


def recoverable(kind: ShardKind, holdings: Sequence[Holding]) -> bool:
    """A whole shard, or k distinct fragments."""
    fragments = {holding.fragment for holding in holdings}
    return WHOLE in fragments or len(fragments) >= kind.k


def explain(kinds: Mapping[ShardKind, Sequence[Holding]], k: int) -> str:
    """Why an owner cannot be rebuilt: "1 of 2 distinct fragments and no whole copy".

    ``k`` is that of the generation's other owners, for one of whom nothing is left.
    """
    if not kinds:
        return f"0 of {k} distinct fragments and no whole copy"
    kind, holdings = max(kinds.items(), key=lambda item: len({h.fragment for h in item[1]}))
    count = len({holding.fragment for holding in holdings})
    return f"{count} of {kind.k} distinct fragments and no whole copy"


def choose(inventory: Inventory) -> Choice:
    """The newest generation, by (epoch, step), that every owner can be rebuilt in."""
    by_generation: dict[Generation, list[Holding]] = {}
    for holding in inventory.holdings:
        by_generation.setdefault(holding.generation, []).append(holding)
    passed: list[str] = []
    newest_lost: Mapping[int, str] = {}
    for generation in sorted(by_generation, reverse=True):
        holdings = by_generation[generation]
        lost = _lost_owners(holdings)
        if generation.id in inventory.failures:
            often = f"identically {IDENTICAL_FAILURES_MAX} times, or {FAILURES_MAX} times in all"
            passed.append(f"{generation.describe()} failed to load {often}")
        elif lost:
            passed.append(f"{generation.describe()}: {describe_lost(lost)}")
            newest_lost = newest_lost or lost
        else:
            reason = _reason(generation, inventory.committed, passed)
            return Choice(generation, holdings[0].world, reason, newest_lost)
    return Choice(None, 0, _reason(None, inventory.committed, passed), newest_lost)


def _lost_owners(holdings: Sequence[Holding]) -> dict[int, str]:
    worlds = {holding.world for holding in holdings}
    if len(worlds) != 1:
        return {0: f"records disagree on the number of ranks {sorted(worlds)}"}
    sets = shard_sets(holdings)
    lost = {}
    for owner in range(worlds.pop()):
        good = [kind for kind, some in sets.get(owner, {}).items() if recoverable(kind, some)]
        if not good:
            lost[owner] = explain(sets.get(owner, {}), holdings[0].kind.k)
        elif len(good) > 1:
            lost[owner] = (
                "two different shards of one generation, each complete: cannot tell which is true"
            )
    return lost


def describe_lost(lost: Mapping[int, str]) -> str:
    """One clause for all owners that cannot be rebuilt, grouped by cause."""
    by_cause: dict[str, list[int]] = {}
    for owner, cause in sorted(lost.items()):
        by_cause.setdefault(cause, []).append(owner)
    parts = [
        f"{name_ranks(owners).replace('rank', 'owner', 1)} ({cause})"
        for cause, owners in by_cause.items()
    ]
    return "cannot rebuild " + ", ".join(parts)


def _reason(
    generation: Generation | None, committed: Generation | None, passed: Sequence[str]
) -> str:
    if generation is None:
        none = "no arena of this job holds a generation"
        text = f"nothing to restore: {'; '.join(passed) or none}"
    else:
        text = f"restoring {generation.describe()}"
        text += f"; passed over {'; '.join(passed)}" if passed else ", the newest that is there"
    if committed and (generation is None or generation < committed):
        text += f"; the committed step {committed.step} is lost"
    return text


def encode_report(report: Report) -> list[Any]:
    """The report as plain JSON values; ``decode_report`` checks every one of them."""
    rows = [
        [
            *_plain(h.generation),
            h.owner,
            h.fragment,
            h.world,
            h.kind.k,
            h.kind.m,
            h.kind.shard_bytes,
            h.kind.shard_digest,
        ]
        for h in report.holdings
    ]
    return [
        report.rank,
        rows,
        _plain(report.committed) if report.committed else None,
        list(report.failures),
    ]


def decode_reports(raw: bytes) -> tuple[Report, ...]:
    """The reports in a JSON list; ManifestError names what is wrong."""
    try:
        values = load(raw, "inventory")
    except RecoveryError as error:
        raise ManifestError(f"inventory: {error}") from error
    return reports_from(values)


def reports_from(values: Any) -> tuple[Report, ...]:
    """The reports in parsed JSON; ManifestError names what is wrong."""
    if not isinstance(values, list):
        raise ManifestError(f"inventory: expected a list of reports, got {_short(values)}")
    try:
        return tuple(_decode_report(*item) for item in values)
    except ManifestError:
        raise
    except (TypeError, ValueError) as error:
        raise ManifestError(f"inventory: {error}") from error


def merge_report_lists(values: Sequence[bytes]) -> bytes:
    """Lists of reports as one, every report checked where it is merged first."""
    found: list[Any] = []
    for value in values:
        items = load(value, "inventory")
        reports_from(items)
        found += items
    return dump(found)


def check_all_report(reports: Sequence[Report], world: int) -> None:
    """Raise ManifestError unless there is one report of every rank and of nobody else."""
    counts = Counter(report.rank for report in reports)
    missing = sorted(set(range(world)) - set(counts))
    odd = sorted(rank for rank, count in counts.items() if rank >= world or count > 1)
    if missing or odd:
        words = [f"no report of {name_ranks(missing)}"] if missing else []
        words += [f"one too many of {name_ranks(odd)}"] if odd else []
        raise ManifestError(f"inventory of {world} ranks: {' and '.join(words)}")


def _decode_report(rank: Any, rows: Any, committed: Any, failures: Any) -> Report:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < MAX_WORLD:
        raise ManifestError(f"inventory: rank is {_short(rank)}")
    holdings = tuple(_decode_row(rank, *row) for row in rows)
    newest = None if committed is None else Generation(*committed)
    if not isinstance(failures, list) or not all(isinstance(gen, str) for gen in failures):
        raise ManifestError(f"inventory of rank {rank}: failures are {_short(failures)}")
    return Report(rank, holdings, newest, tuple(failures))


def _decode_row(rank: int, *row: Any) -> Holding:
    epoch, step, gen, owner, fragment, world, k, m, shard_bytes, digest_hex = row
    numbers = (owner, fragment, world, shard_bytes)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ManifestError(f"inventory of rank {rank}: {_short(row)}")
    code = Code(k, m)
    if not (
        0 <= owner < world <= MAX_WORLD
        and WHOLE <= fragment < code.n
        and 0 <= shard_bytes < 1 << 50
    ):
        raise ManifestError(f"inventory of rank {rank}: {_short(row)} is out of range")
    raw = bytes.fromhex(digest_hex)
    if len(raw) != DIGEST_BYTES or raw.hex() != digest_hex:
        raise ManifestError(f"inventory of rank {rank}: digest {_short(digest_hex)}")
    return Holding(
        Generation(epoch, step, gen),
        owner,
        fragment,
        rank,
        world,
        ShardKind(k, m, shard_bytes, digest_hex),
    )


def _short(value: object) -> str:
    """What came, for an error's sentence, cut at a bound."""
    return repr(value)[:200]


def _plain(generation: Generation) -> list[Any]:
    return [generation.epoch, generation.step, generation.id]


def without(inventory: Inventory, bad: Iterable[Holding]) -> Inventory:
    """The inventory less holdings that turned out to be damaged or whose source failed."""
    gone = set(bad)
    unknown = [holding for holding in gone if holding not in inventory.holdings]
    if unknown:
        raise RecoveryError(f"{len(unknown)} holdings are not in the inventory, first {unknown[0]}")
    kept = tuple(holding for holding in inventory.holdings if holding not in gone)
    return Inventory(kept, inventory.committed, inventory.failures)
