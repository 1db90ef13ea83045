"""Saves from a GPU: whether every bit is right, and how long ``save`` blocks.

::

    python -m benchmarks cuda_stall --json      or, where torch is all that is installed beside it,
    PYTHONPATH=. python benchmarks/cuda_stall.py

One process, one GPU, under five minutes. Without a GPU it prints one line that says why it did
nothing, and ends with 0.

Checks first. Every tensor gets its values from a kernel that the GPU has not run yet when the
capture is called (a busy wait is put before it), and is overwritten right after it returned, on the
same stream and on another one that nobody waits for. What comes back from the image is compared
bit by bit: many small tensors, few large ones, and every odd layout and dtype. A kernel that keeps
a third stream busy must not hold the capture up, and during the capture of a graph it is refused.

Then the stall: ``save`` of the same bytes in few large and in many small tensors, over one bare
non-blocking copy of them from one tensor into page-locked memory of torch's own, in turns. The
next round waits for "committed". What is wrong is listed under "wrong", and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import replica
from replica.device_copy import LOCKS
from replica.errors import StateError
from replica.image import ShardHeader
from replica.slot import map_file
from replica.snapshot import Snapshot

WARM_UPS = 2
ROUNDS = 7
STALL_BYTES = 1 << 30
SERIES = {"large": 32, "small": 100_000}
"""Tensors of each, which share those bytes."""
SMALL_TENSORS, LARGE_ELEMENTS = 5000, 16 << 20
"""Of the checks."""
BUSY_S = 0.3
"""How long a stream is kept busy where the order of things is checked."""
HEADER = ShardHeader(job="cuda-stall", epoch=1, step=1, generation="ab" * 16, owner=0, world=1)

View = Callable[[torch.Tensor], torch.Tensor]
_ODD: dict[str, tuple[torch.dtype, int, View]] = {
    "scalar": (torch.float32, 1, lambda t: t[0]),
    "transposed": (torch.float32, 120, lambda t: t.view(12, 10).T),
    "large transposed": (torch.float32, 12_000_000, lambda t: t.view(3000, 4000).T),
    "large strided": (torch.bfloat16, 24_000_001, lambda t: t[::2]),
    "channels last": (torch.float16, 240, lambda t: t.view(2, 4, 6, 5).permute(0, 3, 1, 2)),
    "expanded": (torch.float64, 7, lambda t: t.unsqueeze(1).expand(7, 1000)),
    "bfloat16 with every kind of NaN": (torch.bfloat16, 70_000, lambda t: t),
    "float16": (torch.float16, 70_001, lambda t: t),
    "float8": (torch.float8_e4m3fn, 1001, lambda t: t),
    "float8, strided": (torch.float8_e5m2, 1001, lambda t: t[1::2]),
    "bool": (torch.bool, 333, lambda t: t),
    "uint16": (torch.uint16, 99, lambda t: t),
    "int64": (torch.int64, 50, lambda t: t),
    "complex": (torch.complex64, 77, lambda t: t),
    "conjugate": (torch.complex64, 77, lambda t: t.conj()),
    "imaginary of a conjugate": (torch.complex64, 77, lambda t: t.conj().imag),
    "empty": (torch.float32, 0, lambda t: t),
}


class Gpu:
    """What the checks need of a GPU."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda
        self.device = torch.device("cuda", self._cuda.current_device())
        self._second, self._third = self._cuda.Stream(), self._cuda.Stream()
        self._cycles_per_s = self._calibrate()

    @property
    def name(self) -> str:
        """Its name for the table."""
        return str(self._cuda.get_device_name(self.device))

    def busy(self, seconds: float) -> None:
        """Keep the current stream busy for about so long; returns at once."""
        self._cuda._sleep(max(1, int(seconds * self._cycles_per_s)))  # noqa: SLF001 - torch's own

    def second(self) -> AbstractContextManager[object]:
        """A stream that waits for nobody."""
        inside: AbstractContextManager[object] = self._cuda.stream(self._second)
        return inside

    def third(self) -> AbstractContextManager[object]:
        """Another one."""
        inside: AbstractContextManager[object] = self._cuda.stream(self._third)
        return inside

    def finish(self) -> None:
        """Wait for all streams."""
        self._cuda.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of torch's own."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Inside it the current stream is captured."""
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            torch.zeros(1, device=self.device)
            yield

    def _calibrate(self) -> float:
        cycles = 100_000_000
        self._cuda._sleep(cycles)  # noqa: SLF001 - torch's own
        self.finish()
        start = time.perf_counter()
        self._cuda._sleep(cycles)  # noqa: SLF001 - torch's own
        self.finish()
        return cycles / (time.perf_counter() - start)


def why_not() -> str:
    """Why there is nothing to measure here; "" where there is a GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def run(gpu: Gpu | None = None, *, stall_bytes: int = STALL_BYTES) -> dict[str, Any]:
    """The figures, or why there are none under "skipped"."""
    reason = "" if gpu else why_not()
    if reason:
        return {"benchmark": "cuda_stall", "skipped": reason}
    gpu = gpu or Gpu()
    place = os.environ.get("PLANARIA_ARENA_DIR") or "/dev/shm"
    home = Path(tempfile.mkdtemp(prefix="planaria-cuda-stall-", dir=place))
    try:
        wrong = [*check_bits(gpu, home), *check_order(gpu, home)]
        # Two slots and what of them is written beside, in what the file system has left.
        nbytes = min(stall_bytes, shutil.disk_usage(home).free // 3)
        stalls = {name: _stall(gpu, home, count, nbytes) for name, count in SERIES.items()}
    finally:
        shutil.rmtree(home)
    return {
        "benchmark": "cuda_stall",
        "wrong": wrong,
        **{f"{key}_{name}": value for name, one in stalls.items() for key, value in one.items()},
        "page_locked": not LOCKS.refusal,
        "page_lock_refusal": LOCKS.refusal,
        "rounds": ROUNDS,
        "gpu": gpu.name,
        "torch": torch.__version__,
    }


def check_bits(gpu: Gpu, home: Path) -> list[str]:
    """What came back with other bits than it had, by state, place of the overwriting and name."""
    maker = torch.Generator(gpu.device).manual_seed(1)
    sizes = torch.randint(
        1, 700, (SMALL_TENSORS,), generator=torch.Generator().manual_seed(2)
    ).tolist()
    kinds = (torch.float32, torch.bfloat16, torch.int64)
    states: dict[str, dict[str, tuple[torch.dtype, int, View]]] = {
        "odd": _ODD,
        "many small": {f"t{n}": (kinds[n % 3], size, _same) for n, size in enumerate(sizes)},
        "few large": {f"t{n}": (torch.float32, LARGE_ELEMENTS, _same) for n in range(4)},
    }
    wrong = []
    for name, state in states.items():
        finals = {key: raw(kind, n, gpu.device, maker) for key, (kind, n, _) in state.items()}
        views = {key: view for key, (_, _, view) in state.items()}
        for where in ("the same stream", "another stream"):
            found = _one_check(gpu, home, finals, views, where)
            wrong += [f"{name}, overwritten on {where}: {key}" for key in found]
    return wrong


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def raw(
    dtype: torch.dtype, count: int, device: torch.device, maker: torch.Generator
) -> torch.Tensor:
    """Values of random bytes; a bool's are 0 and 1."""
    limit = 2 if dtype is torch.bool else 256
    data = torch.randint(
        0, limit, (count * dtype.itemsize,), dtype=torch.uint8, device=device, generator=maker
    )
    return data.view(dtype)


def bits(value: torch.Tensor) -> bytes:
    """All elements in C order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""


def _one_check(
    gpu: Gpu,
    home: Path,
    finals: dict[str, torch.Tensor],
    views: dict[str, View],
    where: str,
) -> list[str]:
    bases = {key: torch.zeros_like(final) for key, final in finals.items()}
    state: dict[str, object] = {key: views[key](base) for key, base in bases.items()}
    snapshot = Snapshot({"box": state}, random_states=False)
    buffer = _mapped(home, snapshot.plan(0).capacity_bytes)
    for _ in range(2):  # the second time by a plan and a staging buffer that are there already
        gpu.finish()
        gpu.busy(BUSY_S)
        for key, base in bases.items():
            base.copy_(finals[key])
        nbytes = snapshot.capture_into(buffer, HEADER)
        with gpu.second() if where == "another stream" else contextlib.nullcontext():
            for base in bases.values():
                base.zero_()
    gpu.finish()
    found: dict[str, Any] = {"box": {}}
    Snapshot(found, random_states=False).prepare(buffer[:nbytes]).commit()
    return [
        key for key, final in finals.items() if bits(views[key](final)) != bits(found["box"][key])
    ]


def check_order(gpu: Gpu, home: Path) -> list[str]:
    """That a busy stream which is not ours holds nobody up, and that a capture is refused."""
    wrong = []
    weights = torch.ones(1 << 20, device=gpu.device)
    snapshot = Snapshot({"w": weights}, random_states=False)
    buffer = _mapped(home, snapshot.plan(0).capacity_bytes)
    snapshot.capture_into(buffer, HEADER)
    gpu.finish()
    with gpu.third():
        gpu.busy(4 * BUSY_S)
    took_s = _timed(lambda: snapshot.capture_into(buffer, HEADER))
    if took_s > 2 * BUSY_S:
        wrong.append(f"a capture waited {took_s:.3f} s for a stream that is not its own")
    gpu.finish()
    try:
        with gpu.graph_capture():
            snapshot.capture_into(buffer, HEADER)
    except StateError:
        pass
    else:
        wrong.append("a capture during the capture of a graph was not refused")
    gpu.finish()
    return wrong


def _mapped(home: Path, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Warm tmpfs memory, mapped as the arena maps it."""
    with tempfile.TemporaryFile(dir=home) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        data = map_file(file.fileno(), nbytes, write=True)
    data[:] = 0
    return data


def _stall(gpu: Gpu, home: Path, tensors: int, nbytes: int) -> dict[str, Any]:
    """Medians of ``save`` and of the bare copy of as many bytes, in turns."""
    each = nbytes // tensors // 4
    weights = [torch.zeros(each, device=gpu.device) for _ in range(tensors)]
    source = torch.zeros(tensors * each * 4, dtype=torch.uint8, device=gpu.device)
    target = gpu.pinned(source.numel())
    times: dict[str, list[float]] = {"copy": [], "save": []}
    first_s = 0.0

    def bare_copy() -> None:
        target.copy_(source, non_blocking=True)
        gpu.finish()

    with replica.Checkpointer(
        {"weights": weights},
        redundancy="none",
        job=f"cuda-stall-{tensors}",
        arena_dir=str(home),
        random_states=False,
        on_error="raise",
    ) as ckpt:
        for number in range(WARM_UPS + ROUNDS):
            torch._foreach_add_(weights, 1.0)
            gpu.finish()
            copy_s = _timed(bare_copy)
            tickets: list[replica.Ticket] = []
            save_s = _timed(lambda: tickets.append(ckpt.save(number + 1)))  # noqa: B023
            tickets[0].wait("committed", 120)
            first_s = first_s or save_s
            if number >= WARM_UPS:
                times["copy"].append(copy_s)
                times["save"].append(save_s)
    shutil.rmtree(home / f"planaria-{os.getuid()}")
    copy_s, save_s = statistics.median(times["copy"]), statistics.median(times["save"])
    return {
        "stall_over_pinned_copy": save_s / copy_s,
        "us_per_tensor_beyond_the_copy": (save_s - copy_s) / tensors * 1e6,
        "save_blocked_s": save_s,
        "pinned_copy_s": copy_s,
        "pinned_copy_gb_per_s": source.numel() / copy_s / 1e9,
        "first_save_s": first_s,
        "bytes": source.numel(),
        "tensors": tensors,
    }


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Print the figures as one JSON object; 1 when something is wrong."""
    figures = run()
    print(json.dumps(figures))
    return 1 if figures.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
