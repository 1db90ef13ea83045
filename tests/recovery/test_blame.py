"""Whom a save that waited in vain lays it on: the earliest stage that is not complete, in words."""

from __future__ import annotations

import pytest

from recovery.actions import Await, Got, Missing
from recovery.blame import late_in_group, not_come
from recovery.tree import FANOUT, silent_ranks
from tests.recovery.rigs import layout_of

GEN = "0" * 32
STAGES = {"offer": "offer", "READY": "ready", "acknowledgement": "ack"}


def group_keys(layout, rank):
    """Return the keys of each stage of ``rank``'s group, with the rank that writes each."""
    node = layout.topology.node_of_rank[rank]
    (group,) = (group for group in layout.groups if node in group)
    owners = [r for name in group for r in layout.topology.ranks_by_node[name]]
    found = {"offer": {f"offer/{GEN}/{owner}": owner for owner in owners}}
    for what in ("READY", "acknowledgement"):
        found[what] = {
            f"{STAGES[what]}/{GEN}/{f.owner}/{f.index}": f.holder
            for owner in owners
            for f in layout.sent_by(owner)
        }
    return found


def look(session, there):
    """Answer every look from the keys that are ``there``; return what the session returns."""
    answer = None
    while True:
        try:
            action = session.send(answer)
        except StopIteration as stop:
            return stop.value
        assert isinstance(action, Await)
        assert action.look, "after a deadline nobody waits again"
        assert action.what
        gone = tuple(key for key in action.keys if key not in there)
        answer = Missing(gone) if gone else Got(dict.fromkeys(action.keys, b""))


@pytest.mark.parametrize("rank", [0, 4, 6])
@pytest.mark.parametrize("stage", STAGES)
def test_the_writers_of_the_earliest_missing_stage_are_named(stage, rank):
    """Two groups of stripe:1+1: each key of a stage lacks in turn, and its writer alone is named.

    The stages after it lack as well; the other group's keys are there and are not looked at.
    """
    layout = layout_of("stripe:1+1", 1, 1, 1, 1, 2, 1)
    keys = group_keys(layout, rank)
    for key, writer in keys[stage].items():
        there = set()
        for what, some in keys.items():
            if what == stage:
                there |= set(some) - {key}
                break
            there |= set(some)
        said = look(late_in_group(layout, GEN, rank), there)
        assert said == not_come(stage, [writer])
        assert f"rank {writer}" in said


def test_who_made_no_offer_has_not_saved():
    """The words are those of a user, who calls save() and makes no offers: what must be done."""
    said = not_come("offer", [1], " by the deadline")
    assert said.startswith("rank 1 did not save this step by the deadline")
    assert "every rank must call save() with the same steps" in said
    assert not_come("READY", [0, 1], " now") == "no READY from ranks 0, 1 now"


def test_nobody_is_named_when_everything_is_there():
    """All keys of the group came in the meantime: no name and no word."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    there = {key for some in group_keys(layout, 0).values() for key in some}
    assert look(late_in_group(layout, GEN, 0), there) == ""


def test_several_late_ranks_are_named_once_each_and_in_order():
    """Every READY of three nodes lacks: each holder once, whatever it holds."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    there = set(group_keys(layout, 0)["offer"])
    assert look(late_in_group(layout, GEN, 0), there) == "no READY from ranks 0, 1, 2"


def test_silent_ranks_are_looked_for_and_never_waited_for():
    """Two levels of a gather, rank 65 silent: both looks are answered at once."""
    world = FANOUT + 2
    there = {f"g/0/{rank}" for rank in range(world - 1)} | {"g/1/0"}
    assert look(silent_ranks("g", world), there) == (65,)
    # Its worker has all that it needs and has not published: it is that one.
    there |= {"g/0/65"}
    assert look(silent_ranks("g", world), there) == (64,)
