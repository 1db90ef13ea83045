"""A warm worker of the tests: imports torch once, then runs one job after another.

Started by exec and driven by JSON lines: ``{"job": name, "args": {...}}`` comes on standard input
and ``{"value": ...}`` or ``{"error": {...}}`` goes out; ``{"event": ...}`` lines may come before
that. What jobs print goes to standard error. The worker ends when its standard input does, or with
its parent.

    python -m tests.replica.worker PARENT_PID
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections import ChainMap

from tests.replica.tether import die_with_parent

# What jobs write to file descriptor 1 must not get between the answers.
_ANSWERS = os.dup(1)


def say(message: dict) -> None:
    """Send one line to the parent."""
    os.write(_ANSWERS, json.dumps(message).encode() + b"\n")


def main(parent: int) -> None:
    """Serve jobs until standard input ends, or the parent does."""
    # A stopped worker cannot see the end of its input.
    die_with_parent(parent)
    serve("tests.replica.jobs")


def serve(*modules: str) -> None:
    """Serve the jobs of these modules, the first that has it, until standard input ends."""
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(levelname)s %(message)s")
    found = [importlib.import_module(name) for name in modules]
    jobs = ChainMap(*map(vars, found))
    found[-1].announce = lambda event: say({"event": event})
    say({"event": "ready"})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": jobs[asked["job"]](**asked["args"])}
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            trace = traceback.format_exc()
            answer = {"error": {"kind": type(error).__name__, "text": str(error), "trace": trace}}
        say(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
