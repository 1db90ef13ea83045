"""Restore sessions of several ranks in a small world: one generation for all, or none for any."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.actions import Await, Publish
from recovery.inventory import failures_of
from recovery.manifest import WHOLE
from recovery.plan import OWN, PEERS
from recovery.session import RestoreAborted, RestoreHalfDone
from recovery.topology import Topology
from tests.recovery.rigs import DAMAGED, FOREIGN, RestoreRig, layout_of, sweep, topology_of
from tests.recovery.world import Early, Raised, Returned, Silent, StoreDown, World

SPREAD = [
    ("copies:1", (1, 1)),
    ("copies:2", (1, 1, 1)),
    ("stripe:2+1", (1, 1, 1, 1)),
    ("copies:1", (2, 2)),
    ("stripe:1+1", (2, 2, 2)),
    ("stripe:3+1", (1, 1, 1, 1, 1)),
]
spread = pytest.mark.parametrize(("redundancy", "nodes"), SPREAD)


def run(rig, seed, *faults, one_deadline=True, load_state=True):
    """Run the restore of every rank; check what must hold whatever the faults."""
    sessions = rig.sessions(number=seed, load_state=load_state)
    world = World(seed, sessions, faults=faults, one_deadline=one_deadline)
    results = world.run()
    check(rig, results)
    return world, results


def check(rig, results):
    """Check: never two generations loaded, nothing loaded where one rank says that none was."""
    assert len(set(rig.live.values())) <= 1
    for rank, result in results.items():
        if isinstance(result, Raised):
            assert isinstance(result.error, RestoreAborted | RestoreHalfDone), result.error
            if isinstance(result.error, RestoreAborted):
                assert rig.live == {}
        elif result.value.plan is not None and rank in rig.live:
            assert rig.live[rank] == result.value.generation
            assert rig.live.keys() == rig.slots.keys()


def outcome(results):
    """Return the outcome that all ranks share, but for the order in which they ended."""
    values = [result.value for result in results.values()]
    assert all(value == values[0] for value in values)
    return values[0]


def named(text):
    """Return every rank that a text names."""
    lists = re.findall(r"\branks? (\d+(?:, \d+)*)", text)
    return {int(number) for some in lists for number in some.split(", ")}


@spread
def test_with_every_arena_there_each_rank_takes_its_own_copy(redundancy, nodes):
    """Nothing is lost: the newest generation, from own memory, without a byte on the wire."""
    for seed in range(5):
        rig = RestoreRig(layout_of(redundancy, *nodes))
        _, results = run(rig, seed)
        found = outcome(results)
        assert (found.generation, found.source) == (rig.generations[-1], OWN)
        assert rig.live == dict.fromkeys(rig.slots, rig.generations[-1])
        assert rig.moved_bytes == 0
        assert found.protection == rig.saved.redundancy.survivable_nodes


@spread
def test_every_loss_that_the_layout_promises_is_restored(redundancy, nodes):
    """As many nodes as promised are emptied, each set in turn: every rank loads the newest."""
    layout = layout_of(redundancy, *nodes)
    count = layout.redundancy.survivable_nodes
    for first, gap in product(range(len(nodes)), range(1, len(nodes))):
        lost = {layout.topology.nodes[(first + i * gap) % len(nodes)] for i in range(count)}
        if len(lost) == len(nodes):
            continue
        rig = RestoreRig(layout)
        rig.lose(*lost)
        _, results = run(rig, first)
        found = outcome(results)
        assert (found.generation, found.source) == (rig.generations[-1], PEERS)
        owners = sum(len(layout.topology.ranks_by_node[node]) for node in lost)
        assert rig.moved_bytes == pytest.approx(1000 * owners, rel=0.01)


def test_nothing_in_any_arena_is_no_error():
    """Fresh arenas: every rank is told that there is nothing to restore, and loads nothing."""
    rig = RestoreRig(layout_of("copies:1", 1, 1), steps=(2,))
    rig.lose("a", "b")
    rig.committed = None
    _, results = run(rig, 0)
    found = outcome(results)
    assert found.generation is None
    assert found.reason == "nothing to restore: no arena of this job holds a generation"
    assert rig.live == {}


@pytest.mark.parametrize("one_deadline", [True, False])
def test_damaged_reads_lead_to_other_sources_on_all_ranks_together(one_deadline):
    """The own copy and one fragment are damaged: a later attempt takes the same generation."""
    for seed in range(10):
        rig = RestoreRig(layout_of("stripe:2+2", 1, 1, 1, 1, 1))
        rig.mark(DAMAGED, 2, 1, WHOLE, 0, 3)
        rig.mark(DAMAGED, 2, 4, WHOLE)
        world, results = run(rig, seed, one_deadline=one_deadline)
        found = outcome(results)
        assert found.generation == rig.generations[-1]
        assert found.plan.rebuilds[1].fragments == (1, 2)
        assert found.source == PEERS
        # Own copy, fragment 0, fragment 3 or neither: each failure starts one attempt more.
        assert f"restore/{seed}/2/frozen" in world.store
        assert f"restore/{seed}/4/frozen" not in world.store


def test_damage_lowers_the_protection_that_is_told():
    """Two of four fragments and the own copy are bad: one more loss of that generation is fatal."""
    rig = RestoreRig(layout_of("stripe:2+2", 1, 1, 1, 1, 1))
    rig.mark(DAMAGED, 2, 1, WHOLE, 0, 1)
    assert outcome(run(rig, 0)[1]).protection == 0


@spread
def test_too_much_damage_steps_back_on_all_ranks_together(redundancy, nodes):
    """No good source of one owner is left: all load the older generation and say why."""
    for seed in range(5):
        layout = layout_of(redundancy, *nodes)
        rig = RestoreRig(layout)
        rig.mark(DAMAGED, 2, 1, WHOLE, *range(layout.redundancy.n))
        _, results = run(rig, seed)
        found = outcome(results)
        assert found.generation == rig.generations[0]
        assert rig.live == dict.fromkeys(rig.slots, rig.generations[0])
        assert "cannot rebuild owner 1 (" in found.reason
        assert found.reason.endswith("; the committed step 2 is lost")
        assert set(found.lost) == {1}


def test_when_no_generation_is_left_none_is_loaded():
    """Both generations are damaged beyond repair: no rank changes its state, all say why."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    rig.mark(DAMAGED, 1, 0, WHOLE, 0)
    rig.mark(DAMAGED, 2, 1, WHOLE, 0)
    _, results = run(rig, 0)
    found = outcome(results)
    assert found.generation is None
    assert found.reason.startswith("nothing to restore: step 2")
    assert "cannot rebuild owner 1" in found.reason
    assert "cannot rebuild owner 0" in found.reason
    assert rig.live == {}


@pytest.mark.parametrize("foreign", range(4))
def test_a_fragment_that_verifies_but_is_wrong_is_found_by_other_subsets(foreign):
    """One of four fragments belongs to another shard: subsets are tried until one decodes (P16)."""
    rig = RestoreRig(layout_of("stripe:2+2", 1, 1, 1, 1, 1))
    rig.mark(DAMAGED, 2, 1, WHOLE)
    rig.mark(FOREIGN, 2, 1, foreign)
    _, results = run(rig, foreign)
    found = outcome(results)
    assert found.generation == rig.generations[-1]
    assert foreign not in found.plan.rebuilds[1].fragments


def test_when_every_subset_is_wrong_the_older_generation_is_taken():
    """Three of four fragments are foreign, so no pair decodes: one step back, with the reason."""
    rig = RestoreRig(layout_of("stripe:2+2", 1, 1, 1, 1, 1))
    rig.mark(DAMAGED, 2, 1, WHOLE)
    rig.mark(FOREIGN, 2, 1, 0, 1, 2)
    _, results = run(rig, 0)
    found = outcome(results)
    assert found.generation == rig.generations[0]
    assert found.reason.count("every set of 2 fragments decodes to a wrong shard") == 1
    assert found.reason.count("passed over") == 0  # it was whole, as far as records can tell


def test_what_was_wrong_in_one_generation_is_tried_again_in_the_older_one():
    """Step 1 needs the same fragments whose pairs decoded to a wrong shard in step 2: it is loaded.

    Sets are rejected for one generation only; else the older one would be given up untried.
    """
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    for step in (1, 2):
        rig.mark(DAMAGED, step, 1, WHOLE)
    rig.mark(FOREIGN, 2, 1, 0, 1)
    _, results = run(rig, 0)
    assert outcome(results).generation == rig.generations[0]


@pytest.mark.parametrize("foreign", [(), (0,), (1,), (2,)])
def test_wrong_sets_of_two_generations_do_not_hide_each_other(foreign):
    """All sets of step 2 are wrong, and step 1 needs more attempts: neither is tried anew for ever.

    Step 1 has a damaged copy of another owner, and in turn one foreign fragment or none.
    """
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    for step in (1, 2):
        rig.mark(DAMAGED, step, 1, WHOLE)
    rig.mark(FOREIGN, 2, 1, 0, 1)
    rig.mark(DAMAGED, 1, 2, WHOLE)
    rig.mark(FOREIGN, 1, 1, *foreign)
    world, results = run(rig, 0)
    if len(foreign):
        # Two of three fragments are left: only one pair is right.
        assert outcome(results).plan.rebuilds[1].fragments == tuple({0, 1, 2} - set(foreign))
    assert outcome(results).generation == rig.generations[0]
    attempts = [key for key in world.store if key.endswith("/frozen")]
    assert len(attempts) <= 8


def test_ranks_that_derive_other_plans_abort():
    """Rank 2 takes ranks 0 and 1 for neighbours: fingerprints differ, so nobody loads (P18)."""
    rig = RestoreRig(layout_of("copies:2", 1, 1, 1))
    rig.lose("a")
    sessions = rig.sessions()
    rig.topology = Topology(("a", "a", "c"))
    sessions[2] = rig.sessions()[2]
    results = World(0, sessions).run()
    check(rig, results)
    assert {str(r.error) for r in results.values()} == {
        "ranks derived different plans from one inventory"
    }


def test_sets_rejected_before_a_step_back_by_damage_are_forgotten():
    """A wrong decode first, then damage takes step 2 away: step 1 is still rebuilt from any set."""
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    rig.mark(DAMAGED, 1, 1, WHOLE, 2)
    rig.mark(DAMAGED, 2, 1, WHOLE, 2)
    rig.mark(FOREIGN, 2, 1, 0)
    _, results = run(rig, 0)
    found = outcome(results)
    assert found.generation == rig.generations[0]
    assert found.plan.rebuilds[1].fragments == (0, 1)


@sweep
def test_a_rank_silent_at_any_action_is_named_by_all_others(redundancy, nodes, one_deadline):
    """One rank stops before each of its actions: the others end alike, and every error names it."""
    layout = layout_of(redundancy, *nodes)
    ranks = range(layout.topology.world)
    aborted = half_done = 0
    for silent, at in run_after_a_loss(layout, 0)[0].places():
        fault = Silent(silent, at)
        world, results = run_after_a_loss(layout, at, fault, one_deadline=one_deadline)
        assert world.fired[fault] == 1
        assert set(results) == set(ranks) - {silent}
        assert len({type(result) for result in results.values()}) == 1
        errors = [r.error for r in results.values() if isinstance(r, Raised)]
        assert all(silent in named(str(error)) for error in errors), errors
        aborted += any(isinstance(error, RestoreAborted) for error in errors)
        half_done += any(isinstance(error, RestoreHalfDone) for error in errors)
    assert aborted > len(ranks)
    assert half_done >= len(ranks)


def run_after_a_loss(layout, seed, *faults, one_deadline=True):
    """Run a restore in which the last node was lost and one copy is damaged."""
    rig = RestoreRig(layout)
    if len(layout.topology.nodes) > 2:
        rig.lose(layout.topology.nodes[-1])
    rig.mark(DAMAGED, 2, 0, WHOLE)
    return run(rig, seed, *faults, one_deadline=one_deadline)


@sweep
def test_a_clock_that_runs_ahead_at_any_wait_splits_nobody(redundancy, nodes, one_deadline):
    """Each wait of each rank ends early once: the same generation for all, or none for any."""
    layout = layout_of(redundancy, *nodes)
    fired = 0
    for rank, at in run_after_a_loss(layout, 0)[0].places(Await):
        fault = Early(rank, at)
        world, _ = run_after_a_loss(layout, at, fault, one_deadline=one_deadline)
        fired += world.fired[fault]
    assert fired > layout.topology.world


@sweep
def test_a_rank_that_loses_the_store_at_any_action_never_restores_alone(
    redundancy, nodes, one_deadline
):
    """The store fails one rank for good: it raises, and says "nothing changed" only if so."""
    layout = layout_of(redundancy, *nodes)
    fired = 0
    for rank, at in run_after_a_loss(layout, 0)[0].places():
        fault = StoreDown(rank, at, applied=(rank + at) % 2 == 0)
        world, results = run_after_a_loss(layout, at, fault, one_deadline=one_deadline)
        if world.fired[fault]:
            fired += 1
            assert isinstance(results[rank], Raised)
    assert fired > 4 * layout.topology.world


@st.composite
def faults_of_three(draw):
    """Draw up to four faults over the ranks of three nodes."""
    rank, at = st.integers(0, 2), st.integers(0, 24)
    kind = st.one_of(
        st.builds(Silent, rank, at),
        st.builds(Early, rank, at),
        st.builds(StoreDown, rank, at, st.booleans(), st.integers(1, 3)),
    )
    return tuple(draw(st.lists(kind, max_size=4)))


@given(
    faults=faults_of_three(),
    seed=st.integers(0, 1000),
    one_deadline=st.booleans(),
    marks=st.lists(
        st.tuples(
            st.sampled_from([DAMAGED, FOREIGN]),
            st.integers(1, 2),
            st.integers(0, 2),
            st.integers(WHOLE, 1),
        ),
        max_size=8,
    ),
    lost=st.sampled_from([(), ("a",), ("c",), ("a", "b")]),
)
def test_any_faults_and_any_damage_never_mix_generations(faults, seed, one_deadline, marks, lost):
    """Random faults, damage and losses: the checks of every run hold (one generation, or none)."""
    rig = RestoreRig(layout_of("stripe:1+1", 1, 1, 1))
    rig.lose(*lost)
    for state, step, owner, fragment in marks:
        # A whole copy that verifies is what was saved: only fragments can be foreign.
        rig.mark(DAMAGED if fragment == WHOLE else state, step, owner, fragment)
    run(rig, seed, *faults, one_deadline=one_deadline)


def test_another_world_size_is_reported_and_nothing_moves():
    """Three ranks find what four saved: refused in words, on all ranks, without a read."""
    rig = RestoreRig(
        layout_of("stripe:2+1", 1, 1, 1, 1),
        topology=topology_of(1, 1, 1),
        home={0: 0, 1: 1, 2: 2, 3: 0},
    )
    world, results = run(rig, 0)
    found = outcome(results)
    assert (found.generation, found.plan, found.world_saved) == (None, None, 4)
    assert "saved by 4 ranks" in found.reason
    assert "this job has 3" in found.reason
    assert "restoring" not in found.reason
    assert rig.live == {}
    assert not any(key.startswith("wire/") for key in world.store)


def test_ranks_that_moved_to_other_nodes_load_the_owner_of_their_number():
    """The launcher renumbered: rank r loads owner r wherever the bytes lie (P15)."""
    layout = layout_of("stripe:2+1", 1, 1, 1, 1)
    rig = RestoreRig(layout, home={0: 2, 1: 3, 2: 0, 3: 1})
    _, results = run(rig, 0)
    found = outcome(results)
    assert found.source == PEERS
    assert [r.reads[0].source for r in found.plan.rebuilds] == [2, 3, 0, 1]
    assert [r.owner for r in found.plan.rebuilds] == [0, 1, 2, 3]
    assert rig.moved_bytes == 4000


def test_a_rank_that_moved_within_its_node_reads_from_its_memory():
    """Two ranks of one node changed places: no byte goes over the network."""
    rig = RestoreRig(layout_of("copies:1", 2, 2), home={0: 1, 1: 0, 2: 2, 3: 3})
    _, results = run(rig, 0)
    assert outcome(results).source == OWN
    assert rig.moved_bytes == 0


def test_to_choose_only_moves_nothing():
    """With load_state False the outcome names the generation, and nothing is read or loaded."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    rig.lose("a")
    world, results = run(rig, 0, load_state=False)
    assert outcome(results).generation == rig.generations[-1]
    assert rig.live == {}
    assert not any("moved" in key or key.startswith("wire/") for key in world.store)


def test_what_no_source_can_mend_aborts_before_anything_changes():
    """One rank's keys do not match: every rank raises that sentence, and no state was touched."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    rig.misfits = {1: "missing key model.w"}
    _, results = run(rig, 0)
    assert [type(result.error) for result in results.values()] == [RestoreAborted] * 2
    assert {str(result.error) for result in results.values()} == {"rank 1: missing key model.w"}
    assert rig.live == {}


def test_a_load_that_fails_after_the_vote_ends_every_process_and_is_noted():
    """Rank 1 cannot load: all raise "half done" naming it; its arena notes the generation."""
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1))
    rig.load_errors = {1: "out of memory"}
    _, results = run(rig, 0)
    assert [type(result.error) for result in results.values()] == [RestoreHalfDone] * 3
    assert all("rank 1: out of memory" in str(result.error) for result in results.values())
    assert rig.noted == [(1, rig.generations[-1], "out of memory")]


def test_after_two_identical_failures_to_load_all_step_back():
    """Failures that an arena recorded twice take that generation out, on all ranks (P19)."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    newest = rig.generations[-1].id
    assert failures_of([(newest, "e" * 32, 1)]) == ()
    rig.failures = failures_of([(newest, "e" * 32, 2)])
    _, results = run(rig, 0)
    found = outcome(results)
    assert found.generation == rig.generations[0]
    assert "failed to load identically 2 times" in found.reason


def test_a_report_that_is_not_valid_never_hangs_the_others():
    """Rank 1 publishes garbage as its inventory: every rank ends with an error, none loads."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))

    def rogue():
        yield Publish("restore/0/inventory/0/1", b'[[1,[["x"]],null,[]]]')

    world = World(0, {**rig.sessions(), 1: rogue()})
    results = world.run()
    assert isinstance(results[0], Raised)
    assert isinstance(results[1], Returned)
    assert rig.live == {}


def test_a_rank_that_names_itself_is_named_once():
    """An error that begins with its rank is told as it is."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    rig.misfits = {1: "rank 1: missing key model.w"}
    _, results = run(rig, 0)
    assert {str(result.error) for result in results.values()} == {"rank 1: missing key model.w"}


def test_owners_that_are_lost_are_told_however_it_ends():
    """Nothing left, another world size, or an older step: the outcome has the owners and why."""
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1), steps=(2,))
    rig.lose("a", "b")
    nothing = outcome(run(rig, 0)[1])
    assert (nothing.generation, set(nothing.lost)) == (None, {0})
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1))
    rig.mark(DAMAGED, 2, 1, WHOLE, 0)
    older = outcome(run(rig, 0)[1])
    assert (older.world_saved, set(older.lost)) == (3, {1})
    rig = RestoreRig(
        layout_of("stripe:2+1", 1, 1, 1, 1),
        topology=topology_of(1, 1, 1),
        home={0: 0, 1: 1, 2: 2, 3: 0},
    )
    for rank, slots in rig.slots.items():
        rig.slots[rank] = [s for s in slots if (s.generation.step, s.owner) != (2, 1)]
    other = outcome(run(rig, 0)[1])
    assert (other.world_saved, set(other.lost)) == (4, {1})
