"""How long ``save`` blocks training, over one plain copy of the same bytes to warm tmpfs memory.

One process without a process group, 512 MiB of float32 in 64 CPU tensors. Each round measures, one
after another so that a noisy machine disturbs all alike: the plain ``torch.Tensor.copy_`` of one
tensor of as many bytes, the bare ``np.copyto``, and ``save``. Every timed save waits for
"committed" before the next round; right after its return all tensors are overwritten, and the
committed bytes are compared with what was saved.

A second series has the background work running: right after ``save`` returns the plain copy is
timed beside it, and ``save`` is called again (``when_busy="wait"``), so that it also blocks for the
rest of the save before: the price of saving faster than the background work allows.

``series`` has the same for states of many tensors: see ``stall_series.py``.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import replica
from benchmarks import stall_series
from benchmarks.tools import committed_slot, timed, warm_tmpfs

TENSORS = 64
TENSOR_BYTES = 8 << 20
WARM_UPS = 3
ROUNDS = 10


def run() -> dict[str, Any]:
    """The figures; RuntimeError when a save was skipped or its bytes are wrong."""
    home = Path(tempfile.mkdtemp(prefix="planaria-stall-", dir="/dev/shm"))
    try:
        return _measure(home)
    finally:
        shutil.rmtree(home)


def _measure(home: Path) -> dict[str, Any]:
    tensors = [torch.zeros(TENSOR_BYTES // 4) for _ in range(TENSORS)]
    source = torch.zeros(TENSORS * TENSOR_BYTES // 4)
    target = torch.from_numpy(warm_tmpfs(home, TENSORS * TENSOR_BYTES).view(np.float32))
    times: dict[str, list[float]] = {"copy": [], "copyto": [], "save": []}
    with _checkpointer(tensors, home, "skip") as ckpt:
        for number in range(WARM_UPS + ROUNDS):
            _fill(tensors, number)
            copy_s = timed(lambda: target.copy_(source))
            copyto_s = timed(lambda: np.copyto(target.numpy(), source.numpy()))
            save_s = _timed_save(ckpt, number, tensors, home)
            if number >= WARM_UPS:
                times["copy"].append(copy_s)
                times["copyto"].append(copyto_s)
                times["save"].append(save_s)
    shutil.rmtree(home / f"planaria-{os.getuid()}")
    busy_s, beside_s = _back_to_back(tensors, home, lambda: target.copy_(source))
    medians = {name: statistics.median(values) for name, values in times.items()}
    room = torch.from_numpy(warm_tmpfs(home, stall_series.ROOM_BYTES))
    return {
        "benchmark": "stall",
        "stall_over_memcpy": medians["save"] / medians["copy"],
        "stall_over_copyto": medians["save"] / medians["copyto"],
        "stall_back_to_back_over_memcpy": busy_s / medians["copy"],
        "memcpy_beside_background_over_memcpy": beside_s / medians["copy"],
        "save_blocked_s": medians["save"],
        "save_back_to_back_s": busy_s,
        "memcpy_s": medians["copy"],
        "copyto_s": medians["copyto"],
        "bytes": TENSORS * TENSOR_BYTES,
        "tensors": TENSORS,
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "series": stall_series.run(home, room),
    }


def _checkpointer(tensors: list[torch.Tensor], home: Path, when_busy: str) -> replica.Checkpointer:
    state: dict[str, object] = {f"t{i:02d}": tensor for i, tensor in enumerate(tensors)}
    return replica.Checkpointer(
        state,
        redundancy="none",
        job="stall",
        arena_dir=str(home),
        random_states=False,
        when_busy=when_busy,
        on_error="raise",
    )


def _timed_save(
    ckpt: replica.Checkpointer, number: int, tensors: list[torch.Tensor], home: Path
) -> float:
    tickets: list[replica.Ticket] = []
    seconds = timed(lambda: tickets.append(ckpt.save(number + 1)))
    _fill(tensors, -1)
    if tickets[0].skipped:
        raise RuntimeError(f"save {number + 1} was skipped: {tickets[0].reason}")
    tickets[0].wait("committed", 60)
    _compare(home, number)
    return seconds


def _back_to_back(
    tensors: list[torch.Tensor], home: Path, copy: Callable[[], Any]
) -> tuple[float, float]:
    """Medians of ``save`` without a pause, and of a plain copy beside its background work."""
    saves, copies = [], []
    with _checkpointer(tensors, home, "wait") as ckpt:
        for number in range(WARM_UPS + ROUNDS):
            tickets: list[replica.Ticket] = []
            took_s = timed(lambda: tickets.append(ckpt.save(number + 1)))  # noqa: B023
            if tickets[0].skipped:
                raise RuntimeError(f"save {number + 1} was skipped: {tickets[0].reason}")
            copy_s = timed(copy)
            if number >= WARM_UPS:
                saves.append(took_s)
                copies.append(copy_s)
    return statistics.median(saves), statistics.median(copies)


def _compare(home: Path, number: int) -> None:
    """The newest committed slot holds what the tensors held when ``save`` was called."""
    path, _ = committed_slot(home, "stall")
    with safe_open(str(path), framework="np") as image:
        names = sorted(name for name in image.keys() if name.rsplit(".", 1)[-1].startswith("t"))  # noqa: SIM118
        values = [image.get_tensor(name) for name in names if image.get_tensor(name).size > 1 << 20]
    if len(values) != TENSORS:
        raise RuntimeError(f"the committed image has {len(values)} of {TENSORS} tensors")
    for index, value in enumerate(values):
        if not np.all(value == number * TENSORS + index):
            raise RuntimeError(f"tensor {index} of save {number + 1}: wrong bytes committed")


def _fill(tensors: list[torch.Tensor], number: int) -> None:
    for index, tensor in enumerate(tensors):
        tensor.fill_(number * TENSORS + index)
