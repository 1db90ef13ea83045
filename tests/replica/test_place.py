"""Where the work behind ``save`` runs when nothing is said."""

from __future__ import annotations

import logging
import os

import psutil
import pytest

import replica
from replica import checkpointer, place
from replica.config import Options
from replica.group import MemoryGroup, TorchGroup
from replica.place import background_of


class Ranks(TorchGroup):
    """A process group whose store is at an address, or is of another kind."""

    def __init__(self, address):
        self.rank, self.world, self._address = 3, 8, address

    def store_address(self):
        """Where the TCPStore is."""
        return self._address


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (MemoryGroup.make(1)[0], "process"),
        (MemoryGroup.make(2)[0], "thread"),
        (Ranks("host:1"), "process"),
        (Ranks(None), "thread"),
    ],
)
def test_a_process_wherever_one_can_be_had(group, expected, caplog):
    """And where none can, one line says why; what was chosen is never changed."""
    with caplog.at_level(logging.INFO, "planaria"):
        assert background_of(Options(), group) == expected
    assert ("no TCPStore" in caplog.text) == (expected == "thread")
    for chosen in ("thread", "process"):
        assert background_of(Options(background=chosen), group) == chosen


def test_a_system_without_descriptors_of_processes(monkeypatch, caplog):
    """Linux before 5.3 has none: there the thread is taken."""

    def missing(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(place.os, "pidfd_open", missing)
    with caplog.at_level(logging.INFO, "planaria"):
        assert background_of(Options(), Ranks("host:1")) == "thread"
    assert "Function not implemented" in caplog.text


def test_the_default_is_a_process(arena_dir, monkeypatch):
    """One that is gone after the close, and whose step the next start restores."""
    monkeypatch.setattr(checkpointer, "background_of", background_of)
    options = {"job": "job", "node_id": "a", "arena_dir": str(arena_dir), "redundancy": "none"}
    me = psutil.Process(os.getpid())
    before = set(me.children())
    state = {"x": 1}
    with replica.Checkpointer(state, **options) as ckpt:
        assert ckpt.restore() is None
        assert len(set(me.children()) - before) == 1
        ckpt.save(7).wait()
    assert set(me.children()) == before
    state["x"] = 2
    with replica.Checkpointer(state, **options) as ckpt:
        assert ckpt.restore() == 7
    assert state == {"x": 1}
