"""With a background process ``save`` returns once the state is captured, and reads it ahead."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import replica
from replica.ticket import Ticket
from tests.replica.background_tools import Faults, checkpointers
from tests.replica.inprocess import COMMIT_S

pytestmark = pytest.mark.real

TAIL = "replica.driver.Driver.submit"
"""What the process does when the trainer has answered for the last time."""


class Asked:
    """A user's object that counts how often it is asked for its state; it may raise instead."""

    def __init__(self) -> None:
        self.count, self.fault = 0, None

    def state_dict(self):
        """Say something."""
        self.count += 1
        if self.fault is not None:
            raise self.fault
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


def test_it_reads_the_state_once(make):
    """What is read ahead is what is captured: no object is asked twice, and nothing is kept."""
    asked = Asked()
    ckpt = make({"w": torch.zeros(10), "asked": asked})
    ckpt.save(1).wait("committed", COMMIT_S)
    for step in (2, 3):
        before = asked.count
        ckpt.save(step).wait("committed", COMMIT_S)
        assert asked.count == before + 1
        assert ckpt._snapshot._ahead is None


def test_no_state_is_read_for_a_step_that_is_skipped(make, faults):
    """Not at steps that are none of its interval's, and not while a save is under way."""
    asked = Asked()
    ckpt = make({"w": torch.zeros(10), "asked": asked}, interval_steps=2)
    ckpt.save(2).wait("committed", COMMIT_S)
    before = asked.count
    assert ckpt.save(3).skipped
    assert asked.count == before
    faults.do("stay", where="replica.driver.Driver._finish", word="busy")
    ticket = ckpt.save(4)
    faults.hear("busy")
    before = asked.count
    assert ckpt.save(6).skipped
    assert asked.count == before
    assert ckpt._snapshot._ahead is None
    faults.do("go_on")
    ticket.wait("committed", COMMIT_S)


def test_what_fails_ahead_fails_the_save(make):
    """An object that raises when it is read ahead raises again in the capture, which is heard."""
    asked = Asked()
    ckpt = make({"w": torch.zeros(10), "asked": asked})
    ckpt.save(1).wait("committed", COMMIT_S)
    asked.fault = ValueError("not now")
    with pytest.raises(replica.SaveFailed, match="not now"):
        ckpt.save(2).wait("committed", COMMIT_S)
    asked.fault = None
    ckpt.save(3).wait("committed", COMMIT_S)


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
