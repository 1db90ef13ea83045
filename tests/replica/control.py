"""Faults for the background process of a trainer under test, which it carries out in itself.

With ``background="process"`` the work that a test disturbs is done in another process than its own.
There ``tests.replica.in_background`` is loaded first of all, and connects to a ``Control`` here.
It knows all of ``jobs``; ``tests.replica.stays_in_background`` knows those of ``stays`` alone, and
is loaded in a third of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from itertools import count

from replica import fault_points

ADDRESS = "PLANARIA_TEST_CONTROL"
MODE = "PLANARIA_TEST_BACKGROUND"
"""Environment variable of the test run: "thread", the default, or "process"."""
_NUMBERS = count()
_DEADLINE_S = 30.0


def background() -> str:
    """Return the mode that this run is about."""
    return os.environ.get(MODE) or "thread"


class Control:
    """Jobs for the background processes of this one, which load ``module`` for that.

    Each is done at once where such a process runs, and otherwise by the next one, before it does
    anything else; ``every`` process does those that are to last.
    """

    def __init__(
        self, announce: Callable[[str], None], module: str = "tests.replica.in_background"
    ) -> None:
        self._announce = announce
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._waiting: list[dict] = []
        self._lasting: list[dict] = []
        self._end: socket.socket | None = None
        self._answers = self._asked = 0
        name = f"planaria-test-{os.getpid()}-{next(_NUMBERS)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        os.environ[ADDRESS] = name
        fault_points.load_in_background(module)
        threading.Thread(target=self._serve, daemon=True).start()

    def do(self, job: str, /, *, lasting: bool = False, **args: object) -> None:
        """Have a job done; returns when it is, if a process is there."""
        asked = {"job": job, "args": args}
        with self._lock:
            if lasting:
                self._lasting.append(asked)
            if self._end is None or not _said(self._end, [asked]):
                if not lasting:
                    self._waiting.append(asked)
                return
            self._asked += 1
            wanted = self._asked
            arrived = self._done.wait_for(
                lambda: self._end is None or self._answers >= wanted, _DEADLINE_S
            )
            assert arrived, f"{job} was not done within {_DEADLINE_S} s"

    def forget(self) -> None:
        """Nothing more is to be done by processes to come."""
        with self._lock:
            self._waiting, self._lasting = [], []

    def _serve(self) -> None:
        while True:
            end, _ = self._listener.accept()
            with self._lock:
                first, self._waiting = self._lasting + self._waiting, []
                self._answers, self._asked, self._end = 0, 1, end
                _said(end, first)
            threading.Thread(target=self._hear, args=(end,), daemon=True).start()

    def _hear(self, end: socket.socket) -> None:
        with end, end.makefile() as lines:
            for line in lines:
                said = json.loads(line)
                if "event" in said:
                    self._announce(said["event"])
                    continue
                with self._lock:
                    self._answers += 1
                    self._done.notify_all()
        with self._lock:
            if self._end is end:
                self._end = None
            self._done.notify_all()


def _said(end: socket.socket, asked: list[dict]) -> bool:
    """Hand jobs over; False when the process has ended, which may not have been heard yet."""
    try:
        end.sendall(json.dumps(asked).encode() + b"\n")
    except OSError:
        return False
    return True


class Listener:
    """The end in a background process: does ``jobs``, by name, as they come."""

    def __init__(self, jobs: Mapping[str, Callable[..., object]]) -> None:
        self._jobs = jobs
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{os.environ[ADDRESS]}")
        self._lines = self._socket.makefile()

    def say(self, **message: object) -> None:
        """Send one line to the trainer; it may be gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def start(self) -> None:
        """Do what is asked first of all, then what comes, in a thread."""
        self._do(self._lines.readline())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for line in self._lines:
            self._do(line)

    def _do(self, line: str) -> None:
        for asked in json.loads(line):
            self._jobs[asked["job"]](**asked["args"])
        self.say(done=True)
