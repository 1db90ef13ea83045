"""Waiting on a run: by what its workers write, with a deadline, and never past a failure."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from erasure.errors import PlanariaError
from replica.demo.journal import JournalReader, Line

STALL_S = 180.0
POLL_S = 0.02
EXIT_TIMEOUT_S = 60.0


class DemoError(PlanariaError):
    """The demo itself could not be carried through; what it should show is unknown."""


class Watch:
    """Follows the journals of one training run and the processes that should be alive.

    Args:
        journal_dir: where the workers of this run write.
        on_line: called with every new line, in order of time within a poll.
    """

    def __init__(self, journal_dir: Path, on_line: Callable[[Line], None]) -> None:
        self._reader = JournalReader(journal_dir)
        self._on_line = on_line
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lines: list[Line] = []

    def expect(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Treat an end of this process with another exit code than 0 as a failure from now on."""
        self._processes[name] = process

    def forget(self, name: str) -> None:
        """Stop watching a process that is about to be killed on purpose."""
        del self._processes[name]

    def until(self, done: Callable[[], bool], *, what: str) -> None:
        """Poll until ``done()``, asked after every new line has been taken in.

        Raises:
            DemoError: no worker wrote a line for 180 s, a process failed, or a worker tried to open
                another node's arena.
        """
        deadline = time.monotonic() + STALL_S
        while True:
            # First the processes, then the lines: what one wrote before its end is never missed.
            ended = self._check_processes()
            if self._take_lines():
                deadline = time.monotonic() + STALL_S
            if done():
                return
            if ended:
                raise DemoError(f"every process has ended, but {what} did not happen")
            if time.monotonic() > deadline:
                raise DemoError(f"no worker wrote a line for {STALL_S:.0f} s while waiting: {what}")
            time.sleep(POLL_S)

    def wait_for_exits(self) -> None:
        """Wait until every watched process has ended by itself.

        Raises:
            DemoError: one failed or is still running after 60 s.
        """
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while not self._check_processes():
            if time.monotonic() > deadline:
                alive = [
                    name for name, process in self._processes.items() if process.poll() is None
                ]
                raise DemoError(
                    f"training is done, but after {EXIT_TIMEOUT_S:.0f} s still run: {alive}"
                )
            time.sleep(POLL_S)
        self._take_lines()

    def step_seconds(self) -> float:
        """Return the median time between two steps of a worker so far, 0 before the second."""
        by_worker: dict[int, list[float]] = {}
        for line in self.lines:
            if line.event == "step":
                by_worker.setdefault(line.pid, []).append(line.at_s)
        gaps = [b - a for times in by_worker.values() for a, b in itertools.pairwise(times)]
        return statistics.median(gaps) if gaps else 0.0

    def _take_lines(self) -> bool:
        fresh = self._reader.new_lines()
        for line in fresh:
            if line.event == "foreign-open":
                raise DemoError(f"{line.node} opened another node's arena: {line.facts['path']}")
            self._on_line(line)
        self.lines.extend(fresh)
        return bool(fresh)

    def _check_processes(self) -> bool:
        """Return whether all have ended; raise if one failed."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        failed = {name: code for name, code in codes.items() if code}
        if failed:
            raise DemoError(f"ended with an error: {_name_codes(failed)}")
        return all(code is not None for code in codes.values())


def _name_codes(codes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} (exit code {code})" for name, code in codes.items())


def final_ranks(lines: Iterable[Line]) -> set[int]:
    """Return the ranks that have noted their final state."""
    return {line.rank for line in lines if line.event == "final" and line.rank is not None}


def steps_done(lines: Iterable[Line]) -> int:
    """Return the last step that any worker has noted, 0 before the first."""
    return max((line.facts["step"] for line in lines if line.event == "step"), default=0)
