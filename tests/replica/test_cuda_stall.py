"""The script for a machine with a GPU: skipped without one, rehearsed with a fake, run with one."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
import torch

from benchmarks import cuda_stall
from benchmarks.__main__ import main
from replica import copies, device_copy
from replica.pinned import PageLocks
from tests.replica.fake_device import FakeDevice, FakeRuntime

CUDA = torch.cuda.is_available()
CPU = torch.device("cpu")


class FakeGpu:
    """No stream, no time: what is asked of it happens at once."""

    name, device = "none", CPU

    def __init__(self, device):
        self._fake = device

    def busy(self, seconds):
        del seconds

    second = third = contextlib.nullcontext

    def finish(self):
        pass

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def graph_capture(self):
        lane = list(self._fake.lanes.values())[-1]
        lane.captured = True
        yield
        lane.captured = False


@pytest.fixture
def gpu(monkeypatch):
    """Have all tensors count as a fake GPU's, and the checks be small."""
    fake = FakeDevice()

    def make_lane(device):
        fake.lanes.pop(device, None)
        return FakeDevice.make_lane(fake, device)

    monkeypatch.setattr(copies, "on_host", lambda _: False)
    monkeypatch.setattr(device_copy, "CudaLane", make_lane)
    monkeypatch.setattr(device_copy, "LOCKS", PageLocks(FakeRuntime()))
    monkeypatch.setattr(cuda_stall, "SMALL_TENSORS", 30)
    monkeypatch.setattr(cuda_stall, "LARGE_ELEMENTS", 1 << 19)
    small = {key: one for key, one in cuda_stall._ODD.items() if "large" not in key}
    monkeypatch.setattr(cuda_stall, "_ODD", small)
    return FakeGpu(fake)


def test_without_a_gpu_it_says_why_and_ends_with_0(monkeypatch, capsys):
    """The script prints one JSON line with a reason; nothing fails where there is no GPU."""
    if CUDA:
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "cuda_stall", "--json"])
    assert main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "CUDA" in json.loads(line)["skipped"]
    assert cuda_stall.main() == 0


def test_the_checks_pass_on_a_device_that_is_right(gpu, arena_dir):
    """With the fake device, which works only when it is waited for, nothing is found wrong."""
    assert cuda_stall.check_bits(gpu, arena_dir) == []
    assert cuda_stall.check_order(gpu, arena_dir) == []


def test_the_checks_find_a_save_that_does_not_wait(gpu, arena_dir, monkeypatch):
    """A capture that returns before its copies were made is found out on every tensor."""
    monkeypatch.setattr(device_copy.Pending, "wait", lambda _: None)
    wrong = cuda_stall.check_bits(gpu, arena_dir)
    assert any(text.startswith("few large, overwritten on the same stream") for text in wrong)
    assert any(text.startswith("odd, overwritten on another stream") for text in wrong)


def test_the_figures_are_those_of_both_series(gpu, monkeypatch):
    """Rehearsed: every figure of the table is there, and nothing is wrong."""
    monkeypatch.setattr(cuda_stall, "ROUNDS", 1)
    monkeypatch.setattr(cuda_stall, "WARM_UPS", 0)
    monkeypatch.setattr(cuda_stall, "SMALL_TENSORS", 3)
    monkeypatch.setattr(cuda_stall, "SERIES", {"large": 4, "small": 50})
    figures = cuda_stall.run(gpu, stall_bytes=1 << 20)
    assert figures["wrong"] == []
    assert figures["page_locked"] is True
    assert figures["tensors_large"] == 4
    assert figures["bytes_small"] <= 1 << 20
    assert figures["stall_over_pinned_copy_small"] > 0
    assert figures["gpu"] == "none"


@pytest.mark.skipif(not CUDA, reason="torch sees no CUDA device")
def test_on_a_real_gpu_every_bit_is_right(arena_dir):
    """The checks of the script, on the device that is there."""
    gpu = cuda_stall.Gpu()
    assert cuda_stall.check_bits(gpu, arena_dir) == []
    assert cuda_stall.check_order(gpu, arena_dir) == []
