"""What makes a group's generation fully protected again, against a twin that tries every loss."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.inventory import Inventory, ShardKind
from recovery.layout import Fragment
from recovery.manifest import WHOLE
from recovery.repair import make_repair
from tests.recovery.mending import (
    GENERATION,
    SIZE,
    holding,
    inventory_of,
    stock_of,
    true_protection,
)
from tests.recovery.rigs import digest_of, generation_of, layout_of

LAYOUTS = [
    ("copies:1", (1, 1)),
    ("copies:1", (2, 2)),
    ("copies:2", (1, 1, 1)),
    ("copies:1", (1, 1, 1)),
    ("stripe:1+1", (1, 1, 1)),
    ("stripe:1+1", (2, 2, 2)),
    ("stripe:2+1", (1, 1, 1, 1)),
    ("stripe:2+1", (1, 1, 1, 1, 1, 1)),
    ("stripe:2+1", (2, 1, 1, 2)),
    ("stripe:3+1", (1, 1, 1, 1, 1)),
    ("stripe:2+2", (1, 1, 1, 1, 1)),
]


def repair_of(layout, stock, alive=None):
    """Return the repair of group 0 when the ranks ``alive`` have reported this stock."""
    alive = tuple(layout.ranks_of_group(0)) if alive is None else tuple(alive)
    seen = {rank: places for rank, places in stock.items() if rank in alive}
    return make_repair(inventory_of(layout, seen), GENERATION, layout, 0, alive)


def applied(repair, stock, alive):
    """Return the stock once the repair is done and what it needs no more is gone.

    What is left of owners that it could not repair stays as it is.
    """
    repaired = {stripe.owner for stripe in repair.stripes}
    after = {}
    for rank in alive:
        others = {place for place in stock[rank] if place[0] not in repaired}
        after[rank] = others | repair.needed_at(rank)
    return after


def most_kept(layout, stock, owner):
    """Return how many distinct fragments lie on as many distinct nodes other than the owner's."""
    node_of = layout.topology.node_of_rank
    places = {
        (fragment, node_of[rank])
        for rank, held in stock.items()
        for place_owner, fragment in held
        if place_owner == owner and fragment != WHOLE and node_of[rank] != node_of[owner]
    }
    for count in range(layout.redundancy.n, 0, -1):
        for some in combinations(sorted(places), count):
            if len({f for f, _ in some}) == len({node for _, node in some}) == count:
                return count
    return 0


def check(layout, stock, alive):
    """Check everything that a repair promises of this stock; return it."""
    repair = repair_of(layout, stock, alive)
    node_of, n = layout.topology.node_of_rank, layout.redundancy.n
    group = layout.ranks_of_group(0)
    living = {node_of[rank] for rank in alive}
    seen = {rank: stock[rank] for rank in alive}
    for stripe in repair.stripes:
        assert stripe.owner in alive
        has_it = (stripe.owner, WHOLE) in seen[stripe.owner]
        assert has_it != bool(stripe.rebuild.reads)
        for read in stripe.rebuild.reads:
            assert (read.owner, read.fragment) in seen[read.source]
            assert (read.to, read.owner) == (stripe.owner, stripe.owner)
        fragments = {read.fragment for read in stripe.rebuild.reads}
        assert has_it or fragments == {WHOLE} or len(fragments) == layout.redundancy.k
        assert all((stripe.owner, f.index) in seen[f.holder] for f in stripe.kept)
        assert len(stripe.kept) == most_kept(layout, seen, stripe.owner)
        there = [*stripe.kept, *stripe.sends]
        nodes = [node_of[f.holder] for f in there]
        assert len({f.index for f in there}) == len(set(nodes)) == len(there)
        assert set(nodes) <= living - {node_of[stripe.owner]}
        assert len(there) == min(n, len(living) - 1)
        assert all(f.owner == stripe.owner for f in there)
    sends = [f for stripe in repair.stripes for f in stripe.sends]
    after = applied(repair, seen, alive)
    told = repair.protection(sends)
    truth = true_protection(after, layout, group)
    assert told <= truth
    repaired = [stripe.owner for stripe in repair.stripes]
    if len(repaired) == len(group):
        assert told == truth
    if len(living) > n:
        assert true_protection(after, layout, repaired) >= layout.redundancy.survivable_nodes
        if len(repaired) == len(group):
            assert told == layout.redundancy.survivable_nodes
            assert repair.lacking == ()
    assert repair.lost == tuple(rank for rank in group if rank not in alive)
    assert bool(repair.lacking) >= (len(repaired) < len(group))
    return repair


def every_loss(layout):
    """Yield every stock that is left of a whole one, slot by slot."""
    whole = sorted((rank, place) for rank, places in stock_of(layout).items() for place in places)
    for flags in product([False, True], repeat=len(whole)):
        stock = {rank: set() for rank in range(layout.topology.world)}
        for (rank, place), there in zip(whole, flags, strict=True):
            if there:
                stock[rank].add(place)
        yield stock


@pytest.mark.parametrize(
    ("redundancy", "nodes"),
    [("copies:1", (1, 1)), ("copies:1", (1, 1, 1)), ("copies:2", (1, 1, 1))],
)
def test_every_loss_of_slots_and_ranks_in_small_groups(redundancy, nodes):
    """Every subset of slots, with every set of ranks silent: all that ``check`` asks."""
    layout = layout_of(redundancy, *nodes)
    world = range(layout.topology.world)
    fulls = 0
    for stock in every_loss(layout):
        for count in range(1, len(world) + 1):
            for alive in combinations(world, count):
                repair = check(layout, stock, alive)
                fulls += not repair.lacking
    assert fulls > 3


def test_a_coded_group_survives_every_loss_of_slots_that_leaves_it_recoverable():
    """1+1 on three nodes, all 512 subsets of its slots: full again wherever all owners are left."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    full = 0
    for stock in every_loss(layout):
        repair = check(layout, stock, (0, 1, 2))
        recoverable = true_protection(stock, layout, range(3)) >= 0
        assert (not repair.lacking) == recoverable
        full += recoverable
    assert full == 343  # each owner has one of 7 non-empty sets of its three places


@st.composite
def stocks(draw):
    """Draw a layout, fragments and copies lying anywhere, and who is there."""
    redundancy, nodes = draw(st.sampled_from(LAYOUTS))
    layout = layout_of(redundancy, *nodes)
    group = layout.ranks_of_group(0)
    stock = {rank: set() for rank in group}
    for owner in group:
        for fragment in range(WHOLE, layout.redundancy.n):
            for rank in draw(st.sets(st.sampled_from(group), max_size=2)):
                stock[rank].add((owner, fragment))
    alive = draw(st.sets(st.sampled_from(group), min_size=1)) | draw(
        st.sampled_from([set(group), set()])
    )
    return layout, stock, tuple(sorted(alive))


@given(stocks())
def test_whatever_lies_wherever_is_made_whole_or_told(drawn):
    """Fragments and copies strewn over a group, some twice, some ranks gone."""
    check(*drawn)


@given(stocks(), st.randoms(use_true_random=False))
def test_every_rank_makes_the_same_repair(drawn, shuffled):
    """The holdings in another order give the same repair, and it prints itself."""
    layout, stock, alive = drawn
    seen = {rank: places for rank, places in stock.items() if rank in alive}
    inventory = inventory_of(layout, seen)
    rows = list(inventory.holdings)
    shuffled.shuffle(rows)
    again = make_repair(Inventory(tuple(rows)), GENERATION, layout, 0, alive)
    mine = repair_of(layout, stock, alive)
    assert again == mine
    assert mine.describe().startswith(f"mend {GENERATION.describe()}")


@given(stocks())
def test_every_subset_that_was_placed_is_told_truly(drawn):
    """Not all sends arrive: the protection told of what did is never above the true one."""
    layout, stock, alive = drawn
    repair = repair_of(layout, stock, alive)
    sends = [f for stripe in repair.stripes for f in stripe.sends]
    seen = {rank: stock[rank] for rank in alive}
    some = chain.from_iterable(combinations(sends, count) for count in range(min(3, len(sends))))
    for missing in some:
        after = applied(repair, seen, alive)
        for f in missing:
            after[f.holder].discard((f.owner, f.index))
        told = repair.protection(set(sends) - set(missing))
        truth = true_protection(after, layout, layout.ranks_of_group(0))
        assert told <= truth
        if len(repair.stripes) == len(layout.ranks_of_group(0)):
            assert told == truth


@given(stocks())
def test_bytes_and_peers_are_those_of_the_reads_and_sends(drawn):
    """The most that a rank moves, who moves what and with whom, counted once more by hand."""
    layout, stock, alive = drawn
    repair = repair_of(layout, stock, alive)
    code, moved, peers = layout.redundancy.code, Counter(), {rank: set() for rank in alive}
    for stripe in repair.stripes:
        for f in stripe.sends:
            for rank, other in ((f.owner, f.holder), (f.holder, f.owner)):
                moved[rank] += code.length(f.index, SIZE)
                peers[rank].add(other)
        for read in stripe.rebuild.reads:
            moved[read.to] += read.length
            moved[read.source] += read.length
    assert repair.moving_bytes() == max(moved.values(), default=0)
    for rank in alive:
        assert repair.peers_of(rank) == tuple(sorted(peers[rank]))
        assert all(f.owner == rank for f in repair.sent_by(rank))
        assert all(f.holder == rank for f in repair.received_by(rank))
        assert all(repair.kind_of(f.owner).shard_bytes == SIZE for f in repair.received_by(rank))
    moves = repair.moves()
    reads = [read for stripe in repair.stripes for read in stripe.rebuild.reads]
    assert (moves is None) == (not reads)
    if moves is not None:
        assert len(moves.rebuilds) == layout.topology.world
        assert sorted(r for rebuild in moves.rebuilds for r in rebuild.reads) == sorted(reads)


@pytest.mark.parametrize(("redundancy", "nodes"), LAYOUTS)
def test_what_is_whole_is_left_alone(redundancy, nodes):
    """Nothing lost: nothing is read or sent, and the protection is the layout's."""
    layout = layout_of(redundancy, *nodes)
    repair = check(layout, stock_of(layout), layout.ranks_of_group(0))
    assert (repair.moving_bytes(), repair.moves(), repair.lacking) == (0, None, ())
    assert repair.protection(()) == layout.redundancy.survivable_nodes


def test_what_lies_well_stays_where_todays_layout_would_not_put_it():
    """A fragment on the one node that has none at home: that place counts, only one is sent."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1, 1)
    stock = stock_of(layout)
    stock[1].discard((0, 0))
    stock[4].add((0, 0))
    repair = check(layout, stock, range(5))
    assert repair.moving_bytes() == 0
    assert Fragment(0, 0, 4) in repair.stripes[0].kept


def test_two_fragments_on_one_node_do_not_both_count():
    """Node b has fragments 0 and 1, c has 0: 0 counts at c and 1 at b, so that one is sent."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    stock = stock_of(layout)
    stock[1] = {(1, WHOLE), *((f.owner, f.index) for f in layout.held_by(1)), (0, 1)}
    stock[2] = stock[2] - {(0, 1)} | {(0, 0)}
    stock[3] = stock[3] - {(0, 2)}
    repair = check(layout, stock, range(4))
    assert repair.stripes[0].kept == (Fragment(0, 0, 2), Fragment(0, 1, 1))
    assert repair.stripes[0].sends == (Fragment(0, 2, 3),)


def test_a_lost_rank_is_mended_around_where_there_are_nodes_for_it():
    """2+1 on five nodes, one lost: its fragments go to the one node that has none of them."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1, 1)
    repair = check(layout, stock_of(layout), (0, 1, 2, 3))
    assert repair.lost == (4,)
    assert repair.lacking == ("rank 4 is lost",)
    assert len(repair.stripes) == 4
    # Owner 4 lives on in its three fragments.
    assert repair.protection([f for s in repair.stripes for f in s.sends]) == 1


def test_a_lost_rank_in_a_group_without_room_leaves_the_others_degraded():
    """2+1 on four nodes, one lost: nothing can be sent, and that is told by owner."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    repair = check(layout, stock_of(layout), (0, 1, 2))
    assert [stripe.sends for stripe in repair.stripes] == [(), (), ()]
    assert "owner 0: no living node for 1 of its fragments" in repair.lacking


def test_an_owner_of_another_code_or_of_two_shards_is_left_alone():
    """A generation saved with another layout gets no fragments of this one: it would be two."""
    layout = layout_of("copies:1", 1, 1)
    other = ShardKind(2, 1, SIZE, digest_of(GENERATION, 0).hex())
    twin = ShardKind(1, 0, SIZE, digest_of(GENERATION, 1).hex())
    rows = (
        holding(layout, 0, 0, WHOLE, other),
        holding(layout, 1, 0, 1, other),
        holding(layout, 1, 1, WHOLE),
        holding(layout, 0, 1, 0, replace(twin, shard_digest="0" * 32)),
    )
    repair = make_repair(Inventory(tuple(sorted(rows))), GENERATION, layout, 0, (0, 1))
    assert repair.stripes == ()
    assert repair.moves() is None
    assert repair.protection(()) == -1
    assert [words.partition(":")[0] for words in repair.lacking] == [
        "owner 0 was saved with another code",
        "owner 1",
    ]


def test_uneven_and_empty_shards_are_counted_by_their_own_size():
    """An owner with nothing and one with a lot: bytes by size, fragments for both."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    code = layout.redundancy.code
    sizes = [0, 1, 5000, 10]
    kinds = [ShardKind(2, 1, sizes[o], digest_of(GENERATION, o).hex()) for o in range(4)]
    rows = tuple(
        holding(layout, rank, *place, kinds[place[0]])
        for rank, places in stock_of(layout).items()
        if rank != 3
        for place in places
    )
    repair = make_repair(Inventory(tuple(sorted(rows))), GENERATION, layout, 0, range(4))
    assert repair.lacking == ()
    gone = [(f.owner, f.index) for f in layout.held_by(3)]
    assert [(f.owner, f.index) for f in repair.received_by(3)] == gone
    reads = repair.stripes[3].rebuild.reads
    expected = sum(code.length(index, sizes[owner]) for owner, index in gone)
    assert repair.moving_bytes() == expected + sum(read.length for read in reads)


def test_groups_are_mended_apart():
    """Two groups of four: what is lost in the second is none of the first's business."""
    layout = layout_of("stripe:2+1", *[1] * 8)
    assert len(layout.groups) == 2
    stock = stock_of(layout)
    stock[5] = set()
    inventory = inventory_of(layout, stock)
    first = make_repair(inventory, GENERATION, layout, 0, layout.ranks_of_group(0))
    second = make_repair(inventory, GENERATION, layout, 1, layout.ranks_of_group(1))
    assert first.moving_bytes() == 0
    assert {f.holder for s in second.stripes for f in s.sends} == {5}
    assert {stripe.owner for stripe in second.stripes} == set(layout.ranks_of_group(1))


@given(stocks())
def test_what_is_missing_goes_home_or_to_the_node_that_takes_the_fewest_bytes(drawn):
    """Each send, replayed in the order of owners: home if that lives and is free, else the least.

    Fragments whose home lives come first, so that none loses its home to one that has none.
    """
    layout, stock, alive = drawn
    node_of, code = layout.topology.node_of_rank, layout.redundancy.code
    load = Counter(dict.fromkeys(alive, 0))
    for stripe in repair_of(layout, stock, alive).stripes:
        used = {node_of[stripe.owner], *(node_of[f.holder] for f in stripe.kept)}
        for fragment in stripe.kept:
            load[fragment.holder] += code.length(fragment.index, SIZE)
        home = {f.index: f.holder for f in layout.sent_by(stripe.owner)}
        for fragment in sorted(stripe.sends, key=lambda f: (home[f.index] not in alive, f.index)):
            free = [rank for rank in alive if node_of[rank] not in used]
            least = min(free, key=lambda rank: (load[rank], rank))
            at_home = home[fragment.index] in free
            assert fragment.holder == (home[fragment.index] if at_home else least)
            used.add(node_of[fragment.holder])
            load[fragment.holder] += code.length(fragment.index, SIZE)


def test_of_two_places_of_one_fragment_the_one_at_home_is_kept():
    """Fragment 0 of owner 2 lies at home, on rank 3, and on rank 1: it is kept at home."""
    layout = layout_of("stripe:1+1", 1, 1, 1, 1)
    assert Fragment(2, 0, 3) in layout.sent_by(2)
    stock = stock_of(layout)
    stock[1].add((2, 0))
    assert Fragment(2, 0, 3) in repair_of(layout, stock).stripes[2].kept


def test_a_lost_home_takes_no_other_fragments_home():
    """2+1 on five nodes, rank 1 lost: fragment 1 goes home to 2, and 0, which has none, to 4."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1, 1)
    stock = stock_of(layout)
    stock[2].discard((0, 1))
    (first, *_) = repair_of(layout, stock, (0, 2, 3, 4)).stripes
    assert first.sends == (Fragment(0, 0, 4), Fragment(0, 1, 2))


def test_a_home_that_lives_is_taken_whatever_it_holds():
    """Rank 4 holds more than rank 2, which has nothing of owner 3: its fragment goes home."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1, 1)
    stock = stock_of(layout)
    stock[4].discard((3, 0))
    (*_, third, _) = repair_of(layout, stock).stripes
    assert third.sends == (Fragment(3, 0, 4),)


def test_other_generations_are_no_sources_of_a_repair():
    """The ranks report an older generation too: the repair is the same as without it."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    stock = stock_of(layout)
    stock[0].discard((0, WHOLE))
    mine = inventory_of(layout, stock)
    older = [
        replace(h, generation=replace(GENERATION, step=GENERATION.step - 1, id="0" * 32))
        for h in inventory_of(layout, stock_of(layout)).holdings
    ]
    both = Inventory(tuple(sorted([*older, *mine.holdings])))
    alive = (0, 1, 2)
    assert make_repair(both, GENERATION, layout, 0, alive) == repair_of(layout, stock)


def test_what_is_left_of_an_owner_that_cannot_be_had_is_told():
    """One of two fragments and no copy: so much of so many, and no word of anybody else."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    stock = {rank: {p for p in places if p[0] != 0} for rank, places in stock_of(layout).items()}
    stock[1].add((0, 0))
    assert repair_of(layout, stock).lacking == (
        "owner 0: 1 of 2 distinct fragments and no whole copy",
    )


def test_several_reads_are_printed_beside_each_other():
    """An owner of 2+1 that lost its shard reads two fragments."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    stock = stock_of(layout)
    stock[0].discard((0, WHOLE))
    assert repair_of(layout, stock).describe().endswith("\nowner 0: reads 0<-1, 1<-2")


def test_what_was_sent_to_a_node_before_counts_with_what_it_holds():
    """2+1 on six nodes, rank 5 lost: rank 3 holds two fragments and is sent a third.

    So the fragment of owner 4 that has no home goes to rank 2, which then has three as well.
    """
    layout = layout_of("stripe:2+1", 1, 1, 1, 1, 1, 1)
    stock = stock_of(layout)
    stock[3].discard((2, 0))
    sends = [stripe.sends for stripe in repair_of(layout, stock, range(5)).stripes]
    assert Fragment(2, 0, 3) in sends[2]
    assert sends[4] == (Fragment(4, 0, 2),)


@given(stocks())
def test_what_a_failure_may_have_come_from_is_what_is_read_or_encoded(drawn):
    """Of each rank: the places that others read there, and its own shard if it sends of it."""
    layout, stock, alive = drawn
    repair = repair_of(layout, stock, alive)
    for rank in alive:
        places = {
            (read.owner, read.fragment)
            for stripe in repair.stripes
            for read in stripe.rebuild.reads
            if read.source == rank
        }
        if any(stripe.owner == rank and stripe.sends for stripe in repair.stripes):
            places.add((rank, WHOLE))
        assert repair.touched_by(rank) == places


def record_of(owner, fragment, generation=GENERATION):
    """Return what a record says of the place that its slot fills."""
    return SimpleNamespace(owner=owner, fragment=fragment, generation=generation)


def test_slots_that_protect_nothing_any_more():
    """Of this generation: what is not needed here, and the second of two alike. Nothing else."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    repair = repair_of(layout, stock_of(layout))
    whole, *held = sorted(repair.needed_at(0))
    elsewhere = min(repair.needed_at(1) - repair.needed_at(0))
    records = {
        1: record_of(*elsewhere),
        5: record_of(*held[0]),
        2: record_of(*held[0]),
        3: record_of(*elsewhere, generation=generation_of(2)),
        4: record_of(*whole),
        6: record_of(*elsewhere),
    }
    assert repair.strays(0, records) == (1, 5, 6)
