"""Other processes for the arena's tests: started by exec, torch-free, ended with the test.

A child runs a few lines of Python. They say what they have to say with ``say(...)``, one JSON value
a line, and wait for the test with ``wait()``. Nothing here sleeps to be in step.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT

OPEN = {"job": "job", "node_id": "node", "position": 0, "rank": 0, "world": 1, "timeout_s": 20.0}
"""How the tests open an arena, unless they say otherwise."""

# The package's __init__ would load torch, for seconds, in every child; no child needs it.
PREAMBLE = """
import json, os, sys, types
package = types.ModuleType("replica")
package.__path__ = [os.path.join(sys.argv[1], "replica")]
sys.modules["replica"] = package
sys.path.insert(0, sys.argv[1])
from replica.arena import Arena, clean, read_arenas
from replica.errors import ArenaBusy, ArenaError, ArenaFull
DIR, ARGS, OPEN = sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
def say(value):
    print(json.dumps(value), flush=True)
def wait():
    return sys.stdin.readline().strip()
"""


class Child:
    """A running child. ``hear()`` reads what it said, ``tell()`` lets it go on."""

    def __init__(self, code: str, arena_dir, *args, env=None, **popen):
        command = [sys.executable, "-c", PREAMBLE + code]
        command += [str(ROOT), str(arena_dir), json.dumps(args), json.dumps(OPEN)]
        clean_env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        self.process = subprocess.Popen(
            command,
            env=clean_env | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )
        self.pid = self.process.pid

    def hear(self):
        """Return the next value that the child says; fails when it ends without a word."""
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()} instead of an answer"
        return json.loads(line)

    def tell(self, word: str = "go") -> None:
        """Let the child pass its next ``wait()``."""
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Kill the child, if it still runs, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code


class Children:
    """Starts children and ends them all."""

    def __init__(self):
        self._started = []

    def start(self, code: str, arena_dir, *args, **options) -> Child:
        """Run ``code`` in a process of its own."""
        child = Child(code, arena_dir, *args, **options)
        self._started.append(child)
        return child

    def end_all(self) -> None:
        """Kill what still runs."""
        for child in self._started:
            child.end()


def descriptors() -> int:
    """Count this process's open descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def mappings(path) -> int:
    """Count this process's mappings of files under a path."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(path) in line for line in lines)
