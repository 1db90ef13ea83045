"""Ranks that hold different generations restore one that all can have, or none, all alike."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.manifest import WHOLE, Generation, generation_id
from recovery.session import RestoreAborted
from tests.recovery.rigs import DAMAGED, RestoreRig, layout_of
from tests.recovery.world import Raised, World

STEPS = (10, 20, 30)


def rig_of(*, kept, damaged=(), redundancy="copies:1", copies=False):
    """Return arenas in which rank r has its own copies of the steps in ``kept[r]``.

    ``damaged``: (rank, step) whose own copy fails its digest, which shows only when it is read.
    """
    rig = RestoreRig(layout_of(redundancy, *(1,) * len(kept)), steps=STEPS)
    for rank, steps in enumerate(kept):
        rig.slots[rank] = [
            slot
            for slot in rig.slots[rank]
            if (slot.fragment == WHOLE and slot.generation.step in steps)
            or (slot.fragment != WHOLE and copies)
        ]
    for rank, step in damaged:
        rig.mark(DAMAGED, step, rank, WHOLE)
    return rig


def restored(rig, seed=0):
    """Run the restore on all ranks; the one generation's step, or None; all must agree."""
    world = World(seed, rig.sessions())
    results = world.run()
    assert not any(isinstance(result, Raised) for result in results.values())
    (step,) = {r.value.generation.step if r.value.generation else None for r in results.values()}
    assert {gen.step for gen in rig.live.values()} == ({step} if step else set())
    assert len(rig.live) in {0, len(results)}
    return step, results[0].value.reason


def test_damage_that_is_found_late_leads_all_to_what_all_have():
    """Rank 0 has 20 and 30, rank 1 has 10 and a damaged 30, rank 2 all: there is none in common.

    The newest that everybody says to have is 30, and rank 1 finds out only when it reads it. "The
    oldest of the newest" would have taken 10, which rank 0 has not.
    """
    kept = [{20, 30}, {10, 30}, {10, 20, 30}]
    step, reason = restored(rig_of(kept=kept, damaged=[(1, 30)], redundancy="copies:2"))
    assert step is None
    assert "nothing to restore" in reason
    for number in STEPS:
        assert f"step {number}" in reason


@pytest.mark.parametrize("seed", range(5))
def test_with_one_more_in_common_that_one_is_taken(seed):
    """The same, and rank 1 has 20 too: all take 20, whatever order the ranks come in."""
    kept = [{20, 30}, {10, 20, 30}, {10, 20, 30}]
    rig = rig_of(kept=kept, damaged=[(1, 30)], redundancy="copies:2")
    step, reason = restored(rig, seed)
    assert step == 20
    assert "step 30" in reason
    assert "owner 1" in reason


def test_with_copies_on_peers_nobody_has_to_step_back():
    """The same damage, but rank 1's 30 lies on a peer too: all take 30."""
    kept = [{20, 30}, {10, 30}, {10, 20, 30}]
    rig = rig_of(kept=kept, damaged=[(1, 30)], redundancy="copies:2", copies=True)
    assert restored(rig)[0] == 30


SETS = [set(some) for n in range(8) for some in [[s for i, s in enumerate(STEPS) if n >> i & 1]]]


@pytest.mark.parametrize(
    "damaged", [[], [(1, 30)], [(0, 30), (2, 20)], [(0, 10), (0, 20), (0, 30)]]
)
def test_every_choice_is_the_newest_that_all_ranks_really_have(damaged):
    """All 512 ways in which three ranks may keep three generations, against a one-line twin."""
    for kept in product(SETS, repeat=3):
        good = [steps - {s for r, s in damaged if r == rank} for rank, steps in enumerate(kept)]
        expected = max(set.intersection(*good), default=None)
        assert restored(rig_of(kept=kept, damaged=damaged))[0] == expected, kept


def test_a_failure_in_the_middle_leaves_nobody_with_a_newer_state():
    """Rank 2 finds that its keys do not match, after the bytes have come: no rank has loaded."""
    rig = rig_of(kept=[{20, 30}] * 3)
    rig.misfits = {2: "no key 'w'"}
    results = World(0, rig.sessions()).run()
    assert all(
        isinstance(r, Raised) and isinstance(r.error, RestoreAborted) for r in results.values()
    )
    assert rig.live == {}


NUMBER = st.integers(0, 1 << 20)
ATTEMPT = st.tuples(st.text(min_size=1, max_size=8), st.binary(min_size=16, max_size=16), NUMBER)


@given(
    attempts=st.lists(
        st.tuples(ATTEMPT, st.integers(0, 3), st.integers(0, (1 << 32) - 1)), unique=True
    )
)
def test_no_two_attempts_have_one_id(attempts):
    """Job, nonce, step, restores of the process, admission: if any differs, so do the ids.

    The sequence is made as a save makes it, so that a step saved again after a restore, or in
    another life of the job, is never taken for the attempt before it.
    """
    ids = {
        generation_id(job, nonce.hex(), step, (restores << 32) + sequence)
        for (job, nonce, step), restores, sequence in attempts
    }
    assert len(ids) == len(attempts)
    assert all(Generation(1, 1, identity) for identity in ids)


@given(
    lives=st.lists(
        st.tuples(st.binary(min_size=16, max_size=16), st.integers(1, 4)),
        min_size=1,
        max_size=4,
        unique_by=lambda life: life[0],
    ),
    steps=st.integers(1, 6),
)
def test_the_same_steps_in_many_lives_are_as_many_generations(lives, steps):
    """A job that saves steps 1..n in each life, and again after each restore, repeats no id."""
    ids = [
        generation_id("job", nonce.hex(), step, (restore << 32) + step)
        for nonce, restores in lives
        for restore in range(restores)
        for step in range(1, steps + 1)
    ]
    assert len(set(ids)) == len(ids)
