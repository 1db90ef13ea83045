"""What rank 0 remembers between the attempts of a restore: damage for good, silence for a while."""

from __future__ import annotations

import pytest

from recovery.inventory import Inventory, merge_reports
from recovery.manifest import WHOLE
from recovery.sources import SILENCES_MAX, Sources
from recovery.vote import Verdict
from tests.recovery.rigs import RestoreRig, layout_of

NONE = frozenset()


def sources_of(rig):
    """Return what rank 0 begins with."""
    reports = [rig.context(rank).report for rank in rig.slots]
    return Sources(merge_reports(reports), rig.topology, {})


def verdict(bad=(), silent=(), wrong=()):
    """Return what the ranks found."""
    return Verdict(tuple(bad), tuple(silent), frozenset(wrong))


def plan_of(sources):
    """Return the plan of the next attempt."""
    return sources.freeze().plan(sources.topology)


def lost_owner(redundancy, *nodes):
    """Return a rig of two generations whose node b was lost, and what rank 0 begins with."""
    rig = RestoreRig(layout_of(redundancy, *nodes))
    rig.lose("b")
    return rig, sources_of(rig)


def test_a_silent_source_is_left_out_while_another_gives_the_same_generation():
    """Two copies of owner 1: after one was silent the other is read, and nothing is forgotten."""
    rig, sources = lost_owner("copies:2", 1, 1, 1)
    first = plan_of(sources).rebuilds[1].reads[0]
    named = (1, first.fragment, first.source)
    after = sources.after(plan_of(sources), NONE, verdict(silent=[named]))
    assert after.inventory == sources.inventory
    assert {(h.owner, h.fragment, h.rank) for h in after.silent} == {named}
    assert (after.silences, after.give_up) == (0, "")
    second = plan_of(after).rebuilds[1].reads[0]
    assert second.source != first.source
    assert plan_of(after).generation == rig.generations[-1]


def test_silences_are_counted_only_when_silent_sources_are_asked_again():
    """The only source is silent: asked again twice, with the count, and then all give up."""
    rig, sources = lost_owner("copies:1", 1, 1, 1)
    plan = plan_of(sources)
    for count in range(1, SILENCES_MAX + 1):
        sources = sources.after(plan, NONE, verdict(silent=[(1, 0, 2)]))
        assert (sources.silences, sources.silent, sources.give_up) == (count, NONE, "")
        assert plan_of(sources) == plan
    last = sources.after(plan, NONE, verdict(silent=[(1, 0, 2)]))
    assert last.give_up == (
        f"{rig.generations[-1].describe()} is there, but its bytes did not come from rank 2; "
        "to go back behind it would lose it, so start again"
    )
    assert (last.inventory, last.topology) == (sources.inventory, sources.topology)
    assert last.rejected == sources.rejected


def test_the_count_is_kept_over_attempts_in_which_nobody_was_silent():
    """Silence, then a copy that is damaged: the count of silences stays as it was."""
    _, sources = lost_owner("copies:1", 1, 1, 1)
    sources = sources.after(plan_of(sources), NONE, verdict(silent=[(1, 0, 2)]))
    after = sources.after(plan_of(sources), NONE, verdict(bad=[(0, WHOLE, 0)]))
    assert after.silences == 1


def test_who_is_silent_is_named_only_for_the_generation_that_is_given_up():
    """Silent sources of the older generation are of no interest when all give up the newest."""
    rig = RestoreRig(layout_of("copies:1", 1, 1, 1))
    sources, (older, newest) = sources_of(rig), rig.generations
    wanted = {(0, newest), (1, newest), (2, older)}
    silent = frozenset(
        h
        for h in sources.inventory.holdings
        if h.fragment == 0 and (h.owner, h.generation) in wanted
    )
    assert {h.rank for h in silent} == {0, 1, 2}
    assert "did not come from ranks 1, 2;" in sources._mute(newest, silent).give_up


def test_damage_is_for_good():
    """What was damaged is out of the inventory, in this and in every later attempt."""
    rig, sources = lost_owner("copies:2", 1, 1, 1)
    after = sources.after(plan_of(sources), NONE, verdict(bad=[(0, WHOLE, 0)]))
    gone = set(sources.inventory.holdings) - set(after.inventory.holdings)
    assert {(h.generation, h.owner, h.fragment, h.rank) for h in gone} == {
        (rig.generations[-1], 0, WHOLE, 0)
    }
    assert after.silent == NONE


def test_a_silent_source_that_turns_out_to_be_damaged_is_no_silent_source():
    """Silent first, damaged when asked again: it is not counted among the silent any more."""
    _, sources = lost_owner("copies:2", 1, 1, 1)
    plan = plan_of(sources)
    read = plan.rebuilds[1].reads[0]
    named = (1, read.fragment, read.source)
    silent = sources.after(plan, NONE, verdict(silent=[named]))
    damaged = silent.after(plan, NONE, verdict(bad=[named]))
    assert damaged.silent == NONE
    assert not any((h.owner, h.fragment, h.rank) == named for h in plan_holdings(damaged, plan))


def plan_holdings(sources, plan):
    """Return the holdings of the plan's generation."""
    return [h for h in sources.inventory.holdings if h.generation == plan.generation]


def test_wrong_sets_add_up_and_are_kept_by_generation():
    """Sets known before, sets of this attempt and those of another generation: all are kept."""
    rig, sources = lost_owner("stripe:2+2", 1, 1, 1, 1, 1)
    older = frozenset({(1, (0, 1))})
    sources = Sources(sources.inventory, sources.topology, {rig.generations[0]: older})
    plan = plan_of(sources)
    before = frozenset({(1, (0, 2))})
    after = sources.after(plan, before, verdict(wrong=[(1, (0, 1))]))
    assert after.rejected == {
        rig.generations[0]: older,
        rig.generations[1]: frozenset({(1, (0, 1)), (1, (0, 2))}),
    }
    assert plan_of(after).rebuilds[1].fragments not in {(0, 1), (0, 2)}


def test_wrong_sets_are_kept_when_silent_sources_are_asked_again():
    """Of three sets of two one is wrong, and a fragment of both others is silent: asked again.

    The wrong set stays known, or it would be tried once more.
    """
    rig, sources = lost_owner("stripe:2+1", 1, 1, 1, 1)
    plan = plan_of(sources)
    silent = next(
        (h.owner, h.fragment, h.rank)
        for h in plan_holdings(sources, plan)
        if (h.owner, h.fragment) == (1, 2)
    )
    found = verdict(silent=[silent], wrong=[(1, (0, 1))])
    after = sources.after(plan, NONE, found)
    assert after.silences == 1
    assert after.rejected == {rig.generations[-1]: frozenset({(1, (0, 1))})}
    assert plan_of(after).generation == rig.generations[-1]
    assert plan_of(after).rebuilds[1].fragments != (0, 1)


@pytest.mark.parametrize("kind", ["bad", "silent"])
def test_reads_that_nobody_holds_make_all_give_up_with_what_was_named(kind):
    """A vote names what the inventory does not have: no attempt more, the rest stays as it was."""
    _, sources = lost_owner("copies:1", 1, 1, 1)
    sources = Sources(sources.inventory, sources.topology, {plan_of(sources).generation: NONE})
    names = [(1, 0, 63), (0, WHOLE, 0)]
    after = sources.after(plan_of(sources), NONE, verdict(**{kind: names}))
    assert after.give_up == f"vote names {sorted(names)}, which the inventory does not hold"
    assert after == Sources(
        sources.inventory, sources.topology, sources.rejected, give_up=after.give_up
    )


def test_when_nothing_at_all_is_left_nobody_is_asked_again():
    """One generation, its last copy damaged: there is none, and that is no silence."""
    rig = RestoreRig(layout_of("copies:1", 1, 1), steps=(2,))
    rig.lose("b")
    sources = sources_of(rig)
    after = sources.after(plan_of(sources), NONE, verdict(bad=[(1, 0, 0)]))
    assert (after.silences, after.give_up) == (0, "")
    assert after.freeze().choice.generation is None
    assert Sources(Inventory(()), rig.topology, {}).freeze().choice.generation is None
