"""Starts scripts as processes of one job, and ends them with the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.replica.control import background
from tests.replica.pool import worker_environment

DEADLINE_S = 120.0


class Scripts:
    """Processes of scripts in this folder; each gets one JSON argument."""

    def __init__(self, port: int) -> None:
        self._port, self._started = port, []

    def start(self, script: str, *, world: int, arena_dir: Path, **asked) -> list:
        """Start all ranks of one job; its processes by rank."""
        arena_dir.mkdir(exist_ok=True)
        facts = {"world": world, "arena_dir": str(arena_dir), "port": self._port}
        facts["background"] = background()
        facts |= {"prefix": f"{arena_dir.name}-{len(self._started)}", "parent": os.getpid()} | asked
        path = str(Path(__file__).with_name(script))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes = []
        for rank in range(world):
            command = [sys.executable, path, json.dumps(facts | {"rank": rank})]
            processes.append(
                subprocess.Popen(command, env=worker_environment(), text=True, **pipes)
            )
        self._started += processes
        return processes

    def end(self) -> None:
        """Kill what is left."""
        for process in self._started:
            process.kill()
            process.communicate()


def hear(process) -> dict:
    """Return the next thing that a script says; fails with its errors if it ends instead."""
    line = process.stdout.readline()
    assert line, process.communicate(timeout=DEADLINE_S)[1]
    return json.loads(line)


def finish(process) -> tuple[int, list[dict], str]:
    """Wait for a script's end: exit code, what else it said, what it wrote to standard error."""
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err
