"""From an inventory to the reads that give every owner its shard back: frozen, sorted, printable.

Order of sources for owner r, whose process is rank r: its own copy on its own arena; a whole copy
on another arena of its node; a whole copy on another node; k distinct fragments. Fragments of other
nodes come first and of those data fragments (no arithmetic); a fragment that happens to lie on r's
own node is used when the others do not suffice, so that the bytes a restore moves do not depend on
how the launcher numbered the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from erasure.digest import digest
from recovery.errors import Unrecoverable
from recovery.inventory import Holding, Inventory, ShardKind, explain, recoverable, shard_sets
from recovery.manifest import WHOLE, Generation
from recovery.topology import Topology

OWN, PEERS, NONE = "own", "peers", "none"
SUBSETS_MAX = 4096
"""How many k-subsets of an owner's fragments are tried before it counts as lost (P16)."""

Rejected = frozenset[tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, order=True)
class Read:
    """Rank ``to`` needs ``fragment`` (or WHOLE) of ``owner`` from the arena of rank ``source``.

    ``local``: both ranks run on one node, so the bytes are read from its memory and not sent.
    """

    to: int
    owner: int
    fragment: int
    source: int
    length: int
    local: bool

    def describe(self) -> str:
        part = "all" if self.fragment == WHOLE else self.fragment
        return f"{part}<-{self.source}{' (here)' if self.local else ''}"

    def words(self) -> str:
        """The same for who does not know plans."""
        part = "the whole copy" if self.fragment == WHOLE else f"fragment {self.fragment}"
        return f"{part} of rank {self.owner}'s state in the memory of rank {self.source}"


@dataclass(frozen=True)
class Rebuild:
    """How rank ``owner`` gets its shard: one whole read, or k fragments that are decoded."""

    owner: int
    kind: ShardKind
    reads: tuple[Read, ...]

    @property
    def fragments(self) -> tuple[int, ...]:
        return tuple(sorted(read.fragment for read in self.reads))

    @property
    def source(self) -> str:
        """The farthest tier that this rebuild reads from."""
        return OWN if all(read.local for read in self.reads) else PEERS


@dataclass(frozen=True)
class RestorePlan:
    """Every rank's rebuild in one generation, by owner."""

    generation: Generation
    rebuilds: tuple[Rebuild, ...]

    def reads_from(self, rank: int) -> tuple[Read, ...]:
        """Reads that ``rank``'s arena serves, to itself, its node or over the network; sorted."""
        return tuple(
            sorted(r for rebuild in self.rebuilds for r in rebuild.reads if r.source == rank)
        )

    def received_bytes(self, rank: int) -> int:
        return sum(read.length for read in self.rebuilds[rank].reads if not read.local)

    def peers_of(self, rank: int) -> tuple[int, ...]:
        pairs = [
            (r.source, r.to) for rebuild in self.rebuilds for r in rebuild.reads if not r.local
        ]
        return tuple(sorted({a + b - rank for a, b in pairs if rank in (a, b)}))

    def fingerprint(self) -> str:
        return digest(self.describe().encode()).hex()

    def describe(self) -> str:
        lines = [f"restore {self.generation.describe()}"]
        for rebuild in self.rebuilds:
            reads = ", ".join(read.describe() for read in rebuild.reads)
            lines.append(f"owner {rebuild.owner}: {rebuild.kind.shard_bytes} bytes, {reads}")
        return "\n".join(lines)


def make_plan(
    inventory: Inventory,
    generation: Generation,
    topology: Topology,
    rejected: Rejected = frozenset(),
) -> RestorePlan:
    """The plan for ``generation``, the same on every rank.

    ``rejected``: (owner, fragments) that decoded to a wrong shard although every fragment verified.
    Raises Unrecoverable naming the owner when one cannot be rebuilt.
    """
    sets = shard_sets(h for h in inventory.holdings if h.generation == generation)
    load = [0] * topology.world
    rebuilds = []
    for owner in range(topology.world):
        kinds = sets.get(owner, {})
        good = [(kind, some) for kind, some in kinds.items() if recoverable(kind, some)]
        if len(good) != 1:
            raise Unrecoverable(
                f"{generation.describe()}: owner {owner}: {explain(kinds, _any_k(sets))}"
            )
        rebuilds.append(rebuild_owner(owner, *good[0], topology, load=load, rejected=rejected))
    return RestorePlan(generation, tuple(rebuilds))


def _any_k(sets: Mapping[int, Mapping[ShardKind, Sequence[Holding]]]) -> int:
    return next((kind.k for kinds in sets.values() for kind in kinds), 0)


def rebuild_owner(
    owner: int,
    kind: ShardKind,
    holdings: Sequence[Holding],
    topology: Topology,
    *,
    load: list[int],
    rejected: Rejected,
) -> Rebuild:
    """How one owner gets its shard from ``holdings``, which suffice.

    ``load``: bytes that each rank serves so far; what this rebuild asks of them is added.
    """
    wholes = [h for h in holdings if h.fragment == WHOLE]
    if wholes:
        best = min(wholes, key=lambda h: _whole_cost(h, topology, load))
        reads = [_read(best, topology)]
    else:
        reads = _fragment_reads(owner, kind, holdings, topology, load=load, rejected=rejected)
    for read in reads:
        load[read.source] += 0 if read.local else read.length
    return Rebuild(owner, kind, tuple(sorted(reads)))


def _whole_cost(
    holding: Holding, topology: Topology, load: Sequence[int]
) -> tuple[bool, bool, int, int]:
    here, node = holding.rank == holding.owner, topology.same_node(holding.rank, holding.owner)
    return (not here, not node, load[holding.rank], holding.rank)


def _fragment_reads(
    owner: int,
    kind: ShardKind,
    holdings: Sequence[Holding],
    topology: Topology,
    *,
    load: Sequence[int],
    rejected: Rejected,
) -> list[Read]:
    best: dict[int, Holding] = {}
    for holding in sorted(
        holdings, key=lambda h: (topology.same_node(h.rank, owner), load[h.rank], h.rank)
    ):
        best.setdefault(holding.fragment, holding)
    order = sorted(
        best.values(),
        key=lambda h: (topology.same_node(h.rank, owner), h.fragment >= kind.k, h.fragment),
    )
    for subset in islice(combinations(order, kind.k), SUBSETS_MAX):
        if (owner, tuple(sorted(h.fragment for h in subset))) not in rejected:
            return [_read(holding, topology) for holding in subset]
    raise Unrecoverable(f"owner {owner}: every set of {kind.k} fragments decodes to a wrong shard")


def _read(holding: Holding, topology: Topology) -> Read:
    local = topology.same_node(holding.rank, holding.owner)
    return Read(holding.owner, holding.owner, holding.fragment, holding.rank, holding.length, local)


def tolerated_losses(node_fragments: Mapping[str, int], whole_nodes: frozenset[str], k: int) -> int:
    """How many more nodes may die before an owner is lost.

    ``node_fragments[node]`` counts the distinct fragments on that node. Every node with a whole
    copy must die, and after that nodes with most fragments first until fewer than k are left: that
    many minus one are survivable.
    """
    left = sorted(
        (count for node, count in node_fragments.items() if node not in whole_nodes), reverse=True
    )
    kills, total = len(whole_nodes), sum(left)
    for count in left:
        if total < k:
            break
        total -= count
        kills += 1
    return kills - 1


def protection(inventory: Inventory, generation: Generation, topology: Topology) -> int:
    """How many more nodes may die now without losing ``generation``; -1: it is lost already.

    The least over all owners. A fragment that lies on several nodes counts on one of them, so the
    answer may be too low but never too high.
    """
    sets = shard_sets(h for h in inventory.holdings if h.generation == generation)
    return min(
        owner_protection(sets.get(owner, {}), topology.node_of_rank)
        for owner in range(topology.world)
    )


def owner_protection(
    kinds: Mapping[ShardKind, Sequence[Holding]], node_of_rank: Sequence[str]
) -> int:
    """The same for one owner, from its holdings by kind."""
    good = [(kind, some) for kind, some in kinds.items() if recoverable(kind, some)]
    if len(good) != 1:
        return -1
    kind, holdings = good[0]
    places = [(node_of_rank[h.rank], h.fragment) for h in holdings]
    wholes = frozenset(node for node, fragment in places if fragment == WHOLE)
    home: dict[int, str] = {}
    for node, fragment in sorted(places, key=lambda place: (place[0] in wholes, place)):
        if fragment != WHOLE:
            home.setdefault(fragment, node)
    return tolerated_losses(Counter(home.values()), wholes, kind.k)
