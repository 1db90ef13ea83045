"""Loaded by a background process under test before anything else: faults, as ``control`` says.

Where a job would kill or stop its own process, it kills or stops the trainer, and this with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading

from tests.replica import jobs
from tests.replica.control import ADDRESS


class _Line:
    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(f"\0{os.environ[ADDRESS]}")
        self.lines = self.socket.makefile()

    def say(self, **message: object) -> None:
        """Send one line to the trainer; it may be gone."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Do what comes."""
        for line in self.lines:
            self.do(line)

    def do(self, line: str) -> None:
        """Do the jobs of one line, and say that it is done."""
        for asked in json.loads(line):
            getattr(jobs, asked["job"])(**asked["args"])
        self.say(done=True)


def strike(number: signal.Signals) -> None:
    """Send a signal to the trainer and to the very thread of this process that is here."""
    os.kill(os.getppid(), number)
    if number == signal.SIGKILL:
        threading.Event().wait()
    signal.pthread_kill(threading.get_ident(), number)


_LINE = _Line()
jobs.announce = lambda event: _LINE.say(event=event)
jobs.strike = strike
_LINE.do(_LINE.lines.readline())
threading.Thread(target=_LINE.serve, daemon=True).start()
