"""Bytes that do not come say nothing of what lies there: who is asked, when all give up."""

from __future__ import annotations

from collections import Counter

import pytest

from recovery.actions import Await, Publish
from recovery.manifest import WHOLE
from recovery.session import RestoreAborted
from recovery.sources import SILENCES_MAX
from tests.recovery.rigs import DAMAGED, UNHEARD, RestoreRig, layout_of
from tests.recovery.world import Early, Raised, Silent, World


def restored(rig):
    """Run a restore; return its world and how each rank ended."""
    world = World(0, rig.sessions())
    return world, world.run()


def attempts(world):
    """Return how many plans were frozen."""
    return sum(key.endswith("/frozen") for key in world.store)


@pytest.mark.parametrize("fragment", range(4))
def test_a_silent_source_is_passed_over_for_another(fragment):
    """stripe:2+2 without node b: one fragment of owner 1 does not come, two others do."""
    rig = RestoreRig(layout_of("stripe:2+2", 1, 1, 1, 1, 1))
    rig.lose("b")
    rig.mark(UNHEARD, 2, 1, fragment)
    world, results = restored(rig)
    for result in results.values():
        assert result.value.generation == rig.generations[-1]
        assert fragment not in result.value.plan.rebuilds[1].fragments
    assert attempts(world) == 1 + (fragment < 2)
    assert rig.live == dict.fromkeys(rig.slots, rig.generations[-1])


def test_a_source_that_nobody_can_replace_is_asked_again_and_then_all_give_up():
    """The only copy of owner 1 does not come: three times, then an abort that names its holder.

    The older generation is whole, and nobody goes back to it: the newest is not lost.
    """
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1))
    rig.lose("b")
    rig.mark(UNHEARD, 2, 1, 0)
    world, results = restored(rig)
    assert all(isinstance(result, Raised) for result in results.values())
    assert {type(result.error) for result in results.values()} == {RestoreAborted}
    (said,) = {str(result.error) for result in results.values()}
    generation = rig.generations[-1].describe()
    assert said == (
        f"{generation} is there, but its bytes did not come from rank 2; "
        "to go back behind it would lose it, so start again"
    )
    # Each silence one attempt, and the last one's frozen word is the abort.
    assert attempts(world) == SILENCES_MAX + 2
    assert rig.live == {}


def test_silent_sources_are_named_once_each_and_in_order():
    """Two owners of one lost node wait for ranks 4 and 2: "ranks 2, 4", whoever asked first."""
    layout = layout_of("copies:1", 2, 1, 1, 1, size=1000)
    rig = RestoreRig(layout)
    rig.lose("a")
    for owner in (0, 1):
        rig.mark(UNHEARD, 2, owner, 0)
    holders = sorted({f.holder for owner in (0, 1) for f in layout.sent_by(owner)})
    _, results = restored(rig)
    words = f"rank {holders[0]}" if len(holders) == 1 else f"ranks {holders[0]}, {holders[1]}"
    for result in results.values():
        assert f"did not come from {words};" in str(result.error)


def test_a_source_that_comes_on_being_asked_again_is_taken():
    """Once it does not come and then it does: the newest is restored, in the second attempt."""
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1))
    rig.lose("b")
    rig.mark(UNHEARD, 2, 1, 0)
    state = rig._state

    def comes_later(generation, read):
        found = state(generation, read)
        rig.mark("good", 2, 1, 0)
        return found

    rig._state = comes_later
    world, results = restored(rig)
    assert attempts(world) == 2
    for result in results.values():
        assert result.value.generation == rig.generations[-1]


def test_a_silent_source_is_asked_again_when_the_other_turns_out_to_be_damaged():
    """Two copies of owner 1: one does not come at first, the other is damaged. It is asked again.

    Counted as lost for good, it would have cost the newest step.
    """
    rig = RestoreRig(layout_of("copies:2", 1, 1, 1))
    rig.lose("b")
    rig.mark(UNHEARD, 2, 1, 0)
    rig.mark(DAMAGED, 2, 1, 1)
    state = rig._state

    def comes_later(generation, read):
        found = state(generation, read)
        if found == UNHEARD:
            rig.mark("good", 2, 1, 0)
        return found

    rig._state = comes_later
    world, results = restored(rig)
    assert attempts(world) == 3
    for result in results.values():
        assert result.value.generation == rig.generations[-1]


def test_damage_steps_back_where_silence_does_not():
    """One fragment is damaged and one silent of three: the newest needs both, so it is asked for.

    With two damaged it is lost for certain, and the older generation is restored.
    """
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    rig.lose("b")
    rig.mark(DAMAGED, 2, 1, 0)
    rig.mark(UNHEARD, 2, 1, 1)
    _, results = restored(rig)
    assert all(isinstance(result, Raised) for result in results.values())
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    rig.lose("b")
    rig.mark(DAMAGED, 2, 1, 0, 1)
    rig.mark(UNHEARD, 2, 1, 2)
    _, results = restored(rig)
    for result in results.values():
        assert result.value.generation == rig.generations[0]


def test_silence_of_an_own_copy_is_made_good_by_the_others():
    """The own copy does not come in time, as from a stuck memory: fragments are read."""
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    rig.mark(UNHEARD, 2, 3, WHOLE)
    _, results = restored(rig)
    for result in results.values():
        assert result.value.generation == rig.generations[-1]
        assert WHOLE not in result.value.plan.rebuilds[3].fragments


def test_whoever_gives_up_first_ends_the_vote_for_all():
    """Rank 1 falls silent before it votes; rank 2's deadline passes, and nobody waits for his own.

    A deadline per wait began later for those who moved for long: rank 0, say, which counts.
    """
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1))
    world, _ = restored(rig)
    numbers, at = Counter(), {}
    for rank, action, _ in world.trace:
        if isinstance(action, Await | Publish):
            at[rank, action.keys[0] if isinstance(action, Await) else action.key] = numbers[rank]
        numbers[rank] += 1
    faults = [Silent(1, at[1, "restore/0/0/moved/0/1"]), Early(2, at[2, "restore/0/0/vote"])]
    again = World(0, RestoreRig(layout_of("copies:1", 1, 1, 1)).sessions(), faults=faults)
    results = again.run()
    assert {rank: str(result.error) for rank, result in results.items()} == {
        0: "no vote from rank 1",
        2: "no vote from rank 1",
    }
    assert not again._over
