"""Faults for the background process of a trainer under test, which it carries out in itself.

With ``background="process"`` the work that a test disturbs is done in another process than its own.
There ``tests.replica.in_background`` is loaded first of all, and connects to a ``Control`` here.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
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
    """Jobs of ``tests.replica.jobs`` for the background processes of this one.

    Each is done at once where such a process runs, and otherwise by the next one, before it does
    anything else; ``every`` process does those that are to last.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
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
        fault_points.load_in_background("tests.replica.in_background")
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
