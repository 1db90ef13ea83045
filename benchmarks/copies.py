"""How fast the pieces of a state are copied, in each of the ways there are, over one plain copy.

For states of few, many and very many tensors of one size: all are changed, then copied to warm
tmpfs memory, each way in turn; medians over one plain ``torch.Tensor.copy_`` of as many bytes in
one tensor. ``loop``: as it is done where llvmlite is installed; ``memmove``: a call per piece;
``system``: how tensors under 64 KiB are copied without llvmlite, by ``process_vm_readv``. What
arrived is compared after each.

``idle_page_us``: what the first look at a page of such memory costs when it was left alone for a
quarter of a second. Where that is more than a tenth or two, memory that is left alone is taken away
from this virtual machine, and figures of copies say more of that than of the copies.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.tools import timed, warm_tmpfs
from replica import gather, memcopy
from replica.copy_loop import copy_loop
from replica.gather import SMALL_BYTES, Gathers, Small
from replica.image import Bytes

STATES = ((64, 8 << 20), (4002, 256 << 10), (100_000, 2684))
"""Tensors, and bytes of each."""
ROUNDS = 7
IDLE_S = 0.25
_PAGE_BYTES = 4096


def run() -> dict[str, Any]:
    """The figures; RuntimeError when a copy has brought other bytes."""
    home = Path(tempfile.mkdtemp(prefix="planaria-copies-", dir="/dev/shm"))
    try:
        room = warm_tmpfs(home, max(count * nbytes for count, nbytes in STATES))
        return {
            "benchmark": "copies",
            "states": [_measure(count, nbytes, room) for count, nbytes in STATES],
            "idle_page_us": _idle_page_us(room),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    finally:
        shutil.rmtree(home)


def _measure(count: int, nbytes: int, room: Bytes) -> dict[str, Any]:
    tensors = [torch.rand(nbytes // 4) for _ in range(count)]
    target = room[: count * nbytes]
    plain, one = torch.from_numpy(target), torch.zeros(count * nbytes, dtype=torch.uint8)
    times: dict[str, list[float]] = {"copy": []}
    for _ in range(ROUNDS):
        torch._foreach_mul_(tensors, 0.999)
        times["copy"].append(timed(lambda: plain.copy_(one)))
        for name, copy in _ways(tensors, target).items():
            torch._foreach_mul_(tensors, 0.999)
            times.setdefault(name, []).append(timed(copy))
            _compare(tensors, target, name)
    medians = {name: statistics.median(some) for name, some in times.items()}
    copy_s = medians.pop("copy")
    ratios = {f"{name}_over_copy": seconds / copy_s for name, seconds in medians.items()}
    return {"tensors": count, "tensor_bytes": nbytes, "copy_s": copy_s, **ratios}


def _ways(tensors: list[torch.Tensor], target: Bytes) -> dict[str, Callable[[], None]]:
    base, nbytes = target.ctypes.data, tensors[0].nbytes
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    rows = np.array([(base + at * nbytes, 0, nbytes) for at in range(len(tensors))], np.uint64)
    rows[:, 1] = addresses
    ways = {"memmove": lambda: _without(lambda: memcopy.copy_pieces(rows, tensors))}
    if nbytes < SMALL_BYTES:
        smalls = [Small(at * nbytes, nbytes, at) for at in range(len(tensors))]
        with _no_loop():
            gathers = Gathers(smalls)
        ways["system"] = lambda: gathers.copy(addresses, target, tensors)
    if copy_loop() is not None:
        ways["loop"] = lambda: memcopy.copy_pieces(rows, tensors)
    return ways


def _without(copy: Callable[[], None]) -> None:
    with _no_loop():
        copy()


@contextmanager
def _no_loop() -> Iterator[None]:
    """As without llvmlite."""
    with (
        patch.object(memcopy, "copy_loop", lambda: None),
        patch.object(gather, "copy_loop", lambda: None),
    ):
        yield


def _compare(tensors: list[torch.Tensor], target: Bytes, name: str) -> None:
    found = target.view(np.float32).reshape(len(tensors), -1)
    for at, tensor in enumerate(tensors):
        if not np.array_equal(found[at], tensor.numpy()):
            raise RuntimeError(f"{name}: wrong bytes of tensor {at}")
    target[:] = 0


def _idle_page_us(room: Bytes) -> float:
    pages = room[: 12_000 * _PAGE_BYTES : _PAGE_BYTES]
    took = []
    for _ in range(ROUNDS):
        time.sleep(IDLE_S)
        took.append(timed(pages.sum))
    return statistics.median(took) / len(pages) * 1e6
