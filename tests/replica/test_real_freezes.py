"""Processes that stand still: nobody waits for them beyond the deadline; they may come back."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.replica.worlds import names

pytestmark = pytest.mark.real

DEADLINE_S = 3.0
SLACK_S = 5.0


@pytest.mark.parametrize(("frozen", "point"), [(2, "key ready/"), (0, "send")])
def test_a_worker_is_frozen_in_a_save(real, frozen, point):
    """One of 3 stands still: the others abort naming it and train on; then all save again."""
    world = real.open("abc", timeout_s=DEADLINE_S)
    assert world.each("commit", step=1) == ["committed"] * 3
    world[frozen].call("at", point=point, action="stop")
    started = time.monotonic()
    world.begin("save", step=2)
    world[frozen].stopped()
    others = [rank for rank in range(3) if rank != frozen]
    for rank in others:
        assert world[rank].result()["skipped"] is False
    for during in world.each("save", ranks=others, step=3):
        assert during["seconds"] < DEADLINE_S / 2
    for reason in world.each("settle", ranks=others, step=2):
        assert names(reason, frozen), reason
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    world[frozen].go_on()
    assert world[frozen].result()["skipped"] is False
    assert world[frozen].call("settle") != "committed"
    world[frozen].call("save", owner=frozen, step=3)
    assert world.each("commit", step=4) == ["committed"] * 3


def test_the_store_is_frozen(real):
    """The store's process stands still: saves are skipped by the deadline; then all goes on."""
    *workers, keeper = real.pool.take(3)
    world = real.open("ab", workers, keeper.call("host_store"), timeout_s=DEADLINE_S)
    assert world.each("commit", step=1) == ["committed"] * 2
    keeper.process.send_signal(signal.SIGSTOP)
    keeper.stopped()
    for during in world.each("save", step=2):
        assert during["skipped"] is True
        assert during["seconds"] < DEADLINE_S + SLACK_S
    keeper.go_on()
    # A request that is overdue at one rank alone may cost one more step, which is aborted.
    committed = (
        step for step in range(3, 8) if set(world.each("commit", step=step)) == {"committed"}
    )
    assert next(committed)


def test_a_rank_that_does_not_save_is_named(real):
    """Rank 1 leaves a save out, the first one or a later one: rank 0 learns by the deadline who."""
    world = real.open("ab", timeout_s=DEADLINE_S)
    world.each("start")
    ((kind, text),) = world.fail("save", ranks=[0], step=1)
    assert (kind, names(text, 1)) == ("PeerError", True), text
    again = real.reopen(world, timeout_s=DEADLINE_S)
    assert again.each("commit", step=2) == ["committed"] * 2
    assert names(again[0].call("commit", owner=0, step=3), 1)
    assert again[1].call("save", owner=1, step=3)["skipped"] is False
    assert names(again[1].call("settle"), 1)
    assert again.each("commit", step=4) == ["committed"] * 2


def test_a_fault_behind_a_save_is_told_to_all(real):
    """The background work of rank 1 fails: both learn who and why, well before the deadline."""
    world = real.open("ab")
    assert world.each("commit", step=1) == ["committed"] * 2
    world[1].call("at", point="encode", action="raise")
    for reason in world.each("commit", step=2):
        assert re.search(r"rank 1: .*a fault made by the test", reason), reason
    assert world.each("commit", step=3) == ["committed"] * 2
