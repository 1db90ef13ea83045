"""Mend sessions of several ranks in a small world: one end that all obey, and no false comfort."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.actions import Await, CompareSet
from recovery.errors import RecoveryError
from recovery.inventory import decode_reports
from recovery.manifest import WHOLE
from recovery.mend import (
    DONE,
    FAILED,
    GIVEN_UP,
    KNOWN,
    LOST,
    PART,
    decided_keys,
    frozen_key,
    give_way,
    mend_name,
    parse_name,
    parse_result,
)
from recovery.tree import encode_words
from tests.recovery.mending import NAME, MendRig, stock_of, true_protection
from tests.recovery.rigs import layout_of
from tests.recovery.world import Early, Returned, Silent, StoreDown, World

# (redundancy, ranks per node, what is lost): an empty arena, single slots, two groups.
CASES = [
    ("copies:1", (1, 1), (1,)),
    ("copies:1", (2, 2), (2, 3)),
    ("stripe:1+1", (1, 1, 1), (2,)),
    ("stripe:2+1", (1, 1, 1, 1), (3,)),
    ("stripe:2+1", (1, 1, 1, 1), ((0, (0, WHOLE)), (1, (0, 0)))),
    ("copies:1", (1, 1, 1, 1), (1, (2, (3, 0)))),
]
cases = pytest.mark.parametrize(("redundancy", "nodes", "lost"), CASES)


def run(rig, seed, *faults, store=None, one_deadline=False, more=None):
    """Run the mend of every rank; check what must hold whatever the faults."""
    sessions = rig.sessions() | (more or {})
    world = World(seed, sessions, faults=faults, store=store, one_deadline=one_deadline)
    results = world.run()
    check(rig, world, results)
    return world, results


def check(rig, world, results):
    """Check that all obey one end, that it claims no more than is true, and who sets what."""
    ranks = range(rig.layout.topology.world)
    for rank in ranks:
        result = results.get(rank)
        if result is None:
            continue
        assert isinstance(result, Returned), result
        outcome = result.value
        if outcome.agreed:
            end = rig.end(world.store, rig.name(rank))
            assert (outcome.state, outcome.protection, outcome.reason) == end
        else:
            assert (outcome.state, outcome.protection) == (FAILED, -1)
    for name in {rig.name(rank) for rank in ranks}:
        check_claim(rig, world.store, name)
    named = {rig.name(rank): set() for rank in ranks}
    for rank in ranks:
        named[rig.name(rank)] |= decided_keys(rig.name(rank), rig.layout, rank)
    own = {a.key for r, a, _ in world.trace if isinstance(a, CompareSet) and r in ranks}
    assert own <= {key for keys in named.values() for key in keys} or len(named) > 1


def check_claim(rig, store, name):
    """Check that the end of a mend is true of what the ranks that were in it hold now."""
    end = rig.end(store, name)
    if end is None or end[0] not in KNOWN:
        return
    layout, alive = rig.layout, []
    for group in range(len(layout.groups)):
        reports = decode_reports(store[frozen_key(name, group)])
        alive += [report.rank for report in reports]
    stock = {rank: rig.arenas[rank] for rank in alive}
    owners = range(layout.topology.world)
    assert end[1] <= true_protection(stock, layout, owners)
    everybody = set(alive) == set(owners)
    assert (end[0] == LOST) == (not everybody)
    if end[0] == DONE:
        assert end[1] == layout.redundancy.survivable_nodes
        assert end[2] == ""


def states(results):
    """Return how the mend ended, by rank."""
    return {rank: result.value.state for rank, result in results.items()}


def places_in(redundancy, nodes, lost, kind=None):
    """Return (rank, number) of every action, or those of one kind, when nothing fails."""
    world, _ = run(MendRig(layout_of(redundancy, *nodes), lost=lost), 0)
    return world.places(kind)


@cases
@pytest.mark.parametrize("one_deadline", [True, False])
def test_without_faults_all_is_whole_again(redundancy, nodes, lost, one_deadline):
    """Ten orders of turns: every place that the layout wants is filled, and only what was lost."""
    layout = layout_of(redundancy, *nodes)
    for seed in range(10):
        rig = MendRig(layout, lost=lost)
        _, results = run(rig, seed, one_deadline=one_deadline)
        assert states(results) == dict.fromkeys(range(layout.topology.world), DONE)
        assert rig.arenas == stock_of(layout)
        outcome = results[0].value
        assert outcome.protection == layout.redundancy.survivable_nodes
        sends = {f for stripe in outcome.repair.stripes for f in stripe.sends}
        assert outcome.placed == sends


def test_a_whole_generation_needs_no_bytes():
    """Nothing lost: done at once, with nothing sent."""
    rig = MendRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    _, results = run(rig, 1)
    assert set(states(results).values()) == {DONE}
    assert rig.sent == []


@cases
def test_a_rank_silent_at_any_action_leaves_one_end(redundancy, nodes, lost):
    """One rank stops before each of its actions: the others end alike, and nobody waits on."""
    ended = set()
    for silent, at in places_in(redundancy, nodes, lost):
        rig = MendRig(layout_of(redundancy, *nodes), lost=lost)
        fault = Silent(silent, at)
        world, results = run(rig, at, fault)
        assert world.fired[fault] == 1
        others = set(range(rig.layout.topology.world)) - {silent}
        assert set(results) == others
        assert len(set(states(results).values())) == 1
        ended |= set(states(results).values())
    assert ended >= {DONE, LOST, FAILED}


@cases
@pytest.mark.parametrize("applied", [True, False])
def test_a_store_lost_at_any_action_leaves_one_end(redundancy, nodes, lost, applied):
    """One rank loses the store before each of its actions: it claims nothing, the others agree."""
    for rank, at in places_in(redundancy, nodes, lost):
        rig = MendRig(layout_of(redundancy, *nodes), lost=lost)
        fault = StoreDown(rank, at, applied)
        world, results = run(rig, at, fault)
        if world.fired[fault]:
            assert not results[rank].value.agreed
            assert "the store was lost" in results[rank].value.reason
        others = {one: r for one, r in results.items() if one != rank}
        assert len(set(states(others).values())) == 1


@cases
def test_a_deadline_that_passes_early_at_any_wait_leaves_one_end(redundancy, nodes, lost):
    """One rank's clock runs ahead at each of its waits: all ranks obey the same end."""
    for rank, at in places_in(redundancy, nodes, lost, Await):
        rig = MendRig(layout_of(redundancy, *nodes), lost=lost)
        _, results = run(rig, at, Early(rank, at))
        assert len(set(states(results).values())) == 1


@cases
def test_a_refusal_leaves_the_rest_mended_and_is_named(redundancy, nodes, lost):
    """Each holder in turn has no room for one owner: part, with who, what and why in the reason."""
    _, results = run(MendRig(layout_of(redundancy, *nodes), lost=lost), 0)
    sends = {f for r in results.values() for s in r.value.repair.stripes for f in s.sends}
    for fragment in sorted(sends):
        rig = MendRig(
            layout_of(redundancy, *nodes),
            lost=lost,
            refused={(fragment.holder, fragment.owner): "no room: here"},
        )
        _, refused = run(rig, 3)
        assert set(states(refused).values()) == {PART}
        text = f"rank {fragment.holder} refused fragment {fragment.index} of owner {fragment.owner}"
        assert f"{text}: no room: here" in refused[0].value.reason
        assert refused[0].value.protection < rig.layout.redundancy.survivable_nodes
        gone = {(f.owner, f.index) for f in sends if f == fragment}
        assert rig.arenas[fragment.holder] == stock_of(rig.layout)[fragment.holder] - gone


def test_an_own_copy_that_rotted_is_not_spread():
    """Its owner sends bytes with another digest than the record's: failed, and nobody keeps it."""
    rig = MendRig(layout_of("stripe:2+1", 1, 1, 1, 1), lost=[(1, (0, 0))], rotten=[0])
    _, results = run(rig, 1)
    assert set(states(results).values()) == {FAILED}
    assert "sent another shard" in results[0].value.reason
    assert (0, 0) not in rig.arenas[1]
    assert results[0].value.repair is not None  # by which the owner knows what to look at


def test_a_source_that_rotted_ends_the_mend_for_its_group_only():
    """Regrowing meets bad bytes: that group fails; what the other one made lies there."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    rig = MendRig(layout, lost=[0, (2, (3, 0))], damaged=[(1, (0, 0))])
    _, results = run(rig, 2)
    assert set(states(results).values()) == {FAILED}
    assert "bad bytes from rank 1" in results[3].value.reason
    assert rig.arenas[2] == stock_of(layout)[2]


@cases
def test_a_rank_that_comes_late_obeys_and_spoils_nothing(redundancy, nodes, lost):
    """The others have frozen their reports: they mend around it, and it takes their word."""
    layout = layout_of(redundancy, *nodes)
    for late in range(layout.topology.world):
        seen = set()
        for seed in range(8):
            rig = MendRig(layout, lost=lost, late=[late])
            _, results = run(rig, seed)
            (state,) = set(states(results).values())
            assert results[late].value.repair is None
            assert (state == LOST) == (f"rank {late} is lost" in results[late].value.reason)
            seen.add(state)
        # In this world's time other groups may wait in vain for the one with the late rank.
        assert LOST in seen
        assert len(layout.groups) > 1 or seen == {LOST}


@cases
def test_ranks_that_name_the_mend_differently_all_end(redundancy, nodes, lost):
    """One rank counts otherwise: both mends end, each with what is true of those in it."""
    layout = layout_of(redundancy, *nodes)
    for odd in range(layout.topology.world):
        rig = MendRig(layout, lost=lost, names={odd: "0.1.1"})
        _, results = run(rig, odd)
        assert set(states(results).values()) <= {LOST, FAILED}


@cases
def test_giving_way_ends_it_for_all(redundancy, nodes, lost):
    """A rank that is not in it has to save, restore or close: one end, and nobody waits on."""
    layout = layout_of(redundancy, *nodes)
    seen = set()
    for seed in range(30):
        rig = MendRig(layout, lost=lost)
        _, results = run(rig, seed, more={99: give_way(NAME, 0, "rank 1 closes")})
        ends = {s for rank, s in states({r: v for r, v in results.items() if r != 99}).items()}
        assert len(ends) == 1
        seen |= ends
    assert GIVEN_UP in seen


@given(st.data())
def test_any_two_faults_leave_one_end(data):
    """Two faults drawn at random, in a case drawn at random: what ``check`` asks, and an end."""
    redundancy, nodes, lost = data.draw(st.sampled_from(CASES))
    layout = layout_of(redundancy, *nodes)
    world = layout.topology.world
    fault = st.builds(
        lambda kind, rank, at: kind(rank, at),
        st.sampled_from([Silent, StoreDown, Early]),
        st.integers(0, world - 1),
        st.integers(0, 20),
    )
    faults = data.draw(st.lists(fault, max_size=2))
    rig = MendRig(layout, lost=lost)
    run(rig, data.draw(st.integers(0, 99)), *faults, one_deadline=data.draw(st.booleans()))


def test_a_second_mend_ends_what_the_first_could_not():
    """A holder refuses once: the next mend, under its own name, sends what is missing, no more."""
    rig = MendRig(layout_of("stripe:2+1", 1, 1, 1, 1), lost=[3], refused={(3, 0): "full"})
    world, _ = run(rig, 1)
    first, rig.refused = list(rig.sent), {}
    rig.sent.clear()
    rig.names = dict.fromkeys(range(4), "0.1.1")
    _, results = run(rig, 1, store=world.store)
    assert set(states(results).values()) == {DONE}
    assert rig.arenas == stock_of(rig.layout)
    (sent,) = rig.sent
    assert (sent.owner, sent.holder) == (0, 3)
    assert sent not in first


def test_who_missed_the_end_learns_it_under_the_same_name():
    """A rank lost the store before the end: it takes part again and reads what stands there."""
    layout = layout_of("copies:1", 1, 1)
    at = max(number for rank, number in places_in("copies:1", (1, 1), (1,)) if rank == 1)
    rig = MendRig(layout, lost=[1])
    world, results = run(rig, 1, StoreDown(1, at))
    assert not results[1].value.agreed
    again = World(2, {1: rig.sessions()[1]}, store=world.store, one_deadline=False)
    outcome = again.run()[1].value
    assert (outcome.agreed, outcome.state) == (True, DONE)


def test_names_sort_by_restore_save_and_attempt():
    """What a name says comes back from it, and garbage is refused."""
    assert parse_name(mend_name(2, 7, 3).encode()) == (2, 7, 3)
    for raw in (b"", b"1.2", b"1.2.x", b"1.2.3.4", b"-1.2.3", b"1.2." + b"9" * 10, b"\xff"):
        with pytest.raises(RecoveryError):
            parse_name(raw)


def test_results_keep_their_reason_and_bound_it():
    """State, number and words come back; what is none of the states, or no number, is refused."""
    assert parse_result(b"part:1:a: b") == (PART, 1, "a: b")
    assert parse_result(b"ranks lost:-1:") == (LOST, -1, "")
    assert len(encode_words("x" * 10**6)) < 10**4
    for raw in (b"", b"done", b"done:x:", b"worse:1:", b"done:" + b"1" * 10 + b":"):
        with pytest.raises(RecoveryError):
            parse_result(raw)
