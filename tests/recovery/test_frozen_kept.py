"""Which older generation a restore keeps until the restored one is mended, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.frozen import decode_frozen, encode_frozen, freeze
from recovery.inventory import Holding, Inventory, ShardKind
from recovery.ledger import Ledger
from recovery.manifest import WHOLE
from recovery.plan import protection
from tests.recovery.mending import true_protection
from tests.recovery.rigs import RestoreRig, digest_of, generation_of, layout_of
from tests.recovery.world import World

LAYOUTS = [
    ("copies:1", (1, 1)),
    ("copies:2", (1, 1, 1)),
    ("stripe:1+1", (1, 1, 1)),
    ("stripe:2+1", (1, 1, 1, 1)),
]


def inventory_of(layout, kept_by_step, **facts):
    """Return what is left: {step: {(rank, owner, fragment)}}."""
    code, world = layout.redundancy.code, layout.topology.world
    rows = [
        Holding(
            generation_of(step),
            owner,
            fragment,
            rank,
            world,
            ShardKind(code.k, code.m, 1000, digest_of(generation_of(step), owner).hex()),
        )
        for step, places in kept_by_step.items()
        for rank, owner, fragment in places
    ]
    return Inventory(tuple(sorted(rows)), **facts)


def whole(layout):
    """Return every place of a generation that all ranks hold."""
    places = {(rank, rank, WHOLE) for rank in range(layout.topology.world)}
    return places | {
        (f.holder, f.owner, f.index) for stripe in layout.stripes for f in stripe.fragments
    }


def own_only(layout):
    """Return the places of a generation of which every rank has its own copy and nothing else."""
    return {(rank, rank, WHOLE) for rank in range(layout.topology.world)}


@st.composite
def remains(draw):
    """Draw a layout and what three generations have left in it."""
    redundancy, nodes = draw(st.sampled_from(LAYOUTS))
    layout = layout_of(redundancy, *nodes)
    everything = sorted(whole(layout))
    some = st.one_of(
        st.just(set(everything)),
        st.sets(st.sampled_from(everything)),
        st.sets(st.sampled_from(everything), max_size=3).map(lambda gone: set(everything) - gone),
        st.just(own_only(layout)),
    )
    return layout, {step: draw(some) for step in (1, 2, 3)}


@given(remains())
def test_what_is_kept_is_the_older_one_that_survives_most_and_more(drawn):
    """Against a twin that loses every set of nodes: kept or not, and the number it is good for."""
    layout, left = drawn
    choice = freeze(inventory_of(layout, left), layout.topology).choice
    owners = range(layout.topology.world)
    truth = {}
    for step, places in left.items():
        stock = {rank: set() for rank in owners}
        for rank, owner, fragment in places:
            stock[rank].add((owner, fragment))
        truth[step] = true_protection(stock, layout, owners)
    there = sorted((step for step, losses in truth.items() if losses >= 0), reverse=True)
    if not there:
        assert (choice.generation, choice.kept) == (None, None)
        return
    assert choice.generation == generation_of(there[0])
    best = max(there[1:], key=lambda step: (truth[step], step), default=there[0])
    if truth[best] > truth[there[0]]:
        assert choice.kept == generation_of(best)
        assert choice.kept_protection == truth[best]
    else:
        assert choice.kept is None


@given(remains())
def test_all_ranks_read_what_rank_0_wrote(drawn):
    """What is kept, and its protection, come through the store unchanged."""
    layout, left = drawn
    frozen = freeze(inventory_of(layout, left), layout.topology)
    again = decode_frozen(encode_frozen(frozen)).choice
    assert (again.kept, again.kept_protection) == (
        frozen.choice.kept,
        frozen.choice.kept_protection,
    )


def test_a_generation_that_failed_to_load_is_not_kept():
    """Step 1 cannot be loaded any more, whatever survives: there is nothing to keep it for."""
    layout = layout_of("copies:1", 1, 1)
    left = {1: whole(layout), 2: own_only(layout)}
    gone = frozenset([generation_of(1).id])
    assert freeze(inventory_of(layout, left), layout.topology).choice.kept == generation_of(1)
    failed = freeze(inventory_of(layout, left, failures=gone), layout.topology)
    assert failed.choice.kept is None


def test_a_generation_of_another_world_is_not_kept():
    """Step 1 was saved by another number of ranks and could not be restored: it is not kept."""
    layout = layout_of("copies:1", 1, 1)
    inventory = inventory_of(layout, {1: whole(layout), 2: own_only(layout)})
    rows = [replace(h, world=3) if h.generation.step == 1 else h for h in inventory.holdings]
    choice = freeze(Inventory(tuple(sorted(rows))), layout.topology).choice
    assert (choice.generation, choice.kept) == (generation_of(2), None)


@pytest.mark.parametrize(("redundancy", "nodes"), LAYOUTS)
def test_every_rank_learns_what_is_kept(redundancy, nodes):
    """Step 2 is there as own copies only: all ranks restore it and are told to keep step 1."""
    layout = layout_of(redundancy, *nodes)
    rig = RestoreRig(layout, committed=generation_of(1))
    for rank, slots in rig.slots.items():
        rig.slots[rank] = [s for s in slots if s.generation.step == 1 or s.fragment == WHOLE]
    results = World(1, rig.sessions()).run()
    for rank in range(layout.topology.world):
        outcome = results[rank].value
        assert (outcome.generation, outcome.protection) == (generation_of(2), 0)
        kept = (generation_of(1), layout.redundancy.survivable_nodes)
        assert (outcome.kept, outcome.kept_protection) == kept


def test_a_ledger_keeps_it_until_the_base_survives_as_much():
    """No step is admitted and neither slot reusable; mended far enough, or given up, both are."""
    base, kept = generation_of(2), generation_of(1)
    ledger = Ledger().rebase(base, kept, 2)
    assert not ledger.may_admit
    assert not ledger.reusable(base)
    assert not ledger.reusable(kept)
    for losses in (-1, 0, 1):
        assert ledger.mend().mended(losses).kept == kept
    for after in (ledger.mend().mended(2), ledger.mend().mended(1).give_up_kept()):
        assert after.may_admit
        assert after.reusable(kept)
        assert not after.reusable(base)


def test_protection_counts_whole_nodes():
    """What the choice compares is nodes: two ranks on one node are lost together."""
    layout = layout_of("copies:1", 2, 2)
    inventory = inventory_of(layout, {1: whole(layout), 2: own_only(layout)})
    assert protection(inventory, generation_of(1), layout.topology) == 1
    assert protection(inventory, generation_of(2), layout.topology) == 0
