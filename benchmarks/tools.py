"""What several benchmarks need: a clock, warm memory, the slot that was committed."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replica.arena import SlotView, read_arenas


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def warm_tmpfs(home: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8[nbytes] of a file in ``home``, touched."""
    path = home / "plain-copy"
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        mapping = mmap.mmap(file.fileno(), nbytes)
    array = np.frombuffer(mapping, np.uint8)
    array[:] = 0
    return array


def committed_slot(home: Path, job: str) -> tuple[Path, SlotView]:
    """The file and the slot of the newest committed state in the one arena of a job."""
    (view,) = read_arenas(home, job)
    committed = view.head.committed if view.head is not None else None
    (slot,) = [
        slot
        for slot in view.slots.values()
        if slot.record is not None and slot.record.generation == committed
    ]
    return Path(view.path) / f"slot-{slot.number}.safetensors", slot
