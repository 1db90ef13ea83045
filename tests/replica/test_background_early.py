"""With a background process ``save`` returns once the state is captured, and reads it ahead."""

from __future__ import annotations

import logging
import signal
import threading

import numpy as np
import pytest
import torch

import replica
from replica.remote import RemoteEngine
from replica.serving import Serving
from replica.snapshot import Snapshot
from replica.ticket import Ticket
from tests.replica.background_tools import Faults, checkpointers
from tests.replica.inprocess import COMMIT_S
from tests.replica.snapshot_tools import HEADER
from tests.replica.strikes import Interrupted, raise_interrupted, strike_at

pytestmark = pytest.mark.real

TAIL = "replica.driver.Driver.submit"
"""What the process does when the trainer has answered for the last time."""


class Asked:
    """A user's object that counts how often it is asked for its state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self):
        """Say something."""
        self.count += 1
        return {"count": 0}

    def load_state_dict(self, state):
        """Take it."""


@pytest.fixture
def faults():
    """Faults in the background processes of this test, which are let go at its end."""
    found = Faults()
    yield found
    found.do("go_on")


@pytest.fixture
def make(arena_dir, faults):
    """Return a maker of Checkpointers."""
    with checkpointers(arena_dir, 30.0) as maker:
        yield maker
        faults.do("go_on")


@pytest.mark.parametrize("overlap", [False, True])
def test_it_returns_before_the_call_has_ended(make, faults, overlap):
    """The ticket is there, staged; the state may change; status and the next call wait for it."""
    weight = torch.zeros(100_000)
    ckpt = make({"w": weight}, overlap=overlap)
    ckpt.save(1).wait("committed", COMMIT_S)
    faults.do("stay", where=TAIL, word="tail")
    ticket = ckpt.save(2)
    faults.hear("tail")
    ticket.wait("staged", COMMIT_S)
    assert not ticket.done
    weight.fill_(7.0)
    looks = []
    look = threading.Thread(target=lambda: looks.append(ckpt.status()))
    look.start()
    faults.do("go_on")
    look.join()
    assert looks[0]["may_lose_steps"] == 1 or looks[0]["committed_step"] == 2
    ticket.wait("committed", COMMIT_S)
    assert ckpt.restore() == 2
    assert weight.eq(0.0).all()


def test_an_error_behind_it_is_told_by_the_ticket(make, faults, caplog):
    """Nobody waits for the call any more: ticket and log have the error; the next save works."""
    ckpt = make({"w": torch.zeros(10)})
    ckpt.save(1).wait("committed", COMMIT_S)
    faults.do("fail", where=TAIL, text="behind the trainer's back")
    with caplog.at_level(logging.WARNING, "planaria"):
        ticket = ckpt.save(2)
        with pytest.raises(replica.SaveFailed, match="behind the trainer"):
            ticket.wait("committed", COMMIT_S)
        ckpt.save(3).wait("committed", COMMIT_S)
        ckpt.close()
    assert "before it fails: behind the trainer's back" in caplog.text


def test_what_the_process_tells_while_it_returns_holds(make, faults, monkeypatch):
    """How long a wait for its ticket may take, say: it is made once, as the state is captured."""
    inner = RemoteEngine._leave_open

    def leave_open(self, step):
        inner(self, step)
        self._early.limit_s = 77.0

    ckpt = make({"w": torch.zeros(10)})
    ckpt.save(1).wait("committed", COMMIT_S)
    monkeypatch.setattr(RemoteEngine, "_leave_open", leave_open)
    faults.do("stay", where=TAIL, word="tail")
    ticket = ckpt.save(2)
    faults.hear("tail")
    assert ticket.limit_s == 77.0
    faults.do("go_on")
    ticket.wait("committed", COMMIT_S)


@pytest.fixture
def ahead(monkeypatch):
    """Return the list of what was read ahead: whether there was something to keep."""
    found, inner = [], Snapshot.read_ahead

    def read_ahead(self):
        inner(self)
        found.append(self._ahead is not None)

    monkeypatch.setattr(Snapshot, "read_ahead", read_ahead)
    return found


def test_it_reads_the_state_once(make, ahead, monkeypatch):
    """What is read ahead is what is captured, and nothing is kept."""
    reads, inner = [], Snapshot._capture_again
    monkeypatch.setattr(
        Snapshot,
        "_capture_again",
        lambda self, *args, **more: reads.append(1) or inner(self, *args, **more),
    )
    ckpt = make({"w": torch.zeros(10), "layer": torch.nn.Linear(3, 3), "n": 1})
    ckpt.save(1).wait("committed", COMMIT_S)
    reads.clear()
    for step in (2, 3):
        ckpt.save(step).wait("committed", COMMIT_S)
        assert len(reads) == step - 1
        assert ckpt._snapshot._ahead is None
    assert ahead[-2:] == [True, True]


def test_no_object_is_asked_ahead(make, ahead):
    """Their code may be for all ranks together, and this rank alone may have such a save."""
    asked = Asked()
    ckpt = make({"w": torch.zeros(10), "asked": asked})
    ckpt.save(1).wait("committed", COMMIT_S)
    for step in (2, 3):
        before = asked.count
        ckpt.save(step).wait("committed", COMMIT_S)
        assert asked.count == before + 1
    assert not any(ahead)


def test_an_object_that_has_come_meanwhile_is_not_asked_ahead(make, ahead):
    """Nor one in the place of a plain value, when what is known of the state is true no longer."""
    state = {"w": torch.zeros(10), "box": {"n": 1}}
    ckpt = make(state)
    for step in (1, 2):
        ckpt.save(step).wait("committed", COMMIT_S)
    asked = state["box"]["n"] = Asked()
    ckpt.save(3).wait("committed", COMMIT_S)
    assert ahead == [False, True, False]
    # The walk asks it once, and the recipe that is made of it hears the same.
    assert asked.count == 1


def test_nothing_is_read_for_a_step_that_is_skipped(make, faults, ahead):
    """Not at steps that are none of its interval's, and not while a save is under way."""
    ckpt = make({"w": torch.zeros(10)}, interval_steps=2)
    ckpt.save(2).wait("committed", COMMIT_S)
    before = len(ahead)
    assert ckpt.save(3).skipped
    faults.do("stay", where="replica.driver.Driver._finish", word="busy")
    ticket = ckpt.save(4)
    faults.hear("busy")
    assert len(ahead) == before + 1
    assert ckpt.save(6).skipped
    assert len(ahead) == before + 1
    faults.do("go_on")
    ticket.wait("committed", COMMIT_S)


def test_what_fails_ahead_is_read_again(make, monkeypatch):
    """Whatever goes wrong ahead of the capture is not heard: the capture says it, or goes well."""

    def read_ahead(self):
        raise MemoryError(f"{self} ahead")

    ckpt = make({"w": torch.zeros(10)})
    ckpt.save(1).wait("committed", COMMIT_S)
    monkeypatch.setattr(Snapshot, "read_ahead", read_ahead)
    ckpt.save(2).wait("committed", COMMIT_S)


@pytest.mark.parametrize("between", ["plan", "estimate_bytes"])
def test_what_was_read_ahead_is_dropped_at_another_look(between):
    """Addresses belong to the newest look: with those of a later one its leaves would be others."""
    snapshot = Snapshot({"w": torch.zeros(10)}, random_states=True)
    buffer = np.zeros(2 * snapshot.plan(0).capacity_bytes, np.uint8)
    snapshot.capture_into(buffer, HEADER)
    snapshot.read_ahead()
    assert snapshot._ahead is not None
    getattr(snapshot, between)(0)
    assert snapshot._ahead is None


def test_what_was_read_ahead_is_dropped_when_anything_else_is_asked(make, ahead, monkeypatch):
    """A listener may change the state, say: what was read before it is not captured."""
    state = {"w": torch.zeros(10), "n": 1}
    ckpt = make(state)
    for step in (1, 2):  # each of both slots is made, for which the state is looked at too
        ckpt.save(step).wait("committed", COMMIT_S)
    serving, inner = ckpt._engine._serving, Serving.answer

    def answer(self, ask, args):
        if ask == "capture":
            inner(self, "event", {"event": {}})
        return inner(self, ask, args)

    monkeypatch.setattr(Serving, "answer", answer)
    monkeypatch.setattr(serving, "_emit", lambda _: state.update(n=2))
    ckpt.save(3).wait("committed", COMMIT_S)
    assert ahead[-1]
    monkeypatch.setattr(serving, "_emit", lambda _: None)
    state["n"] = 3
    assert ckpt.restore() == 3
    assert state["n"] == 2


def test_a_process_that_is_not_heard_meanwhile_is_not_ended(make, monkeypatch):
    """Reading ahead may keep the reading thread from the interpreter: that is no silence."""
    ckpt = make({"w": torch.zeros(10)})
    ckpt.save(1).wait("committed", COMMIT_S)
    line = ckpt._engine._line

    def read_ahead(*_):
        line._heard_s -= 1000.0

    monkeypatch.setattr(Snapshot, "read_ahead", read_ahead)
    ckpt.save(2).wait("committed", COMMIT_S)


def test_the_process_ends_while_the_trainer_copies(make, monkeypatch):
    """The save fails at once, no ticket stays open, and the status is told without a wait."""
    ckpt = make({"w": torch.zeros(10)})
    ckpt.save(1).wait("committed", COMMIT_S)
    engine, inner = ckpt._engine, Snapshot.begin_capture

    def begin_capture(self, *args):
        engine._line.kill("by the test")
        assert engine._line._ended.wait(COMMIT_S)
        return inner(self, *args)

    monkeypatch.setattr(Snapshot, "begin_capture", begin_capture)
    assert ckpt.save(2).failed
    assert engine._left_open == 0
    assert engine._pending() == []
    assert "by the test" in ckpt.status()["broken"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["_leave_open", "_made"])
def test_ctrl_c_as_a_save_returns(make, monkeypatch, name, after):
    """Whatever is broken off there, status and the next save come soon, and are right."""
    struck = strike_at(monkeypatch, RemoteEngine, name, after=after)
    before = signal.signal(signal.SIGUSR1, raise_interrupted)
    try:
        weight = torch.zeros(10)
        ckpt = make({"w": weight})
        with pytest.raises(Interrupted):
            ckpt.save(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert struck
    ckpt.status()
    weight.fill_(2.0)
    ckpt.save(2, when_busy="wait").wait("committed", COMMIT_S)
    weight.fill_(3.0)
    assert ckpt.restore() == 2
    assert weight.eq(2.0).all()


def test_a_change_after_it_was_read_ahead_is_seen_at_the_next_save(make):
    """Each save reads anew, also when the state has another shape by then."""
    state = {"w": torch.zeros(10), "n": 0}
    ckpt = make(state)
    for step in range(1, 5):
        state["n"] = step
        state["w"].resize_(10 * step).fill_(step)
        ckpt.save(step).wait("committed", COMMIT_S)
    state["n"], kept = 0, state["w"].clone()
    state["w"].zero_()
    assert ckpt.restore() == 4
    assert state["n"] == 4
    assert torch.equal(state["w"], kept)


def test_a_limit_that_is_told_late_counts(monkeypatch):
    """A wait that began before the trainer knew how long the save may take lasts that long."""
    ticket, limits = Ticket(1), []
    ticket.limit_s = 1.0

    def wait_for(look, timeout_s):
        limits.append(timeout_s)
        ticket.follow({**ticket.facts(), "limit_s": 50.0, "stage": 1 + len(limits) // 2})
        return look()

    monkeypatch.setattr(ticket._changes, "wait_for", wait_for)
    ticket.wait("committed")
    assert [round(one) for one in limits] == [1, 50]
