"""An exception from a signal handler, as Ctrl-C's, at any moment of start, save, restore and close.

The rank runs in the main thread, where a real signal strikes; its handler raises what no ``except
Exception`` catches. Afterwards ``close`` must not wait for what will never come, nothing may stay
locked, and the next start must find the newest committed step.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

from replica.arena import Arena, read_arenas
from replica.at_exit import THREAD_PREFIX
from replica.driver import Driver
from replica.encode import EncodePass
from replica.engine import Engine
from replica.fetch import Fetcher
from replica.snapshot import LoadPlan, Snapshot
from replica.staging import Stager
from replica.timed_store import TimedStore
from tests.replica.inprocess import COMMIT_S, Cluster, outcomes
from tests.replica.strikes import Interrupted

TIMEOUT_S = 12.0
"""Deadline of the Checkpointers: what is over much sooner did not wait for it."""
SOON_S = TIMEOUT_S / 3


OTHERS: set[threading.Thread] = set()
"""Threads that earlier tests left waiting in a transport."""


@pytest.fixture(autouse=True)
def others():
    """Know the threads that are not of this test."""
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


def alone(arena_dir, **options):
    """Make the only rank of a job."""
    options = {"timeout_s": TIMEOUT_S} | options
    return Cluster(arena_dir, ["a"], "none", **options).member(0)


def close_soon(me) -> None:
    """Close in much less than any deadline; nothing of ours runs afterwards."""
    started_s = time.monotonic()
    me.ckpt.close()
    me.ckpt.close()
    assert time.monotonic() - started_s < SOON_S
    new = [thread for thread in threading.enumerate() if thread not in OTHERS]
    ours = [thread for thread in new if thread.name.startswith(THREAD_PREFIX)]
    for thread in ours:
        thread.join(SOON_S)
    assert [thread.name for thread in ours if thread.is_alive()] == []


def check_next_start(arena_dir, step) -> None:
    """No lock is left, and what was committed is found, in this process and its arena."""
    (view,) = read_arenas(arena_dir)
    assert not view.alive
    again = alone(arena_dir)
    assert again.restore()["step"] == step
    again.commit((step or 0) + 10)
    close_soon(again)


SAVE = [
    (TimedStore, "compare_set", False),
    (TimedStore, "compare_set", True),
    (Driver, "admit", False),
    (Driver, "admit", True),
    (Stager, "_copy", False),
    (Stager, "_take_slot", True),
    (Snapshot, "begin_capture", False),
    (Snapshot, "begin_capture", True),
    (Driver, "submit", False),
    (Driver, "submit", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), SAVE)
def test_in_the_middle_of_a_save(arena_dir, strike, owner, name, after):
    """Step 2's save is broken off at each of its calls: closing is quick, and 1 or 2 is found."""
    me = alone(arena_dir)
    me.commit(1)
    struck = strike(owner, name, after=after)
    me.train(2)
    with pytest.raises(Interrupted):
        me.ckpt.save(2)
    assert struck
    close_soon(me)
    (view,) = read_arenas(arena_dir)
    assert view.head.committed.step in (1, 2)
    check_next_start(arena_dir, view.head.committed.step)


@pytest.mark.parametrize(("owner", "name", "after"), SAVE)
def test_saving_goes_on_after_a_broken_save(arena_dir, strike, owner, name, after):
    """A script that catches the interrupt and trains on: a later step is saved and committed."""
    me = alone(arena_dir)
    me.commit(1)
    strike(owner, name, after=after)
    me.train(2)
    with pytest.raises(Interrupted):
        me.ckpt.save(2)
    started_s = time.monotonic()
    me.train(3)
    me.ckpt.save(3, when_busy="wait").wait("committed", COMMIT_S)
    assert time.monotonic() - started_s < SOON_S
    close_soon(me)
    check_next_start(arena_dir, 3)


def test_while_a_save_waits_for_the_one_before(arena_dir, strike, monkeypatch):
    """With a save held behind, the interrupt ends ``save(when_busy="wait")``; step 1 is kept."""
    gate = threading.Event()
    inner = EncodePass.run
    monkeypatch.setattr(EncodePass, "run", lambda self: (gate.wait(COMMIT_S), inner(self))[1])
    me = alone(arena_dir)
    me.train(1)
    me.ckpt.save(1)
    entered = threading.Event()
    wait_ready = Driver.wait_ready
    monkeypatch.setattr(Driver, "wait_ready", lambda *args: (entered.set(), wait_ready(*args))[1])

    def kill():
        entered.wait(COMMIT_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(Interrupted):
        me.ckpt.save(2, when_busy="wait")
    gate.set()
    close_soon(me)
    check_next_start(arena_dir, 1)


@pytest.mark.parametrize(
    ("owner", "name"), [(Fetcher, "run"), (Snapshot, "prepare"), (TimedStore, "compare_set")]
)
def test_in_the_middle_of_a_restore(arena_dir, strike, owner, name):
    """Before the live objects are touched: they are as they were, and the next start restores."""
    me = alone(arena_dir)
    me.commit(1)
    close_soon(me)
    me = alone(arena_dir)
    struck = strike(owner, name)
    with pytest.raises(Interrupted):
        me.ckpt.restore()
    assert struck
    assert me.is_at(0)
    close_soon(me)
    check_next_start(arena_dir, 1)


def test_in_the_middle_of_loading(arena_dir, strike):
    """After the live objects were touched: closing is quick, and the next start restores."""
    me = alone(arena_dir)
    me.commit(1)
    close_soon(me)
    me = alone(arena_dir)
    strike(LoadPlan, "commit", after=True)
    with pytest.raises(Interrupted):
        me.ckpt.restore()
    close_soon(me)
    check_next_start(arena_dir, 1)


CLOSE = [
    (Driver, "wait_decided"),
    (Driver, "stop"),
    (Engine, "_say_goodbye"),
    (TimedStore, "close"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), CLOSE)
def test_in_the_middle_of_closing(arena_dir, strike, owner, name, after):
    """The interrupt ends ``close``; a second one finishes it, and the arena is free again."""
    me = alone(arena_dir)
    me.commit(1)
    struck = strike(owner, name, after=after)
    with pytest.raises(Interrupted):
        me.ckpt.close()
    assert struck
    close_soon(me)
    check_next_start(arena_dir, 1)


@pytest.mark.parametrize("name", ["allocate", "update_head"])
def test_in_the_middle_of_opening(arena_dir, strike, name):
    """The interrupt ends ``start``: the arena is not kept by a Checkpointer that nobody has."""
    me = alone(arena_dir)
    struck = strike(Arena, name)
    with pytest.raises(Interrupted):
        me.ckpt.start()
    assert struck
    close_soon(me)
    check_next_start_of_nothing(arena_dir)


def check_next_start_of_nothing(arena_dir) -> None:
    """The arena can be opened at once, and there is nothing to restore."""
    again = alone(arena_dir)
    assert again.restore()["step"] is None
    again.commit(1)
    close_soon(again)


def test_an_interrupted_rank_does_not_hold_up_the_others(arena_dir, strike):
    """Rank 0's copy is broken off: rank 1's save is aborted at once and names rank 0."""
    cluster = Cluster(arena_dir, ["a", "b"], "copies:1", timeout_s=TIMEOUT_S)
    members = [cluster.member(rank) for rank in range(2)]
    reached, told = threading.Event(), []

    def other():
        me = members[1]
        me.commit(1)
        reached.wait(COMMIT_S)
        me.train(2)
        ticket = me.ckpt.save(2)
        with pytest.raises(Exception, match="not committed") as failed:
            ticket.wait("committed", COMMIT_S)
        told.append(str(failed.value))
        me.ckpt.close()

    thread = threading.Thread(target=lambda: outcomes(1, lambda _: other()), daemon=True)
    thread.start()
    members[0].commit(1)
    strike(Stager, "_copy")
    reached.set()
    started_s = time.monotonic()
    members[0].train(2)
    with pytest.raises(Interrupted):
        members[0].ckpt.save(2)
    thread.join(COMMIT_S)
    assert time.monotonic() - started_s < SOON_S
    assert "rank 0" in told[0]
    close_soon(members[0])
