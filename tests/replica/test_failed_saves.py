"""Saves that fail one after another never end training, and do not stay unnoticed either."""

from __future__ import annotations

import logging

import pytest

from replica.errors import ArenaFull, PeerError, SaveFailed, StateError, StoreError
from replica.request import FAILED_LOUD, Counts
from replica.staging import Stager
from replica.unsupported import Unsupported
from tests.replica.inprocess import Cluster

NODES = ["a", "b"]


def loud(caplog) -> list[str]:
    """Return what was said at level ERROR about failures in a row."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.ERROR and "in a row" in record.getMessage()
    ]


@pytest.fixture
def failing(monkeypatch):
    """Make every save fail on rank 1 while the returned list is not empty."""
    broken, inner = [], Stager._copy

    def copy(self, generation):
        if broken and self._job.rank == 1:
            raise PeerError("a fault made by the test")
        return inner(self, generation)

    monkeypatch.setattr(Stager, "_copy", copy)
    return broken


def test_five_failures_in_a_row_are_said_once_and_counted(arena_dir, failing, caplog):
    """Seven saves fail on rank 1 after a good one: one line, seven counted; then one is good."""

    def body(me):
        me.commit(1)
        barrier(me, "broken")
        failing.append(1)
        counted = []
        for step in range(2, 9):
            me.train(step)
            with pytest.raises(SaveFailed):
                me.ckpt.save(step, when_busy="wait").wait("committed", 30)
            counted.append(me.ckpt.status()["saves_failed_in_a_row"])
        assert me.ckpt.status()["committed_step"] == 1
        assert me.is_at(8)
        barrier(me, "mended")
        failing.clear()
        barrier(me, "go on")
        me.train(9)
        me.ckpt.save(9, when_busy="wait").wait("committed", 30)
        return counted, me.ckpt.status()

    for counted, status in Cluster(arena_dir, NODES, "copies:1", on_error="warn").run(body):
        assert counted == [1, 2, 3, 4, 5, 6, 7]
        assert (status["saves_failed_in_a_row"], status["saves_aborted"]) == (0, 7)
        assert status["committed_step"] == 9
    (text,) = loud(caplog)
    for part in ("5 saves in a row", "step 6", "a fault made by the test", "step 1 is the newest"):
        assert part in text
    assert "restart the job" in text


def barrier(me, name) -> None:
    """Wait until both ranks have come here."""
    me.job.front.set(f"{name}-{me.rank}", b"1")
    while not me.job.front.check([f"{name}-{rank}" for rank in range(2)]):
        me.job.clock.pause(0.005)


def test_four_failures_are_not_loud(arena_dir, failing, caplog):
    """One less than the threshold, then a good save, then four more: nothing at level ERROR."""

    def body(me):
        me.commit(1)
        step = 1
        for _ in range(2):
            barrier(me, f"break-{step}")
            failing.append(1)
            barrier(me, f"broken-{step}")
            for _ in range(FAILED_LOUD - 1):
                step += 1
                with pytest.raises(SaveFailed):
                    me.ckpt.save(step, when_busy="wait").wait("committed", 30)
            barrier(me, f"mend-{step}")
            failing.clear()
            barrier(me, f"mended-{step}")
            step += 1
            me.train(step)
            me.ckpt.save(step, when_busy="wait").wait("committed", 30)

    Cluster(arena_dir, NODES, "copies:1").run(body)
    assert loud(caplog) == []


def test_a_store_that_is_gone_counts_as_failed_saves(arena_dir, caplog):
    """Every admission fails on one rank: training goes on there, and it says so at the fifth."""
    gone = []

    def hook(rank, verb, key, value):
        if gone and "admit" in key:
            raise StoreError("the store has gone")

    def body(me):
        me.commit(1)
        gone.append(1)
        for step in range(2, 8):
            me.train(step)
            assert me.ckpt.save(step).skipped
        return me.ckpt.status()

    (status,) = Cluster(arena_dir, ["a"], "none", hook=hook, timeout_s=2.0).run(body)
    assert (status["saves_failed_in_a_row"], status["committed_step"]) == (6, 1)
    (text,) = loud(caplog)
    assert "the store has gone" in text


def test_it_is_said_again_whenever_the_number_has_doubled(caplog):
    """Of a hundred failures the 5th, 10th, 20th, 40th and 80th are loud, on one rank only."""
    counts, quiet = Counts(loud=True), Counts()
    for step in range(100):
        counts.note_aborted(step, "why", None)
        quiet.note_aborted(step, "why", None)
    assert [int(text.split()[0]) for text in loud(caplog)] == [5, 10, 20, 40, 80]
    assert "no step is safe yet" in loud(caplog)[0]
    assert (quiet.failed_in_a_row, quiet.aborted, quiet.last_error) == (100, 100, "why")


def test_a_listener_that_exits_does_not_end_saving_in_silence(arena_dir):
    """on_event calls sys.exit() in the background thread: the next save says what happened."""

    def exits(event):
        raise SystemExit(f"at {event['step']}")

    me = Cluster(arena_dir, ["a"], "none", on_event=exits, timeout_s=5.0).member(0)
    me.ckpt.save(1)
    driver = me.ckpt._engine.driver
    assert driver._changes.wait_for(lambda: driver.broken, 5.0)
    with pytest.raises(SaveFailed, match="no further save is possible in this process: SystemExit"):
        me.ckpt.save(2)
    me.ckpt.close()


def beneath(error, cause):
    """Chain them, as ``raise error from cause`` does."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "whole"),
    [
        (beneath(ArenaFull("17 bytes free"), OSError("no space left")), True),
        (beneath(StateError("17 bytes free"), Unsupported(object(), "of no kind")), True),
        (beneath(StateError("17 bytes free"), ValueError("a bad day")), False),
        (ValueError("17 bytes free"), False),
    ],
)
def test_what_says_all_is_one_line_of_the_log(arena_dir, monkeypatch, caplog, error, whole):
    """Of our own errors the sentence is enough; of a user's method the traceback is needed."""

    def copy(*_):
        raise error

    def body(me):
        me.commit(1)
        monkeypatch.setattr(Stager, "_copy", copy)
        with pytest.raises(SaveFailed):
            me.ckpt.save(2).wait("committed", 30)

    Cluster(arena_dir, ["a"]).run(body)
    (record,) = [one for one in caplog.records if "cannot be staged" in one.getMessage()]
    assert (record.exc_info is None, "17 bytes free" in record.getMessage()) == (whole, whole)
