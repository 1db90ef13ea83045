"""What some arenas, perhaps those of one host only, show of every generation.

Arenas are numbered in the order in which they are given; nobody has to be in a job for that, so a
dead one can be surveyed too. What lies in arenas that were not given is not known here: a count of
nodes that may be lost is a least one, unless the arenas of all ranks are among those given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from erasure.code import Code
from recovery.inventory import Holding, ShardKind, explain, recoverable, report_of, shard_sets
from recovery.manifest import ArenaHead, Generation, SlotRecord
from recovery.plan import owner_protection


@dataclass(frozen=True, kw_only=True)
class Place:
    """One arena as it was found: its node, its head if it can be read, its valid records."""

    node: str
    head: ArenaHead | None
    records: tuple[SlotRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One generation of one job in the arenas that were given.

    ``committed``: one of their heads says so. ``holdings``: their ``rank`` is the arena's number.
    ``missing``: the owners that these arenas alone cannot give back, with the cause.
    """

    job: str
    generation: Generation
    world: int
    code: Code
    committed: bool
    holdings: tuple[Holding, ...]
    missing: Mapping[int, str] = field(default_factory=dict)
    protection: int | None
    """How many more nodes may be lost; None: it cannot be told, for some owners are missing."""
    exact: bool
    """The arenas of all ranks are among those given; else ``protection`` is at least that."""

    @property
    def recoverable_owners(self) -> list[int]:
        """Those that these arenas alone give back."""
        return [owner for owner in range(self.world) if owner not in self.missing]


def survey(places: Sequence[Place]) -> list[Survey]:
    """Every generation of every job, by job, the newest first."""
    found: dict[tuple[str, Generation], list[Holding]] = {}
    for number, place in enumerate(places):
        for job in {record.job for record in place.records}:
            for holding in report_of(number, job, place.records).holdings:
                found.setdefault((job, holding.generation), []).append(holding)
    newest_first = sorted(found, key=lambda key: key[1], reverse=True)
    return [
        _survey(job, generation, tuple(sorted(found[job, generation])), places)
        for job, generation in sorted(newest_first, key=lambda key: key[0])
    ]


def newest_committed(heads: Iterable[ArenaHead]) -> dict[str, Generation | None]:
    """The newest committed generation of each job that the heads know."""
    newest: dict[str, Generation | None] = {}
    for head in heads:
        known = [one for one in (newest.get(head.job), head.committed) if one is not None]
        newest[head.job] = max(known, default=None)
    return dict(sorted(newest.items()))


def _survey(
    job: str, generation: Generation, holdings: tuple[Holding, ...], places: Sequence[Place]
) -> Survey:
    heads = [place.head for place in places if place.head is not None and place.head.job == job]
    world = max(holding.world for holding in holdings)
    sets = shard_sets(holdings)
    missing = {
        owner: cause
        for owner in range(world)
        if (cause := _missing(sets.get(owner, {}), holdings[0].kind.k))
    }
    nodes = [place.node for place in places]
    least = None
    if not missing:
        least = min(owner_protection(sets[owner], nodes) for owner in range(world))
    return Survey(
        job=job,
        generation=generation,
        world=world,
        code=holdings[0].kind.code,
        committed=any(head.committed == generation for head in heads),
        holdings=holdings,
        missing=missing,
        protection=least,
        exact={head.rank for head in heads} >= set(range(world)),
    )


def _missing(kinds: Mapping[ShardKind, Sequence[Holding]], k: int) -> str:
    good = [kind for kind, some in kinds.items() if recoverable(kind, some)]
    if len(good) > 1:
        return "two different shards, each complete"
    return "" if good else explain(kinds, k)
