"""A script that ends with a save in flight ends with its own code, and the save is not lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replica.arena import read_arenas
from tests.replica.control import background
from tests.replica.pool import worker_environment

pytestmark = [pytest.mark.real, pytest.mark.long]

SCRIPT = Path(__file__).with_name("exit_script.py")
CODES = {
    "fall off": 0,
    "sys.exit": 7,
    "error": 1,
    "error in a with block": 1,
    "close": 0,
    "interrupt": -signal.SIGINT,
    "destroy the group": 0,
}
AT_ONCE = {1: 4, 2: 2}
"""So many jobs run side by side, by world size."""
DEADLINE_S = 120.0


class Scripts:
    """Starts scripts and ends them with the test."""

    def __init__(self, real) -> None:
        self._real, self._started = real, []

    def start(self, ending, *, world, arena_dir, stuck=False):
        """Start all ranks of one job; its processes by rank."""
        asked = {"ending": ending, "world": world, "arena_dir": str(arena_dir), "stuck": stuck}
        asked |= {"prefix": arena_dir.name, "timeout_s": 2.0 if stuck else 30.0}
        asked |= {"port": self._real.port, "parent": os.getpid(), "background": background()}
        arena_dir.mkdir(exist_ok=True)
        started = []
        for rank in range(world):
            command = [sys.executable, str(SCRIPT), json.dumps(asked | {"rank": rank})]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(command, env=worker_environment(), text=True, **pipes))
        self._started += started
        return started

    def end(self) -> None:
        """Kill what is left."""
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def scripts(real):
    """Return a starter of scripts."""
    starter = Scripts(real)
    yield starter
    starter.end()


@pytest.mark.parametrize("world", [1, 2])
def test_a_script_ends_with_its_own_code(scripts, arena_dir, world):
    """Scripts end in several ways, a few at a time: own exit codes, and the last save committed."""
    left_out = "destroy the group" if world == 1 else "interrupt"
    endings = [ending for ending in CODES if ending != left_out]
    while endings:
        some, endings = endings[: AT_ONCE[world]], endings[AT_ONCE[world] :]
        places = {ending: arena_dir / ending.replace(" ", "-") for ending in some}
        jobs = {
            ending: scripts.start(ending, world=world, arena_dir=place)
            for ending, place in places.items()
        }
        for ending, processes in jobs.items():
            for process in processes:
                check_end(process, CODES[ending])
            check_committed(ending, places[ending], world)


def check_committed(ending, place, world):
    """The save in flight was committed, or perhaps not where the script ended by an error."""
    steps = [view.head.committed.step for view in read_arenas(place)]
    assert len(steps) == world
    assert set(steps) <= ({1, 2} if ending == "error in a with block" else {2}), ending


@pytest.mark.parametrize("ending", ["sys.exit", "error"])
def test_a_frozen_peer_does_not_keep_a_script_from_ending(scripts, arena_dir, ending):
    """Rank 1 stands still amid its bytes: rank 0 ends by the deadline, with its own code."""
    first, second = scripts.start(ending, world=2, arena_dir=arena_dir, stuck=True)
    check_end(first, CODES[ending])
    assert second.poll() is None


def check_end(process, code):
    """The script had a save in flight, ended with its code and said no more than its own error."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (code, "in flight"), err
    for word in ("terminate", "Fatal", "Segmentation", "resource_tracker", "Exception ignored"):
        assert word not in err
    # Of an error in training it is the script's own traceback that is shown, and no other.
    ours = {1: "raise RuntimeError(ending)", -signal.SIGINT: "raise KeyboardInterrupt"}.get(code)
    assert err.count("Traceback") == (ours is not None), err
    assert (ours or "") in err
