"""Fuzz every reader for a while, guided by coverage: ``python -m tests.fuzz --seconds 120``.

Each target runs in a forked process of its own under atheris, as many at a time as there are
processors, and all share the seconds evenly. What was found to be new is kept below ``build/fuzz``
and begins the next run. An input that ends a target is kept there too and named: move it to
``tests/hostile``, under the target's name, once it is understood.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["recovery", "replica", "erasure"]):
    from tests.fuzz.targets import BY_NAME
from tests.fuzz.target import BYTES_MAX
from tests.sources import ROOT

HOME = ROOT / "build" / "fuzz"
INPUT_LIMIT_S = 10
MEMORY_LIMIT_MB = 4096


@dataclass
class Run:
    """One target and how it went."""

    name: str
    pid: int
    log: Path
    began_s: float = field(default_factory=time.time)
    ended_s: float = 0.0
    status: int = 0

    @property
    def text(self) -> str:
        """What it said."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def executions(self) -> int:
        """How often the target was called."""
        count = re.search(r"stat::number_of_executed_units:\s+(\d+)", self.text)
        return int(count[1]) if count else 0

    @property
    def coverage(self) -> int:
        """How many places of the code were reached."""
        found = re.findall(r"cov: (\d+)", self.text)
        return int(found[-1]) if found else 0


def begin(name: str, seconds: float) -> Run:
    """Fork a process that fuzzes one target and ends by itself."""
    corpus, log = HOME / "corpus" / name, HOME / f"{name}.log"
    corpus.mkdir(parents=True, exist_ok=True)
    (HOME / "found").mkdir(exist_ok=True)
    known = [path.read_bytes() for path in (ROOT / "tests" / "hostile" / name).glob("*")]
    for raw in (*BY_NAME[name].seeds, *known):
        (corpus / hashlib.sha256(raw).hexdigest()[:16]).write_bytes(raw)
    pid = os.fork()
    if pid:
        return Run(name, pid, log)
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        options = [
            *(f"-max_total_time={max(1, round(seconds))}", f"-timeout={INPUT_LIMIT_S}"),
            *(f"-rss_limit_mb={MEMORY_LIMIT_MB}", f"-max_len={BYTES_MAX}"),
            *("-print_final_stats=1", f"-artifact_prefix={HOME / 'found' / name}-"),
        ]
        target = BY_NAME[name]
        atheris.Setup(["fuzz", str(corpus), *options], lambda raw: target.run(bytes(raw)))
        atheris.Fuzz()
    finally:
        os._exit(3)


def fuzz(names: list[str], seconds: float, jobs: int) -> list[Run]:
    """Fuzz all, ``jobs`` at a time, so that it takes about so many seconds together."""
    share_s = seconds * min(jobs, len(names)) / len(names)
    waiting, runs, under_way = list(names), [], {}
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            run = begin(waiting.pop(0), share_s)
            under_way[run.pid] = run
        pid, status = os.wait()
        run = under_way.pop(pid)
        run.ended_s, run.status = time.time(), status
        runs.append(run)
    return runs


def main() -> int:
    """Fuzz, print a line for each target, and fail if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="wall time of the fuzzing")
    parser.add_argument("--target", action="append", choices=list(BY_NAME), help="only this one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    logging.getLogger("planaria").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    runs = fuzz(options.target or list(BY_NAME), options.seconds, options.jobs)
    sys.stdout.write(f"{'target':14} {'executions':>10} {'seconds':>8} {'coverage':>8}\n")
    for run in runs:
        sys.stdout.write(
            f"{run.name:14} {run.executions:10} {run.ended_s - run.began_s:8.1f} "
            f"{run.coverage:8}{'  FOUND' if run.status else ''}\n"
        )
    sys.stdout.write(f"{'all':14} {sum(run.executions for run in runs):10}\n")
    for run in runs:
        if run.status:
            sys.stdout.write(f"\n{run.name}, status {run.status}:\n{run.text[-4000:]}\n")
    return int(any(run.status for run in runs))


if __name__ == "__main__":
    sys.exit(main())
