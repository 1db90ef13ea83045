"""What the background process asks of its trainer while a call is open, answered in its thread."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from replica.at_exit import THREAD_PREFIX
from replica.errors import StateError
from replica.group import Group
from replica.image import ShardHeader
from replica.mappings import Mappings
from replica.snapshot import LoadPlan, Snapshot
from replica.source import Captured
from replica.unsupported import Unsupported
from replica.wire import Frame, WireLost, error_word, field
from replica.words import parse_word

log = logging.getLogger("planaria")


class Serving:
    """Answers for one open Checkpointer. ``committed``: live objects may have been changed.

    ``captured``: a step was captured in this call, and all of it that is late was begun.
    ``raised``: the last exception of the state's own methods in this call. ``rounds``: how often
    the ranks have agreed; ``disagreed``: an exchange failed, or one of them said that it had.
    """

    def __init__(
        self,
        group: Group,
        snapshot: Snapshot,
        emit: Callable[[dict[str, Any]], None],
        say: Callable[[Frame], None],
    ) -> None:
        self._group, self._snapshot, self._emit, self._say = group, snapshot, emit, say
        self._prepared: LoadPlan | None = None
        self.mappings = Mappings(0)
        self.grace_s = 0.0
        """How much longer than its deadline the next exchange may take."""
        self._late: Captured | None = None
        self._copies: dict[int, Captured] = {}
        self.raised: Exception | None = None
        self.committed = self.captured = False
        self.rounds, self.disagreed = 0, False
        self._answers: dict[str, Callable[[Frame], Any]] = {
            "exchange": self._exchange,
            "estimate": lambda args: self._snapshot.estimate_bytes(field(args, "rank", int)),
            "plan": self._plan,
            "capture": self._capture,
            "late": self._start_late,
            "forget": lambda _: self.forget(),
            "prepare": self._prepare,
            "commit": self._commit,
            "event": lambda args: self._emit(field(args, "event", dict)),
        }

    @property
    def staged(self) -> bool:
        """What was captured last is complete."""
        return self._late is not None and not self._late.late_bytes

    def read_ahead(self) -> None:
        """Read the state while the process gets ready: it does not change within the call."""
        try:
            self._snapshot.read_ahead()
        except (StateError, Unsupported, MemoryError, RecursionError) as error:
            # The capture raises it again. Anything else is a signal handler's, and the caller's.
            log.debug("while reading ahead: %s", error)

    def begin(self) -> None:
        """A call begins."""
        self._snapshot.forget_ahead()
        self.raised, self._prepared = None, None
        self.committed = self.captured = False

    def end(self) -> None:
        """A call is over here."""
        self._snapshot.forget_ahead()

    def answer(self, ask: str, args: Frame) -> Any:
        """Do what is asked. Raises what the state's own methods raise."""
        if ask not in self._answers:
            raise WireLost(f"the background process asks for {ask!r:.100}")
        if ask != "capture":
            # A listener may change the state.
            self._snapshot.forget_ahead()
        try:
            return self._answers[ask](args)
        except Exception as error:
            self.raised = error
            raise

    def _exchange(self, args: Frame) -> list[str]:
        value = base64.b64decode(field(args, "value", str), validate=True)
        timeout_s = field(args, "timeout_s", (int, float)) + self.grace_s
        # Only the first word may have to wait for another rank's process to start.
        self.grace_s = 0.0
        self.disagreed = True
        words = self._group.exchange(value, timeout_s)
        self.disagreed = any("error" in parse_word(raw, rank) for rank, raw in enumerate(words))
        self.rounds += 1
        return [base64.b64encode(word).decode() for word in words]

    def _plan(self, args: Frame) -> None:
        rank, self_check = field(args, "rank", int), field(args, "self_check", bool)
        self._snapshot.plan(rank, self_check=self_check)

    def _capture(self, args: Frame) -> Frame:
        self.mappings.purge()
        buffer = self.mappings.view(field(args, "memory", dict))
        captured = self._snapshot.begin_capture(buffer, _header(field(args, "header", dict)))
        self._late = captured
        self.captured = not captured.late_bytes
        return {"nbytes": captured.nbytes, "late_bytes": captured.late_bytes}

    def _start_late(self, args: Frame) -> None:
        captured, number = self._late, field(args, "number", int)
        if captured is None:
            raise WireLost("nothing was captured")
        self._copies = {number: captured}
        captured.start(lambda: self._say({"late": number, "over": True}))
        self.captured = True

    def finish_late(self, number: int, timeout_s: float) -> None:
        """Say when a late copy is complete, or why it will not be; from a thread of its own."""
        captured = self._copies.get(number)

        def finish() -> None:
            said: Frame = {"late": number}
            try:
                if captured is None:
                    raise WireLost(f"there is no late copy {number}")
                captured.finish(timeout_s)
            except Exception as error:  # noqa: BLE001 - the save's driver is told
                said["raised"] = error_word(error)
            self._say(said)

        threading.Thread(target=finish, name=f"{THREAD_PREFIX}late copy", daemon=True).start()

    def forget(self) -> None:
        """Let go of all memory of the process's that is mapped here."""
        self._snapshot.forget_buffers()
        self.mappings.forget()
        self._late, self._copies, self._prepared = None, {}, None

    def _prepare(self, args: Frame) -> Frame:
        view = self.mappings.view(field(args, "memory", dict))
        nbytes = field(args, "nbytes", int)
        self._prepared = self._snapshot.prepare(view[:nbytes])
        return asdict(self._prepared.header)

    def _commit(self, _: Frame) -> None:
        if self._prepared is None:
            raise WireLost("nothing was prepared")
        prepared, self._prepared = self._prepared, None
        self.committed = True
        prepared.commit()


def _header(facts: Frame) -> ShardHeader:
    try:
        return ShardHeader(**facts)
    except TypeError as error:
        raise WireLost(f"no header of a shard: {error}") from error
