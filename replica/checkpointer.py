"""The face: ``Checkpointer``. What its calls do on an open job is in ``engine.py``."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from erasure.errors import PlanariaError
from replica.config import WHEN_BUSY, Options, check_choice
from replica.engine import Engine
from replica.errors import ConfigError
from replica.forked import watch
from replica.group import as_group
from replica.overlap import Overlap
from replica.place import background_of
from replica.remote import RemoteEngine
from replica.snapshot import Snapshot
from replica.ticket import Ticket
from replica.torch_private import uncompiled

log = logging.getLogger("planaria")

CLOSE_AFTER_ERROR_S = 1.0
"""How long ``close`` waits for a save after an exception ended the script: peers are often gone."""


class Checkpointer:
    """Keeps the newest states of a training run in host memory, here and on other nodes.

    ``state`` maps names to what makes up the training state: modules, optimizers, schedulers,
    loaders, anything with ``state_dict`` and ``load_state_dict``, tensors, and nested containers of
    tensors and plain values. The constructor only checks its arguments; ``start``, or the first
    call of another method, opens the arena and agrees with all ranks. Every method but ``close``
    and ``status`` must be called by all ranks in the same order.

    Use it as a context manager, or call ``close`` at the end.
    """

    def __init__(
        self, state: MutableMapping[str, object], *, group: Any = None, **options: Any
    ) -> None:
        """``options`` are the fields of ``replica.Options``; ``group``: None for torch's default.

        Raises ConfigError for an unknown or impossible option.
        """
        unknown = sorted(set(options) - set(Options.__dataclass_fields__))
        if unknown:
            known = sorted(Options.__dataclass_fields__)
            raise ConfigError(f"unknown options {unknown}, expected some of {known}")
        self._options = Options(**options)
        self._snapshot = Snapshot(state, random_states=self._options.random_states)
        self._group_given = group
        self._engine: Engine | RemoteEngine | None = None
        self._unusable = ""

    def __enter__(self) -> Self:
        """Return itself; nothing is opened yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; an exception of the block is never hidden."""
        if kind is None:
            self.close()
            return
        try:
            self._close(CLOSE_AFTER_ERROR_S, goodbye=False)
        except PlanariaError as error:
            log.warning("while closing after %s: %s", kind.__name__, error)

    @uncompiled
    def start(self) -> None:
        """Open the arena and agree with all ranks; a second call does nothing.

        Raises ConfigError, LayoutError, ArenaFull, ArenaBusy, StateError or PeerError, on every
        rank alike.
        """
        self._open()

    @uncompiled
    def restore(self, *, strict: bool = True) -> int | None:
        """Load the newest state that can be rebuilt for every rank; its step, or None.

        The process whose rank is r loads the state of owner r, wherever its bytes lie. When it
        raises RestoreAborted the live objects are as they were; after RestoreHalfDone the process
        must end. A job saved by another number of ranks is refused with ConfigError.

        Before anything changes, each rank compares its live objects with those that it saved: names
        and kinds, keys, dtypes, shapes, placements. ``strict``: any difference on any rank is
        RestoreAborted on all. Not strict: what fits is loaded; keys without a counterpart and
        tensors of another dtype or shape are left as they are, logged, and listed by ``status``.
        Each rank's own argument says what it accepts, and one rank's refusal ends it for all.
        """
        engine = self._open()
        if self._snapshot.overlap is not None:
            self._snapshot.overlap.wait()
        self._snapshot.strict = strict
        return engine.restore()

    @uncompiled
    def save(self, step: int, *, when_busy: str | None = None) -> Ticket:
        """Save the state of all ranks as of now; once it returns, the caller may change the state.

        With ``overlap`` what optimizers own is changed by their next step alone, which waits for
        the copy; who changes it otherwise calls ``wait("staged")`` of the ticket first.

        All ranks call it with the same steps, rising. While a save is under way the step is skipped
        by all ranks together, or waits, by ``when_busy`` (None: the option's value; "wait" suits
        the last save of a run). A skipped step may be given again. One that was taken, and was
        committed or has failed, is not taken twice: the ticket of then is returned. The first call
        waits until every rank has planned and raises StateError on every rank when one has an
        unsupported value. Later failures are told by ``on_error`` and the ticket.
        """
        engine = self._open()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step is {step!r}, expected a whole number from 0")
        busy = check_choice("when_busy", when_busy or self._options.when_busy, WHEN_BUSY)
        if busy == "wait" and self._snapshot.overlap is not None:
            self._snapshot.overlap.wait()
        return engine.save(step, wait=busy == "wait")

    def status(self) -> dict[str, Any]:
        """What is safe now. Before ``start`` only ``"open": False``.

        ``committed_step``: newest committed step; ``protection``: how many more nodes may be lost
        at one instant without losing it; ``protected``: "full" when that is all that the layout
        can give, else "degraded", or "none"; ``may_lose_steps``: steps after it that were saved or
        are being saved; ``left_out``: what a restore that was not strict left as it was, in three
        lists: "missing" in the live state, "extra" in it, "unfit".
        """
        engine = self._engine
        if engine is None:
            return {"open": False}
        return engine.status() | {"left_out": self._snapshot.left_out.lists()}

    @uncompiled
    def close(self) -> None:
        """Wait for the save under way, at most the deadline; release all but the arena's files.

        A second call does nothing. With ``on_error="raise"`` a failed last save raises SaveFailed.
        """
        self._close(self._options.timeout_s, goodbye=True)

    def _open(self) -> Engine | RemoteEngine:
        engine = self._engine
        unusable = self._unusable or (engine.unusable if engine is not None else "")
        if unusable:
            raise ConfigError(f"this Checkpointer cannot be used any more: {unusable}")
        if engine is None:
            group = self._group_given = as_group(self._group_given)
            options = replace(self._options, background=background_of(self._options, group))
            kind = RemoteEngine if options.background == "process" else Engine
            engine = kind.open(options, group, self._snapshot, self._emit)
            self._engine = engine
            if self._options.overlap:
                self._snapshot.overlap = Overlap(
                    rank=group.rank,
                    timeout_s=self._options.timeout_s,
                    check=self._options.overlap_check,
                )
            atexit.register(self._at_exit)
            watch(self, Checkpointer._leave_to_parent)
        return engine

    def _leave_to_parent(self) -> object:
        """In a forked child: let go of everything, and return what must not be destroyed here."""
        left = (self._engine, self._group_given)
        if self._engine is not None:
            self._engine = None
            self._unusable = f"it is open in pid {os.getppid()}, of which this is a forked child"
            atexit.unregister(self._at_exit)
        return left

    def _emit(self, event: dict[str, Any]) -> None:
        if self._options.on_event is None:
            return
        try:
            self._options.on_event(event)
        except Exception:
            # The caller's own function: its fault must not end a save or the background thread.
            log.exception("on_event raised for %s", event)

    def _at_exit(self) -> None:
        failed = getattr(sys, "last_type", None) is not None
        try:
            self._close(
                CLOSE_AFTER_ERROR_S if failed else self._options.timeout_s, goodbye=not failed
            )
        except PlanariaError as error:
            log.error("%s", error)  # noqa: TRY400 - the sentence says it all

    def _close(self, timeout_s: float, *, goodbye: bool) -> None:
        engine = self._engine
        if engine is None:
            return
        self._unusable = self._unusable or engine.unusable or "it is closed"
        try:
            if self._snapshot.overlap is not None:
                started_s = time.monotonic()
                self._snapshot.overlap.close(timeout_s)
                timeout_s = max(0.0, timeout_s - (time.monotonic() - started_s))
            engine.close(timeout_s, goodbye=goodbye)
        finally:
            # Broken off before all was released, a second call or the interpreter's end does it.
            if engine.closed:
                self._engine = None
                atexit.unregister(self._at_exit)
