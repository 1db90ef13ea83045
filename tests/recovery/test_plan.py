"""Plans against brute force at small sizes: what they read, from where, and what is left."""

from __future__ import annotations

from itertools import combinations, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import Unrecoverable
from recovery.inventory import Inventory, choose
from recovery.manifest import WHOLE
from recovery.plan import OWN, PEERS, SUBSETS_MAX, make_plan, protection, tolerated_losses
from recovery.topology import Topology
from tests.recovery.rigs import RestoreRig, layout_of, topology_of
from tests.recovery.test_inventory import MID, NEW, hold, kind_of


@st.composite
def situations(draw, unique=False):
    """Draw a topology and what its ranks hold of one generation: one kind for each owner.

    With ``unique`` no fragment lies on two nodes.
    """
    nodes = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4))
    topology = Topology(tuple(nodes))
    rank = st.integers(0, topology.world - 1)
    holdings = []
    for owner in range(topology.world):
        k = draw(st.integers(1, 3))
        kind = kind_of(k, 2, "0123"[owner])
        fewest = draw(st.integers(0, 3)) > 0  # most owners can be rebuilt, or few plans are seen
        places = {WHOLE: draw(st.sets(rank, max_size=2))}
        for index in range(k + 2):
            places[index] = draw(st.sets(rank, min_size=fewest, max_size=1 if unique else 2))
        holdings += [
            hold(NEW, owner, fragment, holder, topology.world, kind=kind)
            for fragment, holders in places.items()
            for holder in holders
        ]
    return topology, Inventory(tuple(sorted(holdings)))


def recoverable(holdings, owner, k):
    """Say by trying whether a whole copy or some k different fragments of the owner are there."""
    mine = [h.fragment for h in holdings if h.owner == owner]
    return WHOLE in mine or any(len(set(some)) == k for some in combinations(mine, k))


def cost(holdings, topology, owner, k):
    """Return the tier of the nearest source, by trying all: 0 own arena .. 3 fragments, 4 none."""
    wholes = [h.rank for h in holdings if h.owner == owner and h.fragment == WHOLE]
    if owner in wholes:
        return 0
    if any(topology.same_node(rank, owner) for rank in wholes):
        return 1
    if wholes:
        return 2
    return 3 if recoverable(holdings, owner, k) else 4


@given(situations())
def test_every_read_is_there_is_needed_and_comes_from_the_nearest_tier(situation):
    """Random holdings: each owner is read from its nearest source, or named as lost."""
    topology, inventory = situation
    kinds = {h.owner: h.kind for h in inventory.holdings}
    tiers = [
        cost(inventory.holdings, topology, owner, kinds[owner].k) if owner in kinds else 4
        for owner in range(topology.world)
    ]
    if 4 in tiers:
        with pytest.raises(Unrecoverable, match=f"owner {tiers.index(4)}:"):
            make_plan(inventory, NEW, topology)
        assert choose(inventory).generation is None
        return
    plan = make_plan(inventory, NEW, topology)
    there = {(h.owner, h.fragment, h.rank): h.length for h in inventory.holdings}
    for owner, (rebuild, tier) in enumerate(zip(plan.rebuilds, tiers, strict=True)):
        assert rebuild.owner == owner
        for read in rebuild.reads:
            assert there[owner, read.fragment, read.source] == read.length
            assert (read.owner, read.to) == (owner, owner)
            assert read.local == topology.same_node(read.source, owner)
        if tier < 3:
            (read,) = rebuild.reads
            assert read.fragment == WHOLE
            assert tier == (0 if read.source == owner else 1 if read.local else 2)
        else:
            assert len(set(rebuild.fragments)) == len(rebuild.reads) == rebuild.kind.k
            assert WHOLE not in rebuild.fragments
        remote = any(not read.local for read in rebuild.reads)
        assert rebuild.source == (PEERS if remote else OWN)


@given(situations())
def test_fragments_come_from_other_nodes_and_without_arithmetic_where_they_can(situation):
    """The k fragments that are read: fewest from the own node, and of those most data fragments."""
    topology, inventory = situation
    try:
        plan = make_plan(inventory, NEW, topology)
    except Unrecoverable:
        return
    for rebuild in plan.rebuilds:
        if WHOLE in rebuild.fragments:
            continue
        k = rebuild.kind.k
        mine = [h for h in inventory.holdings if h.owner == rebuild.owner]
        sets = [some for some in combinations(mine, k) if len({h.fragment for h in some}) == k]
        best = min(
            (
                sum(topology.same_node(h.rank, rebuild.owner) for h in some),
                sum(h.fragment >= k for h in some),
            )
            for some in sets
        )
        local = sum(read.local for read in rebuild.reads)
        assert (local, sum(f >= k for f in rebuild.fragments)) == best


@given(situations(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_holdings(situation, rng):
    """Shuffled holdings give the same plan, word for word, and the same fingerprint."""
    topology, inventory = situation
    mixed = Inventory(tuple(rng.sample(inventory.holdings, len(inventory.holdings))))
    try:
        plan = make_plan(inventory, NEW, topology)
    except Unrecoverable:
        with pytest.raises(Unrecoverable):
            make_plan(mixed, NEW, topology)
        return
    assert make_plan(mixed, NEW, topology) == plan
    assert make_plan(mixed, NEW, topology).fingerprint() == plan.fingerprint()


@given(situations())
def test_what_is_served_is_what_is_read(situation):
    """Each read is served by one rank; bytes and peers are sums over the reads that travel."""
    topology, inventory = situation
    try:
        plan = make_plan(inventory, NEW, topology)
    except Unrecoverable:
        return
    ranks = range(topology.world)
    reads = sorted(read for rebuild in plan.rebuilds for read in rebuild.reads)
    assert sorted(read for rank in ranks for read in plan.reads_from(rank)) == reads
    for rank in ranks:
        far = [read for read in reads if not read.local and rank in {read.to, read.source}]
        peers = {read.to for read in far} | {read.source for read in far}
        assert plan.peers_of(rank) == tuple(sorted(peers - {rank}))
        assert plan.received_bytes(rank) == sum(r.length for r in far if r.to == rank)


def test_other_generations_are_never_read():
    """The newest lacks a fragment that the older one has: it is not taken from there."""
    two = kind_of(2, 1)
    inventory = Inventory((hold(NEW, 0, 0, kind=two), hold(MID, 0, 1, kind=two)))
    with pytest.raises(Unrecoverable, match="1 of 2 distinct fragments"):
        make_plan(inventory, NEW, topology_of(1))


def test_an_incomplete_other_shard_is_left_aside():
    """One fragment of a shard with another digest lies about: the complete one is read."""
    right, other = kind_of(2, 1, "0"), kind_of(2, 1, "1")
    holdings = [hold(NEW, 0, i, kind=right) for i in (1, 2)] + [hold(NEW, 0, 0, kind=other)]
    (rebuild,) = make_plan(Inventory(tuple(sorted(holdings))), NEW, topology_of(1)).rebuilds
    assert (rebuild.kind, rebuild.fragments) == (right, (1, 2))


def test_rejected_sets_are_passed_over_until_none_is_left():
    """Every set of two of four fragments is rejected in turn: six plans, then no more."""
    two = kind_of(2, 2)
    inventory = Inventory(tuple(hold(NEW, 0, i, kind=two) for i in range(4)))
    rejected = frozenset()
    for count in range(6):
        plan = make_plan(inventory, NEW, topology_of(1), rejected)
        (rebuild,) = plan.rebuilds
        assert (0, rebuild.fragments) not in rejected
        rejected |= {(0, rebuild.fragments)}
        assert len(rejected) == count + 1
    with pytest.raises(Unrecoverable, match="every set of 2 fragments decodes to a wrong shard"):
        make_plan(inventory, NEW, topology_of(1), rejected)
    other_owner = frozenset((1, fragments) for _, fragments in rejected)
    make_plan(inventory, NEW, topology_of(1), other_owner)


@pytest.mark.parametrize("fragments", [(WHOLE,), (0,)])
def test_several_lost_owners_share_the_sources(fragments):
    """Four owners of one lost node, all that they need on either of two others: two from each."""
    topology = topology_of(4, 1, 1)
    holdings = [
        hold(NEW, owner, f, rank, 6) for owner in range(4) for f in fragments for rank in (4, 5)
    ]
    holdings += [hold(NEW, owner, WHOLE, owner, 6) for owner in (4, 5)]
    plan = make_plan(Inventory(tuple(sorted(holdings))), NEW, topology)
    assert sorted(plan.rebuilds[owner].reads[0].source for owner in range(4)) == [4, 4, 5, 5]


def test_a_plan_describes_itself():
    """The printed plan, in full: it is what the ranks' fingerprints are made from."""
    two = kind_of(2, 1)
    holdings = (hold(NEW, 0, WHOLE, 0, 2), hold(NEW, 1, 0, 0, 2, kind=two))
    inventory = Inventory((*holdings, hold(NEW, 1, 2, 1, 2, kind=two)))
    plan = make_plan(inventory, NEW, topology_of(1, 1))
    assert plan.describe() == (
        "restore step 4 (epoch 2, cccccccc)\n"
        "owner 0: 100 bytes, all<-0 (here)\n"
        "owner 1: 100 bytes, 0<-0, 2<-1 (here)"
    )


@st.composite
def spreads(draw):
    """Draw fragments on nodes, each on one, nodes with a whole copy, and k."""
    k = draw(st.integers(1, 4))
    homes = draw(st.lists(st.sampled_from("abcdef"), max_size=k + 3))
    wholes = frozenset(draw(st.sets(st.sampled_from("abcdef"), max_size=3)))
    return k, homes, wholes


@given(spreads())
def test_tolerated_losses_are_those_of_brute_force(spread):
    """The smallest set of nodes whose death loses the owner, by trying all sets, less one."""
    k, homes, wholes = spread
    counts = {node: homes.count(node) for node in set(homes)}
    if not wholes and len(homes) < k:
        return

    def lost(dead):
        return wholes <= dead and sum(home not in dead for home in homes) < k

    smallest = min(
        len(dead) for size in range(7) for dead in combinations("abcdef", size) if lost(set(dead))
    )
    assert tolerated_losses(counts, wholes, k) == smallest - 1


def brute_protection(topology, inventory):
    """Return how many nodes may die whichever they are, by trying all sets of them; -1: none."""
    kinds = {h.owner: h.kind for h in inventory.holdings}
    for size in range(len(topology.nodes) + 1):
        for dead in combinations(topology.nodes, size):
            left = [h for h in inventory.holdings if topology.node_of_rank[h.rank] not in dead]
            for owner in range(topology.world):
                if owner not in kinds or not recoverable(left, owner, kinds[owner].k):
                    return size - 1
    raise AssertionError("an owner survived the death of all nodes")


@given(situations(unique=True))
def test_protection_is_that_of_brute_force(situation):
    """Each fragment in one place: exactly as many nodes may die as trying all sets tells."""
    topology, inventory = situation
    assert protection(inventory, NEW, topology) == brute_protection(topology, inventory)


@given(situations())
def test_protection_never_promises_too_much(situation):
    """Fragments in several places: never more than brute force allows, and -1 when it is lost."""
    topology, inventory = situation
    told, true = protection(inventory, NEW, topology), brute_protection(topology, inventory)
    assert told <= true
    assert (told == -1) == (true == -1)


def test_a_fragment_in_two_places_is_not_two_fragments():
    """Fragment 0 on nodes a and b, 1 on c, k = 2: the death of c alone is fatal."""
    two = kind_of(2, 1)
    holdings = [hold(NEW, 0, f, rank, 1, kind=two) for f, rank in [(0, 0), (0, 1), (1, 2)]]
    topology = topology_of(1, 1, 1)
    whole = [hold(NEW, owner, WHOLE, rank) for owner in (1, 2) for rank in range(3)]
    assert protection(Inventory((*holdings, *whole)), NEW, topology) == 0


def test_two_complete_shards_protect_nothing():
    """What restore would not trust does not count as protected."""
    holdings = (hold(NEW, 0, WHOLE), hold(NEW, 0, 0, kind=kind_of(1, 0, "1")))
    assert choose(Inventory(holdings)).generation is None
    assert protection(Inventory(holdings), NEW, topology_of(1)) == -1


@pytest.mark.parametrize(
    ("redundancy", "nodes"),
    [("none", (2,)), ("copies:1", (1, 1)), ("copies:2", (2, 2, 2)), ("stripe:2+1", (1,) * 5)],
)
def test_protection_after_a_save_is_what_the_layout_promises(redundancy, nodes):
    """Everything held: as many nodes may die as the layout says; after losses, fewer."""
    rig = RestoreRig(layout_of(redundancy, *nodes))
    for lost in range(rig.saved.redundancy.survivable_nodes + 1):
        inventory = Inventory(
            tuple(
                h for rank in range(rig.topology.world) for h in rig.context(rank).report.holdings
            )
        )
        left = protection(inventory, rig.generations[-1], rig.topology)
        assert left == rig.saved.redundancy.survivable_nodes - lost
        rig.lose(rig.topology.nodes[lost])


def test_when_nothing_at_all_is_there_the_plan_says_so():
    """No holding of any owner, so no k is known either: none of none."""
    with pytest.raises(Unrecoverable, match="owner 0: 0 of 0 distinct fragments"):
        make_plan(Inventory(()), NEW, topology_of(1))


def test_no_more_than_so_many_sets_are_tried():
    """8+8 has 12,870 sets; the first 4,096 decoded to a wrong shard: the owner counts as lost."""
    kind = kind_of(8, 8)
    inventory = Inventory(tuple(hold(NEW, 0, i, kind=kind) for i in range(16)))
    sets = [(0, some) for some in islice(combinations(range(16), 8), SUBSETS_MAX)]
    with pytest.raises(Unrecoverable, match="every set of 8 fragments"):
        make_plan(inventory, NEW, topology_of(1), frozenset(sets))
    (rebuild,) = make_plan(inventory, NEW, topology_of(1), frozenset(sets[:-1])).rebuilds
    assert (0, rebuild.fragments) == sets[-1]
