"""Processes killed amid a save: survivors name the dead, and nothing committed is lost."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real

DEADLINE_S = 4.0


@pytest.mark.parametrize(
    ("point", "loses_node"),
    [("key offer/", True), ("send", False), ("key ack/", True), ("key held/", False)],
)
def test_a_worker_is_killed_in_a_save(real, point, loses_node):
    """Rank 1 of 3 dies at a point of the save of step 2: the others name it, then all restore."""
    world = real.open("abc", timeout_s=DEADLINE_S)
    assert world.each("commit", step=1) == ["committed"] * 3
    world[1].call("at", point=point, action="kill")
    world.begin("save", step=2)
    world[1].died()
    for rank in (0, 2):
        assert world[rank].result()["skipped"] is False
        assert "rank 1" in world[rank].call("settle")
    world.each("give_up", ranks=(0, 2))
    if loses_node:
        real.lose("b")
    fresh = real.pool.replace(world[1])
    nodes = "d" if loses_node else "b"
    again = real.open(f"{nodes}ac", [fresh, world[0], world[2]])
    (step,) = set(again.each("restore"))
    assert step in (1, 2)
    assert all(again.each("state_is", step=step))
    assert again.each("commit", step=3) == ["committed"] * 3


def test_rank_0_dies_with_the_store(real):
    """The store dies with rank 0: the survivor skips; started anew, each finds its own copy."""
    workers = real.pool.take(2)
    world = real.open("ab", workers, workers[0].call("host_store"), timeout_s=DEADLINE_S)
    assert world.each("commit", step=1) == ["committed"] * 2
    world[0].call("at", point="key held/", action="kill")
    world.begin("save", step=2)
    world[0].died()
    assert world[1].result()["skipped"] is False
    late = world[1].call("save", owner=1, step=3)
    assert late["skipped"] is True
    assert late["seconds"] < DEADLINE_S + 5.0
    assert world[1].call("status")["committed_step"] == 1
    again = real.open("ab", [real.pool.replace(worker) for worker in world.workers])
    (step,) = set(again.each("restore"))
    assert step in (1, 2)
    assert all(again.each("state_is", step=step))
    events = again.each("events", kind="restore")
    assert [(event["source"], event["bytes_received"]) for (event,) in events] == [("own", 0)] * 2


def test_a_store_of_its_own_outlives_rank_0(real):
    """With PLANARIA_STORE the survivor of rank 0 learns that the save is aborted, and why."""
    workers = real.pool.take(2)
    for worker in workers:
        worker.call("set_environment", name="PLANARIA_STORE", value=f"127.0.0.1:{real.port}")
    world = real.open("ab", workers, workers[0].call("host_store"), timeout_s=DEADLINE_S)
    assert world.each("commit", step=1) == ["committed"] * 2
    world[0].call("at", point="send", action="kill")
    world.begin("save", step=2)
    world[0].died()
    assert world[1].result()["skipped"] is False
    assert "rank 0" in world[1].call("settle")
    assert world[1].call("save", owner=1, step=3)["skipped"] is False
    assert "rank 0" in world[1].call("settle")
    assert world[1].call("status")["committed_step"] == 1
