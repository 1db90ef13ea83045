"""An engine in a process of its own, as the face sees it: the same calls, the same errors."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from recovery.session import RestoreAborted, RestoreHalfDone
from replica.changes import Changes
from replica.config import Options
from replica.errors import ConfigError, PeerError, SaveFailed
from replica.group import Group, MemoryGroup, TorchGroup
from replica.line import OTHERS_START_S, RESTART, Ended, Line, Serve, gone
from replica.mappings import Mappings
from replica.opening import ROUNDS, together
from replica.request import Counts
from replica.serving import Serving
from replica.snapshot import Snapshot
from replica.ticket import Ticket
from replica.timed_store import TimedStore
from replica.wire import Frame, WireLost, error_of, field, ours

log = logging.getLogger("planaria")

Emit = Callable[[dict[str, Any]], None]

SETTLE_S = 1.0
"""How long a look at the status waits for the end of a save that has returned already."""
CLOSE_SLACK_S = 5.0
"""How much longer a close may be silent than it may wait."""


class RemoteEngine:
    """One open job of one rank, in a background process. Its methods are those of ``Engine``."""

    def __init__(self, options: Options, group: Group, snapshot: Snapshot, emit: Emit) -> None:
        self.unusable = ""
        self.closed = False
        self._options, self._rank = options, group.rank
        self._emit = emit
        self._status: dict[str, Any] = {"open": False}
        # A signal handler may close this at any moment.
        self._lock = threading.RLock()
        self._tickets: dict[int, Ticket] = {}
        """By the number of the call that made each."""
        self._last: Ticket | None = None
        self._left_open = 0
        """The call that the process has still to end by itself, if any."""
        self._gone = False
        self._early: Ticket | None = None
        """Of the save that is called, from when on it may return before its call has ended."""
        # An Event may stay locked after Ctrl-C.
        self._settling = Changes()
        self._counts = Counts(loud=True)
        self._line = Line(
            silence_s=options.timeout_s,
            on_note=self._note,
            on_end=self._end,
            tell=self._tell,
            pending=lambda: bool(self._pending()),
        )
        self._serving = Serving(group, snapshot, emit, self._line.send)

    @classmethod
    def open(cls, options: Options, group: Group, snapshot: Snapshot, emit: Emit) -> RemoteEngine:
        """Start the process and have it open the job; raises what ``Engine.open`` does."""
        engine = cls(options, group, snapshot, emit)
        try:
            engine._start(group)
        except BaseException:
            # Ctrl-C too: nobody has this engine, and its process must not stay.
            engine._line.hang_up(0.0)
            engine._serving.forget()
            raise
        engine._line.may_end = False
        return engine

    def _start(self, group: Group) -> None:
        facts: Frame = {}
        options = self._options
        try:
            facts.update(_group_facts(group, options.timeout_s))
            self._line.start()
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            # All are told in the first word that they wait for.
            known = gone(error) if isinstance(error, Ended) else error
            together(group, options.timeout_s + OTHERS_START_S, _raiser(known))
        self._serving.grace_s = self._line.others_start_s
        self._serving.mappings = Mappings(self._line.pid)
        args = {
            "script": str(Path(sys.argv[0] or "interactive").absolute()),
            "log_level": log.getEffectiveLevel(),
            "options": {one.name: getattr(options, one.name) for one in fields(options)}
            | {"on_event": None},
            "group": facts,
        }
        try:
            self._call("open", args)
        except Ended as error:
            self._tell_others(group, gone(error))
            raise PeerError(f"rank {group.rank}: {gone(error)}") from self._serving.raised

    def _tell_others(self, group: Group, error: PeerError) -> None:
        """Raise ``error`` on all ranks, in the round of the opening that they wait in, if any.

        Before the last one there is a next for all, unless one of them has ended it already.
        """
        if self._serving.rounds < ROUNDS and not self._serving.disagreed:
            together(group, 2 * self._options.timeout_s + OTHERS_START_S, _raiser(error))

    def restore(self) -> int | None:
        """Load the newest state there is for every rank (see ``Checkpointer.restore``)."""
        try:
            frame = self._call("restore", {})
        except Ended as error:
            text = f"rank {self._rank}: {gone(error)}"
            if self._serving.committed:
                self.unusable = text
                raise RestoreHalfDone(text) from None
            raise RestoreAborted(text) from None
        step: int | None = field(frame, "result", (int, type(None)))
        return step

    def save(self, step: int, *, wait: bool) -> Ticket:
        """Stage one step, with ``wait`` after the save under way (see ``Checkpointer.save``).

        Returns as soon as the state is captured: the rest of the call needs no trainer.
        """
        if not self._line.lost:
            serving = self._serving

            def serve(ask: str, args: Frame) -> Any:
                answer = serving.answer(ask, args)
                if serving.captured:
                    self._leave_open(step)
                return answer

            args, self._early = {"step": step, "wait": wait}, None
            ahead = serving.read_ahead if self._will_capture(step) else bool
            try:
                frame = self._call("save", args, serve, ahead, lambda: self._early is not None)
            except Ended as error:
                return self._cannot(step, str(error))
            made = self._early or self._made(frame["ticket"])
            self._last = made
            return made
        return self._cannot(step, self._line.lost)

    def _will_capture(self, step: int) -> bool:
        """Whether this save is not skipped, nor has to wait, as far as this rank knows."""
        free = not self._left_open and self._status.get("busy") is False
        return free and not step % self._options.interval_steps

    def _leave_open(self, step: int) -> None:
        """This save will return before its call has ended: its ticket is there from here on."""
        ticket = Ticket(step)
        ticket.limit_s = 2 * self._options.timeout_s
        if self._serving.staged:
            ticket.advance("staged")
        number = self._line.number
        with self._settling.lock:
            # Where the process has gone meanwhile, the answer that comes next finds nobody.
            if not self._gone:
                self._left_open = number
                self._early = self._made({"number": number, **ticket.facts()})

    def status(self) -> dict[str, Any]:
        """What is safe now, as far as the background process has told; from any thread."""
        self._settling.wait_for(lambda: not self._left_open, SETTLE_S)
        return dict(self._status)

    def close(self, timeout_s: float, *, goodbye: bool) -> None:
        """As ``Engine.close``; afterwards the process is gone.

        Broken off by Ctrl-C, say, it is to be called again.
        """
        try:
            self._ask_to_close(timeout_s, goodbye=goodbye)
        except Exception:
            self._release()
            raise
        self._release()
        line, last = self._line, self._last
        if line.lost and last is not None and last.failed and self._options.on_error == "raise":
            raise SaveFailed(f"step {last.step} was not committed: {last.reason}")

    def _ask_to_close(self, timeout_s: float, *, goodbye: bool) -> None:
        line, args = self._line, {"timeout_s": timeout_s, "goodbye": goodbye}
        again, line.may_end = line.may_end, True
        if line.ended:
            return
        try:
            self._call("close", args, silence_s=timeout_s + CLOSE_SLACK_S)
        except Ended as error:
            # A close that was broken off here may have come to its end there.
            log.log(logging.DEBUG if again else logging.ERROR, "while closing: %s", error)
            self._fail_all(str(error))

    def _release(self) -> None:
        self._line.hang_up(CLOSE_SLACK_S)
        self._serving.forget()
        self.closed = True

    def _call(
        self,
        name: str,
        args: Frame,
        serve: Serve | None = None,
        meanwhile: Callable[[], object] = bool,
        enough: Callable[[], bool] = bool,
        *,
        silence_s: float | None = None,
    ) -> Frame:
        serving, line = self._serving, self._line
        line.make_way(name)
        serving.begin()
        serve = serve or serving.answer
        try:
            frame = line.call(name, args, serve, silence_s, meanwhile=meanwhile, enough=enough)
            if "raised" not in frame:
                return frame
            error = error_of(frame["raised"])
            # What the state's own methods raised is shown as the cause, as it was raised.
            raise ours(error) from serving.raised or error.__cause__
        except WireLost as error:
            raise ours(error) from error
        finally:
            serving.end()

    def _cannot(self, step: int, how: str) -> Ticket:
        """A step that comes when the process is gone; training goes on unless ``on_error`` says."""
        reason = f"no further save is possible in this process: {how}; {RESTART}"
        if self._options.on_error == "raise":
            raise SaveFailed(reason)
        self._last = ticket = Ticket(step)
        ticket.fail(reason)
        self._counts.note_failed(step, reason, None, loud=True)
        self._status |= {"saves_failed_in_a_row": self._counts.failed_in_a_row}
        return ticket

    # ---- what the process tells

    def _note(self, frame: Frame) -> None:
        """In the reading thread, for every frame: tickets and status."""
        if "ticket" in frame:
            self._made(field(frame, "ticket", dict))
        if "finish" in frame:
            self._serving.finish_late(
                field(frame, "finish", int), field(frame, "timeout_s", (int, float))
            )
        if "status" in frame:
            self._status = field(frame, "status", dict)
            self.unusable = self.unusable or field(frame, "unusable", str)
        if frame.get("call") == self._left_open and ("result" in frame or "raised" in frame):
            self._end_call(frame)

    def _end_call(self, frame: Frame) -> None:
        """The end of a save that has returned before: the ticket is who can hear of an error."""
        self._settle()
        ticket = self._tickets.get(field(frame, "call", int))
        if "raised" in frame and ticket is not None:
            error = error_of(frame["raised"])
            log.warning("step %d: %s", ticket.step, error)
            ticket.fail(f"{type(error).__name__}: {error}")

    def _made(self, facts: Frame) -> Ticket:
        """The ticket that is told of, made when it is the first time."""
        number = field(facts, "number", int)
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None:
                ticket = self._tickets[number] = Ticket(field(facts, "step", int))
                for old in [n for n, one in self._tickets.items() if one.done and n < number]:
                    del self._tickets[old]
        ticket.follow(facts)
        return ticket

    def _settle(self, *, gone: bool = False) -> None:
        with self._settling.lock:
            self._left_open, self._gone = 0, self._gone or gone
            self._settling.tell()

    def _end(self, how: str) -> None:
        """In the reading thread: the process is gone, and nobody had asked it to go."""
        log.error(
            "%s. Training goes on, and no further step is saved by this process: %s", how, RESTART
        )
        counts = {"busy": False, "broken": how, "last_error": how, "protected": "none"}
        self._status = self._status | counts
        self._settle(gone=True)
        self._fail_all(how)

    def _fail_all(self, how: str) -> None:
        for ticket in self._pending():
            ticket.fail(how)

    def _pending(self) -> list[Ticket]:
        with self._lock:
            return [ticket for ticket in self._tickets.values() if not ticket.done]

    def _tell(self, frame: Frame) -> None:
        """Pass on an event, or a line of the log."""
        if "event" in frame:
            self._emit(field(frame, "event", dict))
        elif "log" in frame:
            _pass_on(field(frame, "log", dict))


def _raiser(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def _pass_on(facts: Frame) -> None:
    level = field(facts, "level", int)
    if not log.isEnabledFor(level):
        return
    where = field(facts, "pathname", str), field(facts, "lineno", int)
    text, name = field(facts, "text", str), field(facts, "function", str)
    record = logging.LogRecord(log.name, level, *where, text, None, None, name)
    record.exc_text = field(facts, "trace", (str, type(None)))
    record.created = field(facts, "created", (int, float))
    record.threadName = field(facts, "thread", str)
    record.process = field(facts, "process", int)
    log.handle(record)


def _group_facts(group: Group, timeout_s: float) -> Frame:
    """What the background process has to know of the group. Raises ConfigError, StoreError."""
    facts: Frame = {"rank": group.rank, "world": group.world, "store": None, "prefix": ""}
    if isinstance(group, MemoryGroup) and group.world == 1:
        return facts
    if not isinstance(group, TorchGroup):
        raise ConfigError(
            f'background="process" works with a torch process group or alone, not with a '
            f'{type(group).__name__} of {group.world} ranks: choose background="thread"'
        )
    address = group.store_address()
    if address is None:
        return facts
    # Torch does not tell under which prefix a group keeps its keys, so one is agreed on there.
    store = TimedStore(group.store(None, timeout_s), timeout_s)
    try:
        token = store.compare_set("background", secrets.token_hex(8).encode())
    finally:
        store.close()
    return facts | {"store": address, "prefix": f"planaria/{token.decode('ascii', 'replace')}"}
