"""Memory of a background process as its trainer uses it: page-locked, removed, given back."""

from __future__ import annotations

import gc
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import replica
from replica import device_copy
from replica.pinned import PageLocks
from tests.replica.arena_tools import descriptors, mappings
from tests.replica.background_tools import background_processes, checkpointers, pid_of
from tests.replica.fake_device import FakeRuntime
from tests.replica.inprocess import COMMIT_S

pytestmark = [pytest.mark.real, pytest.mark.long]

ROUNDS, WARM = 6, 1


@pytest.fixture
def make(arena_dir):
    """Return a maker of Checkpointers of a world of one, closed with the test."""
    with checkpointers(arena_dir, 30.0) as maker:
        yield maker


def commit(one, state, step: int) -> None:
    """Train and save a step."""
    state["w"].fill_(step)
    one.save(step, when_busy="wait").wait("committed", COMMIT_S)


def test_the_trainer_locks_what_it_copies_into(make, device):
    """Its own mapping of each slot, once; a slot that the state outgrows is unlocked in time."""
    state = {"w": torch.zeros(1000)}
    one = make(state)
    for step in (1, 2, 3):
        commit(one, state, step)
    assert len(device.runtime.asked) == len(device.runtime.locked) == 2
    state["w"] = torch.zeros(50_000)
    device.lanes.clear()
    for step in (4, 5):
        commit(one, state, step)
    assert len(device.runtime.locked) <= 3
    one.close()
    gc.collect()
    assert device.runtime.locked == {}
    again = make(state)
    assert again.restore() == 5
    assert torch.equal(state["w"], torch.full((50_000,), 5.0))


def test_memory_that_cannot_be_locked(make, device, monkeypatch, caplog):
    """One warning in the trainer, with what to do; every save is committed all the same."""
    refusing = FakeRuntime("CUDA error 2, out of memory")
    monkeypatch.setattr(device_copy, "LOCKS", PageLocks(refusing))
    state = {"w": torch.zeros(1000)}
    one = make(state)
    with caplog.at_level(logging.WARNING, "planaria"):
        for step in (1, 2, 3):
            commit(one, state, step)
    (record,) = [one for one in caplog.records if "page-locked" in one.getMessage()]
    assert "ulimit -l" in record.getMessage()
    assert len(refusing.asked) == 1
    assert one.restore() == 3


def test_removed_slots_are_made_again(make, arena_dir):
    """Somebody unlinks all slots: that save fails or commits, and the next ones are whole.

    None of the removed files stays mapped here.
    """
    state = {"w": torch.zeros(1000)}
    one = make(state)
    commit(one, state, 1)
    commit(one, state, 2)
    for path in arena_dir.rglob("slot-*"):
        path.unlink()
    ticket = one.save(3, when_busy="wait")
    try:
        ticket.wait("committed", COMMIT_S)
    except replica.SaveFailed as failed:
        assert "removed by somebody" in str(failed)  # noqa: PT017 - either is right
    commit(one, state, 4)
    commit(one, state, 5)
    gc.collect()
    assert deleted(arena_dir) == []
    one.close()
    again = make(state)
    assert again.restore() == 5


def deleted(arena_dir) -> list[str]:
    """List this process's mappings of files that are not there any more."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if str(arena_dir) in line and line.endswith("(deleted)")]


def test_a_removed_arena_fails_every_save(make, arena_dir):
    """Its directory is gone: saves fail, name the path and what to do; a restart makes it anew."""
    state = {"w": torch.zeros(1000)}
    one = make(state)
    commit(one, state, 1)
    for place in arena_dir.iterdir():
        shutil.rmtree(place)
    one.save(2, when_busy="wait")
    with pytest.raises(replica.SaveFailed, match=r"removed or replaced.*[Rr]estart the job"):
        one.save(3, when_busy="wait").wait("committed", COMMIT_S)
    one.close()
    again = make(state)
    assert again.restore() is None
    commit(again, state, 4)


def test_two_in_one_process(make):
    """Two jobs side by side, each with a process of its own; the end of one is not the other's."""
    states = [{"w": torch.zeros(1000 + n)} for n in range(2)]
    both = [make(state, job=f"job-{n}") for n, state in enumerate(states)]
    for step in (1, 2):
        tickets = []
        for one, state in zip(both, states, strict=True):
            state["w"].fill_(step)
            tickets.append(one.save(step))
        for ticket in tickets:
            ticket.wait("committed", COMMIT_S)
    assert len({pid_of(one) for one in both}) == 2
    background_processes()[0].kill()
    fates = []
    for one, state in zip(both, states, strict=True):
        state["w"].fill_(3)
        ticket = one.save(3)
        try:
            ticket.wait("committed", COMMIT_S)
        except replica.SaveFailed:
            fates.append(2)
        else:
            fates.append(3)
        one.close()
    assert sorted(fates) == [2, 3]
    for n, (state, step) in enumerate(zip(states, fates, strict=True)):
        again = make(state, job=f"job-{n}")
        assert again.restore() == step
        again.close()


def test_many_one_after_another(make, arena_dir):
    """Each finds the step of the one before; no descriptor, thread, mapping or file is more."""
    for number in range(ROUNDS):
        state = {"w": torch.zeros(1000)}
        one = make(state)
        assert one.restore() == (number or None)
        commit(one, state, number + 1)
        one.close()
        if number == WARM:
            warm = measure(arena_dir)
    assert measure(arena_dir) == warm
    assert background_processes() == []


def measure(arena_dir) -> dict[str, int]:
    """Count what could stay behind."""
    limit_s = time.monotonic() + COMMIT_S
    for thread in threading.enumerate():
        if thread.name.startswith("planaria"):
            thread.join(max(0.0, limit_s - time.monotonic()))
    gc.collect()
    return {
        "descriptors": descriptors(),
        "threads": threading.active_count(),
        "mappings": mappings(arena_dir),
        "files": sum(1 for _ in arena_dir.rglob("*")),
    }
