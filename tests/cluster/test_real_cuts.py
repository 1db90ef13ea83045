"""Links that are cut silently: nobody hangs, nothing committed is lost, all goes on when healed."""

from __future__ import annotations

import time
from itertools import count

import pytest

from tests.cluster.addresses import NETWORKS, STORE_ADDRESS
from tests.replica.worlds import UNSAVED_STEP, names

pytestmark = [pytest.mark.real, pytest.mark.long]

DEADLINE_S = 3.0
SLACK_S = 5.0
AGAIN_S = 40.0
"""How long after a cut is healed a save must have been committed: nobody waits for so long."""
ELEMENTS = 1 << 20
SLOW_BYTES_PER_S = 1e6
"""So that bytes are on their way when a link is cut: a fragment of a toy has twice that."""


@pytest.fixture
def options(job):
    """Return the options of every Checkpointer here: bulk has a network of its own."""
    return {
        "redundancy": "stripe:2+1",
        "timeout_s": DEADLINE_S,
        "network_interface": "eth1",
        "elements": ELEMENTS,
        "job": job,
    }


def commit_again(world, first):
    """Save from step ``first`` until a save is committed; its step."""
    limit = time.monotonic() + AGAIN_S
    for step in count(first):
        outcomes = world.each("commit", step=step)
        if set(outcomes) == {"committed"}:
            return step
        assert time.monotonic() < limit, outcomes
    raise AssertionError


@pytest.mark.parametrize("networks", [tuple(NETWORKS), ("bulk",)], ids=["all", "bulk"])
def test_a_node_is_cut_off_in_a_save(cluster, options, networks):
    """Rank 1 of 4 is cut off as its bytes move: the others learn that it was the one, in time.

    It trains on itself, and when the link is there again the same processes save again.
    """
    world = cluster.open(4, **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    cluster.switch.slow_down(world[1], SLOW_BYTES_PER_S)
    world[1].call("hold", point="send")
    started = time.monotonic()
    world.begin("save", step=2)
    world[1].hear("held at send")
    cluster.switch.cut(world[1], networks)
    for rank in range(4):
        assert world[rank].result()["skipped"] is False
    world[1].call("let_go")
    others = (0, 2, 3)
    waiting = world.begin("settle", ranks=others, step=2)
    during = world[1].call("save", owner=1, step=3)
    assert during["seconds"] < DEADLINE_S + SLACK_S
    for node in waiting:
        reason = node.result()
        assert names(reason, 1), reason
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    for rank in others:
        assert world[rank].call("status")["committed_step"] == 1
    cluster.switch.heal()
    world.each("save", ranks=others, step=3)
    last = commit_again(world, 4)
    assert [said["committed_step"] for said in world.each("status")] == [last] * 4


def test_a_pair_is_cut_apart(cluster, options):
    """Ranks 1 and 2 reach the store and all others, not each other: saves are aborted naming both.

    Those that had a connection before, and those that try to make one; healed, they save again.
    """
    world = cluster.open(4, **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    cluster.switch.part(world[1], world[2])
    for step in (2, 3):
        started = time.monotonic()
        for reason in world.each("commit", step=step):
            assert names(reason, 1), reason
            assert names(reason, 2), reason
        assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert [said["committed_step"] for said in world.each("status")] == [1] * 4
    cluster.switch.heal()
    assert commit_again(world, 4) >= 4


def begin_a_restore(cluster, options, networks):
    """Lose rank 3 of 4 and cut rank 1 off as it sends the fresh one a fragment; the new world."""
    world = cluster.open(4, **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    world[3].kill()
    world.each("give_up", ranks=range(3))
    again = cluster.open([*world.workers[:3], cluster.fresh(world[3])], **options)
    again.each("start")
    cluster.switch.slow_down(again[1], SLOW_BYTES_PER_S)
    again[1].call("hold", point="send")
    again.begin("timed", job="restore")
    again[1].hear("held at send")
    cluster.switch.cut(again[1], networks)
    return again


def test_a_node_is_cut_off_in_a_restore(cluster, options):
    """A source is lost to all: they abort naming it, unchanged, and the next start restores.

    To move bytes and to vote are two phases, each with the deadline.
    """
    world = begin_a_restore(cluster, options, tuple(NETWORKS))
    for rank in (0, 2, 3):
        said = world[rank].result()
        assert (said["kind"], names(said["text"], 1)) == ("RestoreAborted", True), said
        assert said["seconds"] < 2 * DEADLINE_S + SLACK_S
    said = world[1].result()
    assert said["kind"] in ("RestoreAborted", "RestoreHalfDone"), said
    assert said["seconds"] < 2 * DEADLINE_S + SLACK_S
    assert all(world.each("state_is", step=UNSAVED_STEP))
    cluster.switch.heal()
    world.each("give_up")
    last = cluster.open(world.workers, **options)
    assert last.each("restore") == [1] * 4
    assert all(last.each("state_is", step=1))


def test_bytes_that_do_not_come_are_had_from_others(cluster, options):
    """A source reaches the store and sends nothing: its peer says so, is heard, and asks others.

    The fewer bytes are waited for, the less time is left to say so: here they are few.
    """
    world = begin_a_restore(cluster, options | {"elements": 10}, ["bulk"])
    for node in world.workers:
        said = node.result()
        assert (said["value"], said["kind"]) == (1, ""), said
        assert said["seconds"] < 2 * DEADLINE_S + SLACK_S
    assert all(world.each("state_is", step=1))


def test_half_of_the_ranks_lose_the_store(cluster, options):
    """Ranks 2 and 3 are parted from the store and the others, all shards HELD, as rank 0 decides.

    They keep both generations and save nothing alone. Rank 3 closes, in time, and its node is lost;
    rank 2 learns the decision when the partition ends. All start again from there. The store is
    that of PLANARIA_STORE.
    """
    store = {"name": "PLANARIA_STORE", "value": f"{STORE_ADDRESS}:{cluster.port}"}
    nodes = cluster.nodes(4)
    for node in nodes:
        node.call("set_environment", **store)
    world = cluster.open(nodes, **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    world[0].call("hold", point="compare_set decision/")
    world.begin("save", step=2)
    world[0].hear("held at compare_set decision/")
    cluster.switch.split([world[2], world[3]])
    for rank in range(4):
        assert world[rank].result()["skipped"] is False
    world[0].call("let_go")
    assert world.each("settle", ranks=(0, 1), step=2) == ["committed"] * 2
    for said in world.each("save", ranks=(2, 3), step=3):
        assert said["skipped"] is True
        assert said["seconds"] < DEADLINE_S + SLACK_S
    for rank in (2, 3):
        assert world[rank].call("own_steps") == [1, 2]
        assert world[rank].call("held_steps") == [1, 1, 1, 2, 2, 2]
        assert world[rank].call("status")["committed_step"] == 1
    said = world[3].call("timed", job="close")
    assert said["seconds"] < DEADLINE_S + SLACK_S, said
    world[3].kill()
    cluster.switch.heal()
    assert world[2].call("settle", step=2, timeout_s=AGAIN_S) == "committed"
    world.each("give_up", ranks=range(3))
    fresh = cluster.fresh(world[3])
    fresh.call("set_environment", **store)
    again = cluster.open([*world.workers[:3], fresh], **options)
    assert again.each("restore") == [2] * 4
    assert all(again.each("state_is", step=2))
    assert again.each("commit", step=3) == ["committed"] * 4


def test_an_answer_of_the_store_that_is_lost_is_not_waited_for_for_ever(cluster, options):
    """The store has heard rank 1 and its answer is cut off; then its kernel forgets the connection.

    Nothing ever comes on such a connection: seen, the rank waited and no save was committed again.
    """
    switch = cluster.switch
    world = cluster.open(2, **options | {"redundancy": "copies:1"})
    assert world.each("commit", step=1) == ["committed"] * 2
    world[0].call("hold", point="send")
    world.begin("save", step=2)
    world[0].hear("held at send")
    for node in world.workers:
        assert node.result()["skipped"] is False
    with switch.standing_still():
        # It asks now and then, and goes on to the next only when it has been told.
        assert world[1].call("save", owner=1, step=3)["skipped"] is True
        switch.cut(world[1])
    switch.forget(world[1])
    world[0].call("let_go")
    switch.heal()
    assert commit_again(world, 4) >= 4
