"""What a signal handler or a listener does amid a call, in a trainer with a background process.

It calls ``close`` or ``save`` itself, or raises an exception of a usual kind, as a time limit does:
nothing hangs, and what is raised comes to whoever has called.
"""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

import replica
from recovery.session import RestoreAborted
from replica.errors import ConfigError
from replica.line import Line
from replica.mappings import Mappings
from replica.remote import RemoteEngine
from replica.serving import Serving
from replica.snapshot import Snapshot
from replica.wire import Wire
from tests.replica.background_tools import background_processes, checkpointers, commit
from tests.replica.inprocess import COMMIT_S
from tests.replica.strikes import strike_at

pytestmark = pytest.mark.real

TIMEOUT_S = 60.0
"""Deadline of the Checkpointers: what is over much sooner did not wait for it."""
SOON_S = TIMEOUT_S / 3

OUTSIDE = [
    (Snapshot, "read_ahead", False),
    (Snapshot, "read_ahead", True),
    (Line, "_next", False),
    (Line, "_next", True),
    (Line, "_send", False),
    (Line, "_send", True),
    (Wire, "send", True),
]
"""Moments of a save, on the trainer's side, in which it answers nothing."""
INSIDE = [
    (Serving, "answer", False),
    (Mappings, "view", True),
    (Snapshot, "begin_capture", True),
    (RemoteEngine, "_leave_open", False),
    (RemoteEngine, "_leave_open", True),
]
"""Those in which it answers."""


class Preempted(Exception):
    """What a handler raises when the time is up."""


def preempt(_checkpointer):
    """Be that handler."""
    raise Preempted("the time is up")


@pytest.fixture
def make(arena_dir):
    """Return a maker of a state and the only rank of a job."""
    with checkpointers(arena_dir, TIMEOUT_S) as maker:

        def made(**options):
            state = {"w": torch.zeros(100_000)}
            return state, maker(state, **options)

        yield made


def check_restored(make, step: int) -> None:
    """The next start finds it."""
    state, one = make()
    assert one.restore() == step
    assert torch.equal(state["w"], torch.full((100_000,), float(step)))
    one.close()


def struck_saves(make, monkeypatch, moments, act):
    """Yield a save for each moment, at which a handler strikes it that does ``act``.

    Each time the step after it is committed, and the last one is what the next start finds.
    """
    state, one = make()
    commit(state, one, 1)
    step = 1
    for owner, name, after in moments:
        struck = strike_at(monkeypatch, owner, name, after=after, act=partial(act, one))
        yield partial(one.save, step + 1, when_busy="wait")
        assert struck
        commit(state, one, step + 2)
        step += 2
    one.close()
    check_restored(make, step)


def test_an_exception_of_a_usual_kind_comes_out_as_it_is(make, monkeypatch):
    """Whenever the trainer answers nothing: the step is given up, and the next one committed."""
    for save in struck_saves(make, monkeypatch, OUTSIDE, preempt):
        with pytest.raises(Preempted):
            save()


def test_an_exception_while_the_state_is_read_fails_the_step(make, monkeypatch):
    """As an exception of the state's own would: the ticket says which, and the next one goes on."""
    for save in struck_saves(make, monkeypatch, INSIDE, preempt):
        ticket = save()
        with pytest.raises(replica.SaveFailed, match="Preempted: the time is up"):
            ticket.wait("committed", COMMIT_S)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        pytest.param(*moment, marks=() if moment[0] in {Serving, Wire} else pytest.mark.long)
        for moment in OUTSIDE + INSIDE
    ],
)
def test_close_amid_a_save(make, monkeypatch, owner, name, after):
    """It breaks the save off and closes; that says in its ticket that nothing can be saved."""
    state, one = make()
    commit(state, one, 1)
    started_s = time.monotonic()
    struck = strike_at(monkeypatch, owner, name, after=after, act=one.close)
    ticket = one.save(2, when_busy="wait")
    assert struck
    assert time.monotonic() - started_s < SOON_S
    assert one.status() == {"open": False}
    assert background_processes() == []
    with pytest.raises(replica.SaveFailed, match="step 2"):
        ticket.wait("committed", COMMIT_S)
    check_restored(make, 1)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [INSIDE[0], *(pytest.param(*one, marks=pytest.mark.long) for one in (OUTSIDE[3], INSIDE[1]))],
)
def test_close_amid_a_restore(make, monkeypatch, owner, name, after):
    """The restore ends with an error that says so, before anything has changed."""
    state, one = make()
    commit(state, one, 1)
    one.close()
    state, one = make()
    one.start()
    struck = strike_at(monkeypatch, owner, name, after=after, act=one.close)
    with pytest.raises(RestoreAborted, match="is closed"):
        one.restore()
    assert struck
    assert background_processes() == []
    assert float(state["w"].sum()) == 0
    check_restored(make, 1)


@pytest.mark.parametrize(
    ("call", "nested"),
    [("save", lambda one: one.save(99)), ("restore", lambda one: one.restore())],
    ids=["save", "restore"],
)
def test_another_call_amid_a_save_is_refused(make, monkeypatch, call, nested):
    """The process carries out one after another: it would wait for this one, and this for it."""
    for save in struck_saves(make, monkeypatch, OUTSIDE, nested):
        with pytest.raises(ConfigError, match=rf"{call}\(\) was called within save\(\)"):
            save()


def test_a_listener_that_saves_amid_a_restore(make, caplog):
    """It is told that it cannot, in the log; the restore is not harmed."""
    state, one = make()
    commit(state, one, 1)
    one.close()
    state, one = make(on_event=lambda event: one.save(2) if event["event"] == "restore" else None)
    assert one.restore() == 1
    assert "save() was called within restore()" in caplog.text
    commit(state, one, 2)


def test_two_of_them_within_one_another(make, monkeypatch, arena_dir):
    """Another Checkpointer, with a process of its own, may be called; this one still may not."""
    state, one = make()
    other_state, other = make(job="other")
    commit(state, one, 1)
    commit(other_state, other, 1)
    found = []

    def nested():
        other_struck = strike_at(monkeypatch, Line, "_next", act=inner)
        found.append(other.save(2, when_busy="wait"))
        assert other_struck

    def inner():
        with pytest.raises(ConfigError, match=r"restore\(\) was called within save\(\)"):
            one.restore()

    struck = strike_at(monkeypatch, Line, "_next", act=nested)
    found.append(one.save(2, when_busy="wait"))
    assert struck
    for ticket in found:
        ticket.wait("committed", COMMIT_S)
