"""Stall of ``save`` over one plain copy, for states of many tensors, beside torch's own answer.

Each round changes all values and then measures, one after another: the plain copy of as many
bytes in one tensor to warm tmpfs memory, and ``save`` with everything that it does. Every timed
save waits for "committed"; at the end the committed image is compared, byte for byte, with what a
fresh walk of the state gives. Then ``torch.distributed.checkpoint.async_save`` is timed on the
same state, writing to the same tmpfs, with a stager of its own for each call as by default and
with one that is kept.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

import replica
from benchmarks.stall_states import Series, fsdp2, one_process_world, plain
from benchmarks.tools import committed_slot, timed
from replica.image import read_image
from replica.snapshot import Snapshot

WARM_UPS = 3
ROUNDS = 10
DCP_ROUNDS = 3
DCP_MANY = 10_000
"""With more tensors it takes minutes: one round."""
JOB = "stall-series"
ROOM_BYTES = 4002 * 256 * 256 * 4
"""Of the largest series."""


def run(home: Path, target: torch.Tensor) -> list[dict[str, Any]]:
    """A row of figures per series. ``target``: uint8 on warm tmpfs, room for the largest."""
    makers: tuple[Callable[[], Series], ...] = (
        lambda: plain("64 tensors", 64, 8 << 20),
        lambda: fsdp2("4000 FSDP2 DTensors", 4000),
        lambda: plain("100000 tensors", 100_000, (256 << 20) // 100_000),
    )
    with one_process_world():
        return [_measure(make(), home, target) for make in makers]


def _measure(series: Series, home: Path, target: torch.Tensor) -> dict[str, Any]:
    source = torch.zeros(series.nbytes, dtype=torch.uint8)
    target = target[: series.nbytes]
    copies, saves = [], []
    with replica.Checkpointer(
        series.state, redundancy="none", job=JOB, arena_dir=str(home), on_error="raise"
    ) as ckpt:
        ckpt.start()
        first_s = _timed_save(ckpt, 0)
        for number in range(1, WARM_UPS + ROUNDS + 1):
            series.step()
            copies.append(timed(lambda: target.copy_(source)))
            saves.append(_timed_save(ckpt, number))
        _compare(series, home)
    for folder in home.glob("planaria-*"):
        shutil.rmtree(folder)
    copy_s, save_s = statistics.median(copies[WARM_UPS:]), statistics.median(saves[WARM_UPS:])
    return {
        "name": series.name,
        "bytes": series.nbytes,
        "tensors": series.tensors,
        "memcpy_s": copy_s,
        "save_blocked_s": save_s,
        "stall_over_memcpy": save_s / copy_s,
        "us_per_tensor_beyond_copy": (save_s - copy_s) / series.tensors * 1e6,
        "first_save_beyond_copy_s": first_s - copy_s,
        **_dcp(series, home, copy_s),
    }


def _timed_save(ckpt: replica.Checkpointer, step: int) -> float:
    tickets: list[replica.Ticket] = []
    seconds = timed(lambda: tickets.append(ckpt.save(step)))
    if tickets[0].skipped:
        raise RuntimeError(f"save {step} was skipped: {tickets[0].reason}")
    tickets[0].wait("committed", 60)
    return seconds


def _compare(series: Series, home: Path) -> None:
    """The newest committed image is what a walk that knows nothing of the state makes of it."""
    _, slot = committed_slot(home, JOB)
    saved = read_image(slot.data)
    fresh = np.zeros(slot.data.nbytes, np.uint8)
    nbytes = Snapshot(series.state, random_states=True).capture_into(fresh, saved.header)
    if nbytes != saved.shard_bytes or not np.array_equal(slot.data[:nbytes], fresh[:nbytes]):
        raise RuntimeError(f"{series.name}: wrong bytes committed")


def _dcp(series: Series, home: Path, copy_s: float) -> dict[str, float]:
    """How long torch's own asynchronous save blocks, reading the state included."""
    medians: dict[str, float] = {}
    with closing(DefaultStager(StagingOptions(False, False, False, False))) as kept:
        for name, stager in (("dcp_async_save", None), ("dcp_kept_stager", kept)):
            times = []
            for number in range(DCP_ROUNDS if series.tensors < DCP_MANY else 1):
                series.step()
                path = home / f"dcp-{number}"
                futures: list[Any] = []
                times.append(timed(lambda: futures.append(_dcp_save(series, path, stager))))  # noqa: B023
                getattr(futures[0], "upload_completion", futures[0]).result()
                shutil.rmtree(path)
            medians[f"{name}_over_memcpy"] = statistics.median(times) / copy_s
    return medians


def _dcp_save(series: Series, path: Path, stager: DefaultStager | None) -> Any:
    state: dict[str, Any] = dict(series.state)
    if "model" in state:
        state["model"], state["optimizer"] = get_state_dict(state["model"], state["optimizer"])
        state["scheduler"] = state["scheduler"].state_dict()
    return dcp.async_save(  # type: ignore[attr-defined]
        state, checkpoint_id=str(path), async_stager=stager
    )
