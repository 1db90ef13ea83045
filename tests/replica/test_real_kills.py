"""Killed with the store, beside a store of its own, amid a restore; else see ``tests/kills``."""

from __future__ import annotations

import pytest

from tests.replica.pool import failures
from tests.replica.worlds import UNSAVED_STEP, names

pytestmark = pytest.mark.real

DEADLINE_S = 4.0


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
    assert names(world[1].call("settle"), 0)
    assert world[1].call("save", owner=1, step=3)["skipped"] is False
    assert names(world[1].call("settle"), 0)
    assert world[1].call("status")["committed_step"] == 1


def test_a_worker_is_killed_in_a_restore(real):
    """Rank 2 dies as it serves a fragment: nobody's state changes, and the next start restores."""
    options = {"redundancy": "stripe:2+1", "timeout_s": DEADLINE_S}
    world = real.open("abcd", **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    world.leave()
    real.lose("a")
    again = real.open("ebcd", world.workers, **options)
    again[2].call("at", point="send", action="kill")
    again.begin("restore")
    again[2].died()
    survivors = [again[rank] for rank in (0, 1, 3)]
    for kind, text in failures(survivors):
        assert (kind, names(text, 2)) == ("RestoreAborted", True), text
    assert all(again.each("state_is", ranks=(0, 1, 3), step=UNSAVED_STEP))
    again.each("give_up", ranks=(0, 1, 3))
    fresh = real.pool.replace(again[2])
    last = real.open("ebcd", [*survivors[:2], fresh, survivors[2]], **options)
    assert last.each("restore") == [1] * 4
    assert all(last.each("state_is", step=1))
