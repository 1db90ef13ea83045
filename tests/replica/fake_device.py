"""A GPU that is none: its tensors are CPU tensors, and its stream works only when it is waited for.

So whoever reads the buffer too early finds nothing there, and whoever changes a tensor too early
finds the change in it: what a real device does now and then, this one does always.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

from replica.pinned import PageLocks


class FakeRuntime:
    """Notes what was locked; ``refuse`` is the answer to every further lock."""

    def __init__(self, refuse=""):
        self.refuse = refuse
        self.asked = []
        self.locked = {}
        self.last_bytes = []

    def lock(self, address, nbytes):
        self.asked.append((address, nbytes))
        if not self.refuse:
            assert address not in self.locked
            self.locked[address] = nbytes
        return self.refuse

    def unlock(self, address):
        # A touch of memory that is unmapped already would end this process.
        self.last_bytes.append(ctypes.string_at(address, self.locked.pop(address)))
        return ""


class FakeMark:
    """A point in the work of a lane."""

    def __init__(self, lane, count):
        self.lane, self.count = lane, count

    def synchronize(self):
        self.lane.run_to(self.count)


class FakeLane:
    """Keeps its work until somebody waits; ``log`` has the names of what was asked, in order."""

    def __init__(self, device):
        self.device = device
        self.work = []
        self.done = 0
        self.log = []
        self.is_active = False
        self.fail_at = -1
        self.captured = False

    def capturing(self):
        return self.captured

    def follow(self):
        self.log.append("follow")

    @contextlib.contextmanager
    def active(self):
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False

    def empty(self, nbytes):
        self.log.append(f"empty {nbytes}")
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    def gather(self, targets, sources):
        assert self.is_active
        assert len({one.dtype for one in (*targets, *sources)}) == 1
        self._add("gather", lambda: torch._foreach_copy_(targets, sources))

    def fetch(self, target, source):
        assert self.is_active
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        assert target.is_contiguous()
        assert source.is_contiguous()
        self._add("fetch", lambda: target.copy_(source))

    def mark(self):
        self.log.append("mark")
        return FakeMark(self, len(self.work))

    def run_to(self, count):
        """Do what is due, as a stream does: in order, each thing once."""
        with torch.no_grad():
            while self.done < count:
                self.work[self.done]()
                # Done is forgotten: nothing of it holds memory.
                self.work[self.done] = None
                self.done += 1

    def _add(self, name, work):
        if len(self.work) == self.fail_at:
            raise RuntimeError("the device is out of order")
        self.log.append(name)
        self.work.append(work)


class FakeDevice:
    """Lanes by device, and page locks that nobody has refused yet."""

    def __init__(self):
        self.lanes = {}
        self.runtime = FakeRuntime()
        self.locks = PageLocks(self.runtime)
        self.fail_at = -1

    def make_lane(self, device):
        assert device not in self.lanes
        self.lanes[device] = FakeLane(device)
        self.lanes[device].fail_at = self.fail_at
        return self.lanes[device]

    @property
    def lane(self):
        """The only lane."""
        (lane,) = self.lanes.values()
        return lane
