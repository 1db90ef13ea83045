"""Mappings are page-locked once, unlocked while they are still mapped, and right without it."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replica import pinned
from replica.pinned import CudaRuntime, PageLocks, mapping_of
from replica.slot import map_file
from tests.replica.fake_device import FakeRuntime

SIZE = 8192


def mapped(tmp_path):
    """Map a new file of zeros as the arena maps its slots."""
    with (tmp_path / "slot").open("w+b") as file:
        file.truncate(SIZE)
        return map_file(file.fileno(), SIZE, write=True)


def test_a_mapping_is_locked_once_and_whole(tmp_path):
    """Whatever view of it is asked for, and however often, the runtime hears of it once."""
    runtime, data = FakeRuntime(), mapped(tmp_path)
    locks = PageLocks(runtime)
    assert locks.lock(data[100:200])
    assert locks.lock(data)
    assert runtime.asked == [(data.ctypes.data, SIZE)]


def test_it_is_unlocked_before_it_is_unmapped(tmp_path):
    """The last view goes, a tensor here: the pages are unlocked while they can still be read."""
    runtime, data = FakeRuntime(), mapped(tmp_path)
    PageLocks(runtime).lock(data)
    data[:] = 7
    view = torch.from_numpy(data[5:9])
    del data
    assert runtime.locked
    del view
    assert not runtime.locked
    assert runtime.last_bytes == [b"\7" * SIZE]


def test_a_mapping_that_was_never_locked_goes_in_silence(tmp_path):
    """Without a GPU nothing is unlocked."""
    data = mapped(tmp_path)
    assert mapping_of(data).unlock is None


def test_a_refusal_is_told_once_and_not_tried_again(tmp_path, caplog):
    """Where memory cannot be locked one warning says so and what to do; saves go on."""
    runtime = FakeRuntime(refuse="CUDA error 2, out of memory")
    locks, data = PageLocks(runtime), mapped(tmp_path)
    with caplog.at_level(logging.WARNING, "planaria"):
        assert not locks.lock(data)
        assert not locks.lock(data)
    (record,) = caplog.records
    assert "CUDA error 2" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    assert len(runtime.asked) == 1


def test_memory_that_is_no_mapping_is_left_alone():
    """Nobody would unlock it in time, so it is not locked."""
    runtime = FakeRuntime()
    assert not PageLocks(runtime).lock(np.zeros(16, np.uint8))
    assert runtime.asked == []


def test_a_forked_child_unlocks_nothing(tmp_path, monkeypatch):
    """The child has the mapping and no device: it drops the one without touching the other."""
    runtime, data = FakeRuntime(), mapped(tmp_path)
    PageLocks(runtime).lock(data)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del data
    assert runtime.locked


class FakeCudart:
    """The binding of torch: two calls that return a code."""

    def __init__(self, code):
        self.code, self.calls = code, []

    def cudaHostRegister(self, *given):  # noqa: N802 - CUDA's own name
        self.calls.append(given)
        return self.code

    def cudaHostUnregister(self, *given):  # noqa: N802 - CUDA's own name
        self.calls.append(given)
        return self.code


def test_the_runtime_is_asked_as_torch_asks_it(monkeypatch):
    """Address, bytes and the flag for all devices; code 0 is no failure and launches nothing."""
    cudart = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    assert CudaRuntime().lock(4096, 10) == ""
    assert CudaRuntime().unlock(4096) == ""
    assert cudart.calls == [(4096, 10, 1), (4096,)]


@pytest.mark.parametrize("latched", [True, False])
def test_a_failed_call_is_not_left_for_the_next_kernel(latched, monkeypatch):
    """The runtime keeps the error for whoever asks next: a kernel of our own is that one."""
    launched = []

    def ones(*_given, device):
        launched.append(device)
        if latched:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return SimpleNamespace()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(2))
    monkeypatch.setattr(torch, "ones", ones)
    text = CudaRuntime().lock(4096, 10)
    assert text == ("CUDA error 2, CUDA error: out of memory" if latched else "CUDA error 2")
    assert launched == ["cuda"]
    assert pinned._PORTABLE == 1
