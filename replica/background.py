"""The background process: the work behind ``save``, away from the trainer's interpreter lock.

Started by exec and never by fork, for one open Checkpointer of one trainer (see ``line.py``), with
whom it lives and dies. It opens the arena, and has its lock, so that nobody writes there but who
has that. Its main thread carries out the trainer's calls one after another, on the same ``Engine``
that the trainer would have had; one thread reads; the engine has its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from replica.at_exit import THREAD_PREFIX
from replica.config import Options
from replica.engine import Engine
from replica.errors import ConfigError
from replica.procs import work_for
from replica.proxies import RemoteGroup, RemoteSnapshot
from replica.ticket import Ticket
from replica.wire import Frame, Wire, WireLost, error_of, error_word, field

log = logging.getLogger("planaria")

_PULSES = 10
"""So many signs of life within the time after which a trainer counts this process as hung."""
_PULSE_S = 1.0
_INSIST_S = 0.05
_INTERRUPT = signal.SIGRTMIN + 3


class BrokenOff(BaseException):
    """The trainer's thread was interrupted in the call that is under way.

    What is raised is of a class of its own, named like what interrupted: the ranks are told that.
    """


def main() -> None:
    """Serve the trainer until it closes, or is gone."""
    descriptor, trainer = int(sys.argv[1]), int(sys.argv[2])
    if os.getppid() != trainer:
        os._exit(1)  # it was gone before this process had tied itself to it (line.py)
    work_for(trainer)
    _Service(Wire(socket.socket(fileno=descriptor))).run()


class _Service:
    """Calls from the trainer, and what is told to it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._calls: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._open = 0
        """Number of the call under way; 0: none."""
        self._last = self._cancelled = 0
        self._broken_off: type[BrokenOff] = BrokenOff
        self._engine: Engine | None = None
        self._snapshot = RemoteSnapshot(self._ask, self._send)
        self._telling = threading.Lock()
        self._told: Frame = {}
        self._tickets: weakref.WeakKeyDictionary[Ticket, int] = weakref.WeakKeyDictionary()
        self._pulse_s = _PULSE_S

    def run(self) -> None:
        """Carry out calls one after another; the process ends in here."""
        signal.signal(_INTERRUPT, self._interrupted)
        for body in (self._read, self._pulse):
            name = f"{THREAD_PREFIX}{body.__name__.strip('_')}"
            threading.Thread(target=body, name=name, daemon=True).start()
        self._send({"ready": os.getpid()})
        calls = {"open": self._open_job, "restore": self._restore, "save": self._save}
        calls["close"] = self._close
        while True:
            frame = self._calls.get()
            with contextlib.suppress(BrokenOff):  # one that comes just behind the end of its call
                self._carry_out(frame, calls)
            if self._engine is None or self._engine.closed:
                # Nothing of value is left here, and no thread that stands in a transport can keep
                # this process, or make a noise.
                os._exit(0)

    def _carry_out(self, frame: Frame, calls: dict[str, Callable[[Frame], Frame]]) -> None:
        number = field(frame, "call", int)
        self._open = number
        try:
            if self._cancelled == number:
                self._break_off()
            said = {"result": None, **calls[field(frame, "name", str)](field(frame, "args", dict))}
        except BrokenOff as error:
            said = {"raised": error_word(error)}
        except Exception as error:  # noqa: BLE001 - the trainer's caller is told
            said = {"raised": error_word(error)}
        finally:
            self._open = 0
        ticket = said.pop("made", None)
        self._tell({"call": number, **said})
        if ticket is not None:
            # Only now, so that the trainer knows the ticket before anything is told of it.
            ticket.watch(self._tell_ticket)

    # ---- calls

    def _open_job(self, args: Frame) -> Frame:
        sys.argv[0] = field(args, "script", str)
        _send_log(field(args, "log_level", int), self._tell_log)
        options = Options(**field(args, "options", dict))
        self._pulse_s = min(_PULSE_S, options.timeout_s / _PULSES)
        group = RemoteGroup(field(args, "group", dict), self._ask)
        self._engine = Engine.open(
            options, group, self._snapshot, self._emit, scratch=self._snapshot.scratch
        )
        self._snapshot.arena = self._engine.job.arena
        return {}

    def _restore(self, _: Frame) -> Frame:
        return {"result": self._opened.restore()}

    def _save(self, args: Frame) -> Frame:
        ticket = self._opened.save(field(args, "step", int), wait=field(args, "wait", bool))
        # The trainer has made its own by this number, when the capture was all that it waits for.
        self._tickets.setdefault(ticket, self._open)
        return {"ticket": self._ticket_facts(ticket), "made": ticket}

    def _close(self, args: Frame) -> Frame:
        self._opened.close(
            field(args, "timeout_s", (int, float)), goodbye=field(args, "goodbye", bool)
        )
        return {}

    @property
    def _opened(self) -> Engine:
        if self._engine is None:
            raise ConfigError("the background process has no open job")
        return self._engine

    # ---- what is asked of the trainer

    def _send(self, frame: Frame) -> None:
        try:
            self._wire.send(frame)
        except WireLost:
            os._exit(1)

    def _ask(self, name: str, args: Frame) -> Any:
        """Ask the trainer's calling thread; from this process's main thread."""
        number = self._open
        if not number or threading.current_thread() is not threading.main_thread():
            raise WireLost(f"{name!r} is asked while no call is under way")
        self._send({"call": number, "ask": name, "args": args})
        frame = self._answers.get()
        while frame.get("call") != number:
            frame = self._answers.get()
        if frame.get("broken off"):
            self._break_off()
        if "raised" in frame:
            error = error_of(frame["raised"])
            if trace := frame["raised"].get("trace"):
                error.add_note(str(trace))
            raise error
        return frame.get("answer")

    def _emit(self, event: dict[str, Any]) -> None:
        """Tell an event: within a call to who called, before the call ends; else as it comes."""
        if self._open and threading.current_thread() is threading.main_thread():
            self._ask("event", {"event": event})
        else:
            self._tell({"event": event})

    # ---- what is told to it

    def _tell(self, frame: Frame) -> None:
        """Say something, and what the engine's status is by now, if that has changed."""
        with self._telling:
            # One at a time, so that an older status never comes after a newer one.
            engine = self._engine
            if engine is not None:
                status = {"status": engine.status(), "unusable": engine.unusable}
                if status != self._told:
                    self._told = status
                    frame = frame | status
            self._send(frame)

    def _ticket_facts(self, ticket: Ticket) -> Frame:
        return {"number": self._tickets[ticket], **ticket.facts()}

    def _tell_ticket(self, ticket: Ticket) -> None:
        self._tell({"ticket": self._ticket_facts(ticket)})

    def _tell_log(self, record: Frame) -> None:
        # Not through _tell: whoever logs may have a lock that the status needs.
        here = self._open and threading.current_thread() is threading.main_thread()
        self._send({"call": self._open, "log": record} if here else {"log": record})

    def _pulse(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self._pulse_s)
            self._send({"alive": self._open})

    # ---- what comes from it

    def _read(self) -> None:
        """Body of the reading thread. The end of what is said is the trainer's end."""
        try:
            while (frames := self._wire.receive()) is not None:
                for frame in frames:
                    self._route(frame)
        finally:
            os._exit(1)

    def _route(self, frame: Frame) -> None:
        if "name" in frame:
            self._last = field(frame, "call", int)
            self._calls.put(frame)
        elif "cancel" in frame:
            self._cancel(field(frame, "cancel", int), field(frame, "why", str))
        elif "late" in frame:
            self._snapshot.late_word(frame)
        elif frame.get("call") == self._open:
            self._answers.put(frame)

    def _cancel(self, number: int, why: str) -> None:
        if number != self._last:
            # The trainer was interrupted just before it would have sent the call.
            self._send({"call": number, "raised": error_word(BrokenOff())})
            return
        named: type[BrokenOff] = type(why, (BrokenOff,), {"__doc__": "Interrupted so."})
        self._broken_off = named
        self._cancelled = number
        name = f"{THREAD_PREFIX}break off"
        threading.Thread(target=self._insist, args=(number,), name=name, daemon=True).start()

    def _insist(self, number: int) -> None:
        """Interrupt the main thread until it has noticed.

        A signal that comes just before it begins to wait is noticed only when the wait is over.
        """
        pause = threading.Event()
        while self._open == self._cancelled == number:
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
            pause.wait(_INSIST_S)

    def _interrupted(self, *_: object) -> None:
        """In the main thread: break the call off, if it is still the one."""
        if self._open and self._open == self._cancelled:
            self._break_off()

    def _break_off(self) -> NoReturn:
        # Once only: what ends the call must not be interrupted in its turn.
        self._cancelled = 0
        raise self._broken_off


class _ToTrainer(logging.Handler):
    """Hands lines to the trainer, whose own handlers and levels decide what becomes of them."""

    def __init__(self, tell: Callable[[Frame], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and logging.Formatter().formatException(record.exc_info)
        self._tell(
            {
                "level": record.levelno,
                "text": record.getMessage(),
                "trace": error or None,
                "pathname": record.pathname,
                "lineno": record.lineno,
                "function": record.funcName or "",
                "thread": record.threadName or "",
                "created": record.created,
                "process": record.process or 0,
            }
        )


def _send_log(level: int, tell: Callable[[Frame], None]) -> None:
    log.propagate = False
    log.setLevel(level)
    log.handlers = [_ToTrainer(tell)]
