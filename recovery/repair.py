"""From what a coding group holds of a generation to what makes it fully protected again (P10).

A stripe is whole when its owner has the shard in its own arena and n distinct fragments lie on n
other nodes, one on each. What lies well stays where it is, even where a layout of today's ranks
would not have put it; what is missing is made by the owner and sent to the layout's holder, or,
when that one is lost, to the node of the group that takes the fewest bytes. Fragments and copies
beyond that are sources here and no protection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from recovery.inventory import Holding, Inventory, ShardKind, explain, recoverable, shard_sets
from recovery.layout import Fragment, Layout
from recovery.manifest import WHOLE, Generation, SlotRecord
from recovery.plan import Rebuild, RestorePlan, owner_protection, rebuild_owner, tolerated_losses


@dataclass(frozen=True)
class Stripe:
    """One living owner: its shard, how it gets it (no reads: it has it), where fragments lie."""

    owner: int
    kind: ShardKind
    rebuild: Rebuild
    kept: tuple[Fragment, ...]
    sends: tuple[Fragment, ...]


@dataclass(frozen=True)
class Repair:
    """What a group does to protect ``generation``: frozen, sorted, printable.

    ``protections``: by owner, how many losses it survives that the repair cannot change.
    ``lacking``: in words, what cannot be had. ``lost``: ranks of the group that did not report.
    """

    generation: Generation
    layout: Layout
    stripes: tuple[Stripe, ...]
    protections: Mapping[int, int]
    lacking: tuple[str, ...]
    lost: tuple[int, ...] = ()

    def sent_by(self, rank: int) -> tuple[Fragment, ...]:
        return tuple(f for stripe in self.stripes if stripe.owner == rank for f in stripe.sends)

    def received_by(self, rank: int) -> tuple[Fragment, ...]:
        return tuple(f for stripe in self.stripes for f in stripe.sends if f.holder == rank)

    def kind_of(self, owner: int) -> ShardKind:
        return next(stripe.kind for stripe in self.stripes if stripe.owner == owner)

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Ranks that ``rank`` sends fragments to or receives them from."""
        peers = {f.holder for f in self.sent_by(rank)} | {f.owner for f in self.received_by(rank)}
        return tuple(sorted(peers))

    def needed_at(self, rank: int) -> frozenset[tuple[int, int]]:
        """(owner, fragment or WHOLE) that ``rank`` keeps once the repair is done."""
        fragments = {
            (f.owner, f.index)
            for stripe in self.stripes
            for f in (*stripe.kept, *stripe.sends)
            if f.holder == rank
        }
        wholes = {(stripe.owner, WHOLE) for stripe in self.stripes if stripe.owner == rank}
        return frozenset(fragments | wholes)

    def touched_by(self, rank: int) -> frozenset[tuple[int, int]]:
        """(owner, fragment or WHOLE) that ``rank`` serves or encodes: to look at if it fails."""
        moves = self.moves()
        read = {(r.owner, r.fragment) for r in moves.reads_from(rank)} if moves else set()
        return frozenset(read | ({(rank, WHOLE)} if self.sent_by(rank) else set()))

    def strays(self, rank: int, records: Mapping[int, SlotRecord]) -> tuple[int, ...]:
        """The slots of ``rank``, by number in ``records``, that protect nothing any more."""
        needed, seen, found = self.needed_at(rank), set(), []
        for number, record in sorted(records.items()):
            place = (record.owner, record.fragment)
            if record.generation == self.generation:
                if place not in needed or place in seen:
                    found.append(number)
                seen.add(place)
        return tuple(found)

    def moves(self) -> RestorePlan | None:
        """The reads of owners that lack their shard, as a plan by owner; None: there are none."""
        by_owner = {stripe.owner: stripe.rebuild for stripe in self.stripes}
        if not any(rebuild.reads for rebuild in by_owner.values()):
            return None
        nothing = ShardKind(1, 0, 0, "")
        world = self.layout.topology.world
        rebuilds = (by_owner.get(owner, Rebuild(owner, nothing, ())) for owner in range(world))
        return RestorePlan(self.generation, tuple(rebuilds))

    def moving_bytes(self) -> int:
        """The most that one rank of the group sends or receives."""
        moved: Counter[int] = Counter()
        for stripe in self.stripes:
            for fragment in stripe.sends:
                length = stripe.kind.code.length(fragment.index, stripe.kind.shard_bytes)
                moved[fragment.owner] += length
                moved[fragment.holder] += length
            for read in stripe.rebuild.reads:
                moved[read.to] += read.length
                moved[read.source] += read.length
        return max(moved.values(), default=0)

    def moving_bytes_max(self) -> int:
        """The most that it could be: every fragment and the shard of the largest owner."""
        most = max((stripe.kind.shard_bytes for stripe in self.stripes), default=0)
        return most * (self.layout.redundancy.n + 1)

    def protection(self, placed: Collection[Fragment]) -> int:
        """How many nodes may be lost once the fragments ``placed`` of its sends lie there."""
        node_of = self.layout.topology.node_of_rank
        found = list(self.protections.values())
        for stripe in self.stripes:
            there = [*stripe.kept, *(f for f in stripe.sends if f in placed)]
            counts = Counter(node_of[f.holder] for f in there)
            whole = frozenset({node_of[stripe.owner]})
            found.append(tolerated_losses(counts, whole, stripe.kind.k))
        return min(found, default=0)

    def describe(self) -> str:
        lines = [f"mend {self.generation.describe()}"]
        for stripe in self.stripes:
            reads = ", ".join(read.describe() for read in stripe.rebuild.reads)
            sends = ", ".join(f"{f.index}->{f.holder}" for f in stripe.sends)
            if reads or sends:
                parts = [f"reads {reads}" if reads else "", f"sends {sends}" if sends else ""]
                lines.append(f"owner {stripe.owner}: {'; '.join(filter(None, parts))}")
        return "\n".join([*lines, *self.lacking])


def make_repair(
    inventory: Inventory, generation: Generation, layout: Layout, group: int, alive: Sequence[int]
) -> Repair:
    """The repair of ``generation`` in coding group ``group``, the same on every rank.

    ``inventory``: the holdings of the ranks ``alive``; what the group's other ranks held is lost.
    """
    sets = shard_sets(
        h for h in inventory.holdings if h.generation == generation and h.rank in alive
    )
    load = dict.fromkeys(alive, 0)
    moved = [0] * layout.topology.world
    stripes: list[Stripe] = []
    protections: dict[int, int] = {}
    lacking: list[str] = []
    for owner in layout.ranks_of_group(group):
        kinds = sets.get(owner, {})
        protections[owner] = owner_protection(kinds, layout.topology.node_of_rank)
        good = [(kind, some) for kind, some in kinds.items() if recoverable(kind, some)]
        if owner not in alive:
            lacking.append(f"rank {owner} is lost")
        elif len(good) != 1:
            lacking.append(f"owner {owner}: {explain(kinds, layout.redundancy.k)}")
        elif good[0][0].code != layout.redundancy.code:
            lacking.append(f"owner {owner} was saved with another code: {good[0][0].code}")
        else:
            del protections[owner]
            stripe = _stripe(owner, *good[0], layout, alive, load=load, moved=moved)
            stripes.append(stripe)
            missing = layout.redundancy.n - len(stripe.kept) - len(stripe.sends)
            if missing:
                lacking.append(f"owner {owner}: no living node for {missing} of its fragments")
    lost = tuple(rank for rank in layout.ranks_of_group(group) if rank not in alive)
    return Repair(generation, layout, tuple(stripes), protections, tuple(lacking), lost)


def _stripe(
    owner: int,
    kind: ShardKind,
    holdings: Sequence[Holding],
    layout: Layout,
    alive: Sequence[int],
    *,
    load: dict[int, int],
    moved: list[int],
) -> Stripe:
    has_it = any(h.fragment == WHOLE and h.rank == owner for h in holdings)
    rebuild = (
        Rebuild(owner, kind, ())
        if has_it
        else rebuild_owner(owner, kind, holdings, layout.topology, load=moved, rejected=frozenset())
    )
    kept = _kept(owner, holdings, layout)
    for fragment in kept:
        load[fragment.holder] += kind.code.length(fragment.index, kind.shard_bytes)
    sends = _sends(owner, kind, kept, layout, alive, load=load)
    return Stripe(owner, kind, rebuild, kept, sends)


def _kept(owner: int, holdings: Iterable[Holding], layout: Layout) -> tuple[Fragment, ...]:
    """Fragments that lie well: distinct ones on distinct nodes, none of them the owner's.

    As many as can be (a matching of fragments and nodes), so that as little as can be is sent.
    """
    node_of = layout.topology.node_of_rank
    home = {(f.index, f.holder) for f in layout.sent_by(owner)}
    places = sorted(
        (h for h in holdings if h.fragment != WHOLE and node_of[h.rank] != node_of[owner]),
        key=lambda h: ((h.fragment, h.rank) not in home, h.fragment, h.rank),
    )
    by_fragment: dict[int, list[int]] = {}
    for place in places:
        by_fragment.setdefault(place.fragment, []).append(place.rank)
    on_node: dict[str, Fragment] = {}

    def find(index: int, tried: set[str]) -> bool:
        """Give fragment ``index`` a node, if need be by moving others to another of theirs."""
        for rank in by_fragment[index]:
            node = node_of[rank]
            if node in tried:
                continue
            tried.add(node)
            if node not in on_node or find(on_node[node].index, tried):
                on_node[node] = Fragment(owner, index, rank)
                return True
        return False

    for index in by_fragment:
        find(index, set())
    return tuple(sorted(on_node.values()))


def _sends(
    owner: int,
    kind: ShardKind,
    kept: Sequence[Fragment],
    layout: Layout,
    alive: Sequence[int],
    *,
    load: dict[int, int],
) -> tuple[Fragment, ...]:
    node_of = layout.topology.node_of_rank
    used = {node_of[owner], *(node_of[f.holder] for f in kept)}
    there = {f.index for f in kept}
    found = []
    for home in sorted(layout.sent_by(owner), key=lambda f: (f.holder not in alive, f.index)):
        if home.index in there:
            continue
        free = [rank for rank in alive if node_of[rank] not in used]
        if not free:
            break
        holder = home.holder if home.holder in free else min(free, key=lambda r: (load[r], r))
        used.add(node_of[holder])
        load[holder] += kind.code.length(home.index, kind.shard_bytes)
        found.append(Fragment(owner, home.index, holder))
    return tuple(sorted(found))
