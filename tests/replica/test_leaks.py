"""Many Checkpointers one after another in one process leave nothing behind: fifty in a script."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.replica.arena_tools import descriptors, mappings
from tests.replica.inprocess import Cluster
from tests.replica.pool import worker_environment

ROUNDS, WARM = 50, 5
ROUNDS_HERE = 16
"""Beside all other tests, in their process."""
ROUNDS_OF_PROCESSES = 9
"""Each starts one, which takes two seconds."""
ELEMENTS = 500_000
"""Of 8 bytes: one state that stayed behind in each round would come to 180 MB."""
GROWTH_BYTES_MAX = 4 << 20
"""Of memory in use: one state."""
BLOCKS_A_ROUND_MAX = 20
"""Python objects, interned texts for the most part (seen: 1 to 4 of about 65 bytes)."""
BLOCKS_ONCE_MAX = 300
"""What first comes some rounds later, as when a timer of the job has run."""


class _MallInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def bytes_in_use() -> int:
    """Return what is allocated in all of malloc's arenas.

    Resident memory says less: an arena of a thread that has ended keeps its pages, and another
    thread uses them some day (seen: 30 to 100 MB).
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def measure(arena_dir) -> dict[str, int]:
    """Count what could leak."""
    for thread in threading.enumerate():
        if thread.name.startswith("planaria"):
            thread.join(10)
    gc.collect()
    return {
        "descriptors": descriptors(),
        "threads": threading.active_count(),
        "tasks": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "mappings": mappings(arena_dir),
        "files": sum(1 for _ in arena_dir.rglob("*")),
        "file bytes": sum(path.stat().st_size for path in arena_dir.rglob("*") if path.is_file()),
        "blocks": sys.getallocatedblocks(),
        "bytes": bytes_in_use(),
    }


def check(warm: dict[str, int], last: dict[str, int], rounds: int = ROUNDS) -> None:
    """Nothing is more at the end than after the warm-up; memory and objects hardly."""
    grown = last.pop("bytes") - warm.pop("bytes")
    blocks = last.pop("blocks") - warm.pop("blocks")
    assert last == warm
    assert grown < GROWTH_BYTES_MAX, f"memory has grown by {grown} bytes"
    most = BLOCKS_ONCE_MAX + BLOCKS_A_ROUND_MAX * (rounds - WARM)
    assert blocks < most, f"{blocks} more blocks"


@pytest.mark.long
def test_two_ranks_many_times(arena_dir):
    """Two ranks of one process restore, save twice and close, many times over one job."""

    def body(me):
        step = me.restore()["step"] or 0
        me.commit(step + 1, step + 2)

    for number in range(ROUNDS_HERE):
        Cluster(arena_dir, ["a", "b"], "copies:1", counts=[ELEMENTS] * 2).run(body)
        if number == WARM:
            warm = measure(arena_dir)
    check(warm, measure(arena_dir), ROUNDS_HERE)


@pytest.mark.long
def test_many_that_fail_to_start(arena_dir):
    """A Checkpointer that is refused at start keeps neither lock, descriptor nor file."""

    def body(me):
        with pytest.raises(Exception, match="needs"):
            me.ckpt.start()

    for number in range(ROUNDS_HERE):
        Cluster(arena_dir, ["a", "a"], "stripe:2+1", counts=[ELEMENTS] * 2).run(body)
        if number == WARM:
            warm = measure(arena_dir)
    check(warm, measure(arena_dir), ROUNDS_HERE)
    assert list(arena_dir.iterdir()) == []


PROGRAM = """
import json, sys
from pathlib import Path
import torch
import replica
from tests.replica.test_leaks import ELEMENTS, WARM, measure
place, mode, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(rounds):
    state = {"w": torch.zeros(ELEMENTS, dtype=torch.float64)}
    ckpt = replica.Checkpointer(
        state, job="job", node_id="n", arena_dir=str(place), background=mode
    )
    step = ckpt.restore() or 0
    ckpt.save(step + 1).wait("committed", 30)
    ckpt.close()
    if number == WARM:
        warm = measure(place)
assert step == rounds - 1
print(json.dumps([warm, measure(place)]))
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        ("thread", ROUNDS),
        pytest.param("process", ROUNDS_OF_PROCESSES, marks=pytest.mark.long),
    ],
)
def test_a_script_many_times(arena_dir, mode, rounds):
    """The same for a plain script without a process group, measured inside it."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arena_dir), mode, str(rounds)],
        env=worker_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "resource_tracker" not in ran.stderr
    check(*json.loads(ran.stdout), rounds)
