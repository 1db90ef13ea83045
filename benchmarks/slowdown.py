"""What the work behind ``save`` costs the training beside it, on a thread and in a process.

Two ranks on two nodes of this host, one copy of each other's state (``copies:1``), 50 MB each. Rank
0 trains: a step that is bound by Python (a loop in the interpreter) and one that is bound by
compute (matrices through a small network and back, one thread), either at least 0.2 s long. Rank 1
only saves. Blocks of steps without a save and with one at every step (``when_busy="wait"``: a save
that is not done in time delays the next) take turns, so that a noisy machine disturbs both alike.
The figure is the median step with its save over the median step without, the copy that ``save``
itself makes included; what that copy takes is printed beside it.

Where there are two cores or more, rank 0's training has one to itself; the work behind it runs on
the others, and so does all of rank 1.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

import replica
from benchmarks.tools import timed
from replica.at_exit import THREAD_PREFIX

_dist: Any = torch.distributed

MODES = ("thread", "process")
STATE_BYTES = 50_000_000
TENSORS = 50
STEP_S = 0.25
WARM_UPS = 3
ROUNDS = 4
BLOCK = 8
"""Steps without a save, and then with one, in each round."""
SAVES = WARM_UPS + 2 * ROUNDS * BLOCK
_LIMIT_S = 600


def run() -> dict[str, Any]:
    """The figures of both modes; RuntimeError when a rank fails."""
    figures: dict[str, Any] = {"benchmark": "slowdown"}
    for mode in MODES:
        found = _measure(mode)
        figures |= {f"{mode}_{name}": value for name, value in found.items()}
    worst = {mode: max(_ratios(figures, mode)) for mode in MODES}
    better = min(MODES, key=lambda mode: worst[mode])
    return figures | {
        "slowdown": worst[better],
        "better": better,
        "state_bytes": STATE_BYTES,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": ROUNDS,
        "steps_per_round": BLOCK,
        "torch": torch.__version__,
    }


def _ratios(figures: dict[str, Any], mode: str) -> list[float]:
    return [figures[f"{mode}_{kind}_ratio"] for kind in ("python", "compute")]


def _measure(mode: str) -> dict[str, Any]:
    """Run both ranks as processes; what rank 0 found."""
    home = Path(tempfile.mkdtemp(prefix="planaria-slowdown-", dir="/dev/shm"))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # Served from here, so that no rank's interpreter has to.
    store = _dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.slowdown", mode, str(port), str(home)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=_LIMIT_S)[0]
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        shutil.rmtree(home)
        del store
    if codes != [0, 0]:
        raise RuntimeError(f"background={mode!r}: the ranks ended with {codes}")
    found: dict[str, Any] = json.loads(said)
    return found


# ---- one rank


def _rank(mode: str, port: int, home: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = _dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=60)
    _dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    elements = STATE_BYTES // TENSORS // 4
    tensors = [torch.full((elements,), float(number)) for number in range(TENSORS)]
    events: list[dict[str, Any]] = []
    with replica.Checkpointer(
        {f"t{number:02d}": tensor for number, tensor in enumerate(tensors)},
        redundancy="copies:1",
        job="slowdown",
        node_id=f"node-{rank}",
        arena_dir=home,
        random_states=False,
        when_busy="wait",
        on_error="raise",
        on_event=lambda event: events.append(dict(event)),
        background=mode,
    ) as ckpt:
        ckpt.start()
        _pin(rank)
        saves = count(1)
        for _ in range(WARM_UPS):
            ckpt.save(next(saves)).wait()
        if rank == 0:
            figures = _train(ckpt, saves)
            took = [e for e in events if e["event"] == "save"][WARM_UPS:]
            figures["background_gb_per_s"] = statistics.median(
                e["bytes"] / e["seconds"]["total"] / 1e9 for e in took
            )
            figures["copy_s"] = statistics.median(e["seconds"]["copy"] for e in took)
            figures["background_rss_mb"] = _child_rss_mb()
            print(json.dumps(figures))
        else:
            for _ in range(SAVES - WARM_UPS):
                ckpt.save(next(saves))


def _pin(rank: int) -> None:
    """Give rank 0's training a core of its own; the work behind it, and rank 1, get the others.

    What a pinned thread starts later stays where that is.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        return
    behind = [t.native_id for t in threading.enumerate() if t.name == f"{THREAD_PREFIX}driver"]
    for pid in _children():
        behind += [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    for task in behind:
        os.sched_setaffinity(task or 0, set(cores[1:]))
    os.sched_setaffinity(0, {cores[0]} if rank == 0 else set(cores[1:]))


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def _child_rss_mb() -> float:
    """Memory of the background process that is its own: mapped slots left out."""
    total = 0
    for pid in _children():
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1])
    return total / 1e3


def _train(ckpt: replica.Checkpointer, saves: Iterator[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind, step in (("python", _python_step()), ("compute", _compute_step())):
        without: list[float] = []
        with_saves: list[float] = []
        blocked: list[float] = []
        for _ in range(ROUNDS):
            without += [timed(step) for _ in range(BLOCK)]
            for _ in range(BLOCK):
                started = time.perf_counter()
                ckpt.save(next(saves))
                blocked.append(time.perf_counter() - started)
                step()
                with_saves.append(time.perf_counter() - started)
        bare = statistics.median(without)
        figures[f"{kind}_ratio"] = statistics.median(with_saves) / bare
        figures[f"{kind}_ratio_beside_save"] = (
            statistics.median(a - b for a, b in zip(with_saves, blocked, strict=True)) / bare
        )
        figures[f"{kind}_step_s"] = bare
        figures[f"{kind}_save_blocked_s"] = statistics.median(blocked)
    return figures


def _python_step() -> Callable[[], None]:
    def turn(turns: int) -> int:
        total = 0
        for number in range(turns):
            total += number & 7
        return total

    def of(turns: int) -> Callable[[], None]:
        def step() -> None:
            turn(turns)

        return step

    return _as_long_as(STEP_S, of)


def _compute_step() -> Callable[[], None]:
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    batch = torch.randn(128, 512)

    def of(turns: int) -> Callable[[], None]:
        def step() -> None:
            for _ in range(turns):
                model.zero_grad()
                model(batch).square().mean().backward()

        return step

    return _as_long_as(STEP_S, of)


def _as_long_as(seconds: float, of: Callable[[int], Callable[[], None]]) -> Callable[[], None]:
    """The step whose number of turns takes so long on this machine."""
    turns = 1
    while (took_s := timed(of(turns))) < seconds / 2:
        turns *= 2
    return of(max(1, round(turns * seconds / took_s)))


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
