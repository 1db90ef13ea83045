"""How long ``save`` blocks training with ``overlap=True``, and how much longer a step then takes.

One process without a process group: eight linear layers of 2048 x 2048 with AdamW, 384 MiB of
parameters and moments, and a batch for which forward and backward take longer than the copy. Each
round measures, one after another: one plain ``torch.Tensor.copy_`` of as many bytes to warm tmpfs
memory; a step without a save; a step with one, ``overlap=True``; a step with one, without overlap.
A step is save, forward, backward and the optimizer's update, and it is watched to its end. Every
save is awaited before the next part, and after each one with overlap the committed bytes are
compared with a digest of what there was when ``save`` was called.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

import replica
from benchmarks.tools import committed_slot, warm_tmpfs
from erasure.digest import digest

LAYERS = 8
WIDTH = 2048
BATCH = 128
WARM_UPS = 2
ROUNDS = 7
WAIT_S = 120.0

Times = dict[str, list[float]]


def run() -> dict[str, Any]:
    """The figures; RuntimeError when a save was skipped or its bytes are wrong."""
    home = Path(tempfile.mkdtemp(prefix="planaria-overlap-", dir="/dev/shm"))
    try:
        return _measure(home)
    finally:
        shutil.rmtree(home)


class _Training:
    """A training run, timed part by part."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(BATCH, WIDTH)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optim}

    def step(self) -> tuple[float, float]:
        """Seconds of forward and backward, and of the update."""
        start = time.perf_counter()
        self.optim.zero_grad()
        self.model(self.data).square().mean().backward()
        middle = time.perf_counter()
        self.optim.step()
        return middle - start, time.perf_counter() - middle

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and both moments."""
        return 3 * sum(param.nbytes for param in self.model.parameters())

    def digests(self) -> list[str]:
        """Of all large tensors, sorted."""
        kept = [value for one in self.optim.state.values() for value in one.values()]
        return _digests([*self.model.parameters(), *kept])


def _digests(tensors: list[torch.Tensor]) -> list[str]:
    large = [one for one in tensors if one.nbytes >= WIDTH * WIDTH]
    return sorted(digest(one.detach().numpy().reshape(-1)).hex() for one in large)


def _measure(home: Path) -> dict[str, Any]:
    training = _Training()
    training.step()
    source = torch.zeros(training.nbytes // 4)
    target = torch.from_numpy(warm_tmpfs(home, training.nbytes).view(np.float32))
    names = ("copy", "plain", "save", "busy", "update", "sync_save", "sync_busy", "late")
    times: Times = {name: [] for name in names}
    with _open(training, home, overlap=True) as ckpt, _open(training, home, overlap=False) as sync:
        for number in range(1, WARM_UPS + ROUNDS + 1):
            start = time.perf_counter()
            target.copy_(source)
            took = {"copy": time.perf_counter() - start, "plain": sum(training.step())}
            wanted = training.digests()
            took |= _saved(ckpt, number, training, "")
            _compare(home, wanted)
            took |= _saved(sync, number, training, "sync_")
            if number > WARM_UPS:
                for name, seconds in took.items():
                    times[name].append(seconds)
    return _figures(training, {name: statistics.median(some) for name, some in times.items()})


def _saved(
    ckpt: replica.Checkpointer, number: int, training: _Training, prefix: str
) -> dict[str, float]:
    """Seconds of one save and the step behind it."""
    start = time.perf_counter()
    ticket = ckpt.save(number)
    save_s = time.perf_counter() - start
    forward_s, update_s = training.step()
    if ticket.skipped:
        raise RuntimeError(f"save {number} was skipped: {ticket.reason}")
    ticket.wait("committed", WAIT_S)
    took = {f"{prefix}save": save_s, f"{prefix}busy": save_s + forward_s + update_s}
    return took if prefix else took | {"update": update_s, "late": forward_s}


def _figures(training: _Training, medians: dict[str, float]) -> dict[str, Any]:
    copy_s, plain_s = medians["copy"], medians["plain"]
    return {
        "benchmark": "overlap",
        "overlap_stall_over_memcpy": medians["save"] / copy_s,
        "overlap_added_step_s": medians["busy"] - plain_s,
        "overlap_added_step_over_memcpy": (medians["busy"] - plain_s) / copy_s,
        "sync_stall_over_memcpy": medians["sync_save"] / copy_s,
        "sync_added_step_s": medians["sync_busy"] - plain_s,
        "sync_added_step_over_memcpy": (medians["sync_busy"] - plain_s) / copy_s,
        "overlap_save_blocked_s": medians["save"],
        "overlap_update_s": medians["update"],
        "overlap_forward_backward_s": medians["late"],
        "overlap_step_without_save_s": plain_s,
        "overlap_memcpy_s": copy_s,
        "overlap_bytes": training.nbytes,
        "overlap_rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _open(training: _Training, home: Path, *, overlap: bool) -> replica.Checkpointer:
    made = replica.Checkpointer(
        training.state,
        redundancy="none",
        job=f"overlap-{overlap}",
        arena_dir=str(home),
        on_error="raise",
        overlap=overlap,
    )
    made.start()
    return made


def _compare(home: Path, wanted: list[str]) -> None:
    """The newest committed slot holds what the tensors held when ``save`` was called."""
    path, _ = committed_slot(home, "overlap-True")
    with safe_open(str(path), framework="pt") as image:
        saved = _digests([image.get_tensor(name) for name in image.keys()])  # noqa: SIM118
    if saved != wanted:
        raise RuntimeError("the committed bytes are not those of the moment of the save")
