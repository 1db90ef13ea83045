"""What an aborted save leaves running does not touch the memory of the next one."""

from __future__ import annotations

import threading

import pytest

from replica.encode import EncodePass
from replica.errors import PeerError, SaveFailed
from tests.replica.inprocess import Cluster


def test_an_encoding_that_outlives_its_save_has_its_parity_memory_to_itself(arena_dir, monkeypatch):
    """A rank still encodes step 2 when that is aborted: step 3 makes its parity somewhere else."""
    real, running, shared = EncodePass.run, [], []
    gate, entered = threading.Event(), threading.Event()

    def run(self):
        ring = self._ring
        shared.extend(one for one in running if one is ring)
        running.append(ring)
        if armed.is_set() and first():
            gate.wait(20)
        try:
            real(self)
        finally:
            running.remove(ring)

    def first():
        with lock:
            was_first = not entered.is_set()
            entered.set()
            return was_first

    def hook(rank, verb, *_):
        if (rank, verb) == (3, "send") and armed.is_set() and entered.is_set():
            raise PeerError("a fault made by the test")

    armed, lock = threading.Event(), threading.Lock()
    meet = threading.Barrier(4)
    monkeypatch.setattr(EncodePass, "run", run)

    def body(me):
        me.commit(1)
        meet.wait(20)
        armed.set()
        with pytest.raises(SaveFailed):
            me.commit(2)
        meet.wait(20)
        armed.clear()
        me.commit(3)
        gate.set()
        me.commit(4)

    Cluster(arena_dir, ["a", "b", "c", "d"], "stripe:2+1", hook=hook, timeout_s=1.5).run(body)
    assert entered.is_set()
    assert not shared
