"""The trainer's end of its background process: starts it, calls it, and hears that it has ended.

One thread starts the process and then reads what it says. It is that very thread, since the kernel
ends the process with the thread that has started it: this one stays for as long as the process.
It does only small work: answers go to the call that waits for them, notes to ``notes``, a thread of
its own, where a listener of the user's may take its time.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from replica.at_exit import THREAD_PREFIX
from replica.changes import NOTICE_S
from replica.errors import ConfigError, PeerError
from replica.launch import NOT_FOR_IT, launch
from replica.unsupported import explains_itself
from replica.wire import Frame, Wire, WireLost, error_word, field

log = logging.getLogger("planaria")

Serve = Callable[[str, Frame], Any]
"""Answers what the background process asks of the thread that has called it."""

START_S = 300.0
"""How long a process may take to be ready: it loads torch, two seconds from an idle disk."""
OTHERS_START_RATIO, OTHERS_START_S = 5.0, 10.0
"""Another rank's process may take so many times as long as this one's, and so much longer."""
END_S = 5.0
"""How long a process that has nothing left to do may take to end."""
TRACE_CHARS_MAX = 10_000
BREAK_OFF_S = 5.0
"""How long an interrupted call waits for the other process to have broken it off."""
RESTART = "restart all ranks of the job: they go on from the newest committed step"
"""What to do about a process that is gone."""
_LOOKS = 4
"""So often in a row is silence found before it counts: not once, after all of a node stood still.
"""


class Ended(Exception):
    """The background process is gone; the sentence names its pid and how it ended."""


class Line:
    """One background process. ``lost``: how it ended, unless that was well and wanted.

    ``others_start_s``: how much later than this one another rank's may be ready.
    ``may_end``: it may end by itself now, before it is open and once it is asked to close.

    ``on_note`` is called in the reading thread with every note, first of all, and ``on_end`` there
    once the process is gone; ``tell`` in a thread of its own with what may take its time. While
    ``pending`` holds, between two calls too, a process that is silent for ``silence_s`` is ended.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        on_note: Callable[[Frame], None],
        on_end: Callable[[str], None],
        tell: Callable[[Frame], None],
        pending: Callable[[], bool],
    ) -> None:
        self.lost = ""
        self.may_end = True
        self.others_start_s = OTHERS_START_S
        self.pid = 0
        self._silence_s = silence_s
        self._on_note, self._on_end, self._tell, self._pending = on_note, on_end, tell, pending
        self._calls: dict[int, queue.SimpleQueue[Frame | None]] = {}
        # A signal handler may come with a call of its own at any moment.
        self._routing = threading.RLock()
        self.number = 0
        """Of the newest call."""
        self._heard_s = time.monotonic()
        self._why = ""
        self._unwanted = False
        self._notes: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._ready, self._ended = threading.Event(), threading.Event()
        self._reader: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire
        name = f"{THREAD_PREFIX}background"
        self._teller = threading.Thread(target=self._tell_all, name=f"{name} notes", daemon=True)

    def start(self) -> None:
        """Start the process and wait until it serves. Raises OSError, or Ended.

        Broken off by an exception, Ctrl-C say, it has to be hung up.
        """
        ours, theirs = socket.socketpair()
        # A process that stands still must not hold the trainer when a socket is full.
        ours.settimeout(self._silence_s)
        self._wire = Wire(ours)
        name = f"{THREAD_PREFIX}background"
        self._reader = threading.Thread(target=self._read, args=(theirs,), name=name, daemon=True)
        self._reader.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        self._teller.start()
        began_s = time.monotonic()
        if not self._ready.wait(START_S):
            self.kill(f"it was not ready within {START_S} s")
            self._ended.wait(END_S)
        if self._ended.is_set():
            raise Ended(self.lost or f"the background process, pid {self.pid}, has ended")
        self.others_start_s += OTHERS_START_RATIO * (time.monotonic() - began_s)

    @property
    def ended(self) -> bool:
        """The process is gone, however that was."""
        return self._ended.is_set()

    def call(
        self,
        name: str,
        args: Frame,
        serve: Serve,
        silence_s: float | None = None,
        *,
        meanwhile: Callable[[], object] = bool,
        enough: Callable[[], bool] = bool,
    ) -> Frame:
        """Have the process carry out a call; the frame of its result, or of what it "raised".

        Serves meanwhile what it asks. Raises Ended when it is gone, or has been ended because it
        said nothing for ``silence_s``. Broken off here by an exception, one of a signal handler's
        say, the call is broken off there too. ``meanwhile`` is done first of all, when the process
        has been called. After an answer from which on ``enough`` holds this returns an empty frame,
        and the process ends the call by itself.
        """
        if self.lost:
            raise Ended(self.lost)
        self.number += 1
        number, answers = self.number, queue.SimpleQueue[Frame | None]()
        self._calls[number] = answers
        self._heard_s = time.monotonic()
        try:
            self._send({"call": number, "name": name, "args": args})
            meanwhile()
            # It may have kept the reading thread from its work.
            self._heard_s = time.monotonic()
            silence_s = silence_s or self._silence_s
            return self._follow(number, answers, serve, silence_s, enough)
        except (Ended, GeneratorExit):
            raise
        except BaseException as error:
            # Also where it came just before or after the call was sent: nobody knows which.
            self._break_off(number, answers, type(error).__name__)
            raise
        finally:
            with self._routing:
                del self._calls[number]
            while not answers.empty():
                self._unheard(answers.get())

    def make_way(self, name: str) -> None:
        """Before a call that may come within another one of this thread, from a signal handler.

        The process carries out one after another, and the other one waits for this thread. So
        ``close`` breaks it off. Raises ConfigError for any else.
        """
        # Looked for, not noted: an interrupt could come between a call's end and the noting of it.
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented, for CPython
        outer: dict[str, Any] = {}
        while frame is not None and "answers" not in outer:
            if frame.f_code is Line.call.__code__ and frame.f_locals.get("self") is self:
                outer = frame.f_locals
            frame = frame.f_back
        if "answers" not in outer:
            return
        if name != "close":
            raise ConfigError(
                f"{name}() was called within {outer['name']}(), by a listener or a signal handler: "
                "call it after that has returned"
            )
        self._break_off(outer["number"], outer["answers"], "Closing")

    def send(self, frame: Frame) -> None:
        """Say something that belongs to no call; lost when the process is gone."""
        try:
            self._wire.send(frame)
        except WireLost as error:
            log.debug("%s", error)

    def hang_up(self, timeout_s: float) -> None:
        """Wait until the process has ended, and see that it does; of none there is, nothing."""
        self.may_end = True
        if self._reader is not None and not self._ended.wait(timeout_s):
            self.kill("")
            self._ended.wait(END_S)

    def kill(self, why: str) -> None:
        """End the process at once; ``why`` is put before how it ended."""
        self._why, self._unwanted = self._why or why, True
        if self._process is not None:
            self._process.kill()

    def _end(self) -> Ended:
        return Ended(self.lost or f"the background process, pid {self.pid}, is closed")

    def _send(self, frame: Frame) -> None:
        if self._ended.is_set():
            raise self._end()
        try:
            self._wire.send(frame)
        except WireLost as error:
            self.kill(str(error))
            self._ended.wait(END_S)
            raise Ended(self.lost or str(error)) from error

    def _follow(
        self,
        number: int,
        answers: queue.SimpleQueue[Frame | None],
        serve: Serve,
        silence_s: float,
        enough: Callable[[], bool],
    ) -> Frame:
        while True:
            frame = self._next(answers, silence_s)
            if "result" in frame or "raised" in frame:
                return frame
            if "ask" in frame:
                self._send({"call": number, **self._answer(frame, serve)})
                if enough():
                    return {}
                self._heard_s = time.monotonic()
            else:
                self._tell(frame)

    def _next(self, answers: queue.SimpleQueue[Frame | None], silence_s: float) -> Frame:
        while True:
            left_s = self._heard_s + silence_s - time.monotonic()
            try:
                # Ctrl-C that comes just before a wait begins is noticed only when that is over.
                frame = answers.get(timeout=min(max(0.0, left_s), NOTICE_S))
            except queue.Empty:
                if self._heard_s + silence_s > time.monotonic():
                    continue
                self.kill(f"it had not answered for {silence_s} s and was ended")
                self._ended.wait(END_S)
                frame = None
            if frame is None:
                raise self._end()
            return frame

    @staticmethod
    def _answer(frame: Frame, serve: Serve) -> Frame:
        try:
            return {"answer": serve(field(frame, "ask", str), field(frame, "args", dict))}
        except Exception as error:  # noqa: BLE001 - a user's method may raise anything
            trace = "" if explains_itself(error) else _trace(error)
            return {"raised": {**error_word(error), "trace": trace}}

    def _break_off(self, number: int, answers: queue.SimpleQueue[Frame | None], why: str) -> None:
        """Tell the process by what the call's thread was interrupted; wait until the call ends."""
        self.send({"cancel": number, "why": why})
        limit_s = time.monotonic() + BREAK_OFF_S
        while (left_s := limit_s - time.monotonic()) > 0:
            try:
                frame = answers.get(timeout=left_s)
            except queue.Empty:
                return
            if frame is None or "result" in frame or "raised" in frame:
                return
            if "ask" in frame:
                self.send({"call": number, "broken off": True})

    def _read(self, theirs: socket.socket) -> None:
        """Body of the reading thread: start the process, read to its end, and see it buried."""
        signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_IT)
        try:
            process = self._process = launch(theirs.fileno())
            watch = os.pidfd_open(process.pid)
        except OSError as error:
            self._failure = error
            self._ended.set()
            self._wire.close()
            return
        finally:
            theirs.close()
            self._started.set()
        self.pid = process.pid
        if self._unwanted:
            process.kill()
        try:
            self._read_all(watch)
        except WireLost as error:
            self.kill(str(error))
        finally:
            os.close(watch)
            self._bury(process)

    def _read_all(self, watch: int) -> None:
        silent = 0
        while True:
            said, ended = self._wire.wait(watch, self._silence_s / _LOOKS)
            frames = self._wire.receive() if said else None
            if frames is None and (said or ended):
                return
            if frames is None:
                silent = silent + 1 if self._pending() else 0
                if silent == _LOOKS:
                    self.kill(f"it had said nothing for {self._silence_s} s and was ended")
                continue
            silent = 0
            self._heard_s = time.monotonic()
            for frame in frames or ():
                self._route(frame)

    def _route(self, frame: Frame) -> None:
        self._on_note(frame)
        if "ready" in frame:
            self._ready.set()
        elif "call" in frame:
            with self._routing:
                answers = self._calls.get(frame["call"])
                if answers is not None:
                    answers.put(frame)
            if answers is None:
                self._unheard(frame)
        elif "event" in frame or "log" in frame:
            self._notes.put(frame)

    def _unheard(self, frame: Frame | None) -> None:
        """What comes of a call that was broken off or left open here."""
        if frame is None:
            return
        if "ask" in frame:
            self.send({"call": frame["call"], "broken off": True})
        elif "log" in frame:
            self._notes.put(frame)

    def _tell_all(self) -> None:
        while (frame := self._notes.get()) is not None:
            try:
                self._tell(frame)
            except BaseException as error:
                # A listener that calls sys.exit(): no other save is begun.
                log.exception("no further save in this process")
                self.kill(f"it was ended after {type(error).__name__}: {error} in a listener")

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        lost = ""
        if code or self._why or not self.may_end:
            why = f": {self._why}" if self._why else ""
            if code == -signal.SIGKILL and not self._why:
                why = ", as the kernel does where memory runs out: see its log"
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            lost = f"the background process, pid {process.pid}, {how}{why}"
        if not self.may_end:
            self._on_end(lost)
        # Whoever finds it lost finds that it was told.
        self.lost = lost
        self._ended.set()
        self._ready.set()
        for answers in list(self._calls.values()):
            answers.put(None)
        self._notes.put(None)
        self._wire.close()


def _trace(error: Exception) -> str:
    """Where it was raised, for the log of the other process."""
    return "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]


def gone(error: Ended) -> PeerError:
    """What a call raises for which there is no better word."""
    return PeerError(f"{error}; {RESTART}")
