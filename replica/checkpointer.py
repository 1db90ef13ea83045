"""The face: ``Checkpointer``. It admits and stages in the training thread; the rest runs behind."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Self

from erasure.errors import PlanariaError
from recovery.errors import RecoveryError
from recovery.manifest import Generation
from recovery.session import (
    RestoreAborted,
    RestoreHalfDone,
    RestoreOutcome,
    restore_session,
)
from replica.clock import MonotonicClock
from replica.config import WHEN_BUSY, Options, check_choice
from replica.driver import Driver
from replica.errors import ConfigError, PeerError, SaveFailed, StoreError
from replica.fault_points import reach
from replica.forked import watch
from replica.group import as_group
from replica.job import Job
from replica.opening import open_job
from replica.regrown import Regrown
from replica.restorer import Restorer
from replica.runner import Runner
from replica.snapshot import Snapshot
from replica.staging import Stager
from replica.ticket import Ticket

log = logging.getLogger("planaria")

CLOSE_AFTER_ERROR_S = 1.0
"""How long ``close`` waits for a save after an exception ended the script: peers are often gone."""
STOP_S = 0.5
"""Least time for the background thread to end, when all of a close's time is gone already."""
GOODBYE_S = 10.0
"""How long rank 0 stays for the others' last look at the store that its process serves."""


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
        self._job: Job | None = None
        self._driver: Driver | None = None
        self._stager: Stager | None = None
        self._restores = 0
        self._based = False
        self._restored: Generation | None = None
        self._told: Ticket | None = None
        self._unusable = ""
        self._closing = False

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

    def start(self) -> None:
        """Open the arena and agree with all ranks; a second call does nothing.

        Raises ConfigError, LayoutError, ArenaFull, ArenaBusy, StateError or PeerError, on every
        rank alike.
        """
        self._open()

    def restore(self) -> int | None:
        """Load the newest state that can be rebuilt for every rank; its step, or None.

        The process whose rank is r loads the state of owner r, wherever its bytes lie. When it
        raises RestoreAborted the live objects are as they were; after RestoreHalfDone the process
        must end. A job saved by another number of ranks is refused with ConfigError.
        """
        job, _, stager = self._open()
        restorer = Restorer(job, self._snapshot)
        started_s = job.clock.now_s()
        try:
            outcome = self._session(restorer, load_state=True)
        except RestoreHalfDone as error:
            self._unusable = str(error)
            raise error from restorer.load_error
        except RecoveryError as error:
            raise error from restorer.load_error
        generation = outcome.generation
        self._restored = generation
        stager.rewind(self._restores)
        if generation is not None:
            # What failed in a newer one is kept: it must not be tried again and again (P19).
            attempts = tuple(one for one in job.arena.head.attempts if one[0] != generation.id)
            job.arena.update_head(restored=generation, attempts=attempts)
        self._emit(self._restore_event(outcome, restorer, job.clock.now_s() - started_s))
        return generation.step if generation is not None else None

    def save(self, step: int, *, when_busy: str | None = None) -> Ticket:
        """Save the state of all ranks as of now; once it returns, the caller may change the state.

        All ranks call it with the same steps, rising. While a save is under way the step is skipped
        by all ranks together, or waits, by ``when_busy`` (None: the option's value; "wait" suits
        the last save of a run). The first call waits until every rank has planned and raises
        StateError on every rank when one has an unsupported value. Later failures are told by
        ``on_error`` and the ticket.
        """
        job, driver, stager = self._open()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step is {step!r}, expected a whole number from 0")
        busy = check_choice("when_busy", when_busy or self._options.when_busy, WHEN_BUSY)
        if driver.broken:
            raise SaveFailed(f"no further save is possible in this process: {driver.broken}")
        if step % self._options.interval_steps:
            return Ticket(step, skipped=True, reason="not a multiple of interval_steps")
        if stager.last is not None and step <= stager.last.step:
            if step == stager.last.step:
                return stager.last
            raise ConfigError(
                f"step {step} comes after step {stager.last.step} was saved: steps must rise"
            )
        kept = self._restored
        if kept is not None and kept.epoch == job.epoch and step <= kept.step:
            # Two generations of one epoch and step would have no order.
            if step == kept.step:
                return Ticket(step, skipped=True, reason="it is the step that was restored")
            raise ConfigError(
                f"step {step} comes after step {kept.step} was restored: steps must rise"
            )
        self._raise_failed(stager.last)
        stager.plan_once()
        if not self._based:
            self._choose_base()
        return stager.save(step, wait=busy == "wait")

    def status(self) -> dict[str, Any]:
        """What is safe now. Before ``start`` only ``"open": False``.

        ``committed_step``: newest committed step; ``protection``: how many more nodes may be lost
        at one instant without losing it; ``protected``: "full" when that is all that the layout
        can give, else "degraded", or "none"; ``may_lose_steps``: steps after it that were saved or
        are being saved.
        """
        job, driver, stager = self._job, self._driver, self._stager
        if job is None or driver is None or stager is None:
            return {"open": False}
        ledger = driver.read()
        base = ledger.base
        last = stager.last.step if stager.last is not None else None
        full = job.layout.redundancy.survivable_nodes
        protected = "full" if driver.protection >= full > 0 else "degraded"
        if base is None or not full or driver.protection < 0:
            protected = "none"
        return {
            "open": True,
            "job": job.name,
            "epoch": job.epoch,
            "rank": job.rank,
            "world": job.world,
            "redundancy": str(job.layout.redundancy),
            "committed_step": base.step if base else None,
            "restored_step": self._restored.step if self._restored else None,
            "protection": driver.protection if base else None,
            "protected": protected,
            "may_lose_steps": None if last is None else last - (base.step if base else 0),
            "busy": not ledger.decided,
            "bytes_held": job.arena.bytes_allocated,
            "saves_committed": driver.counts.committed,
            "saves_aborted": driver.counts.aborted,
            "saves_skipped": driver.counts.skipped,
            "saves_failed_in_a_row": driver.counts.failed_in_a_row,
            "mended": driver.counts.mended,
            "slots_damaged": driver.counts.damaged,
            "last_error": driver.counts.last_error,
        }

    def close(self) -> None:
        """Wait for the save under way, at most the deadline; release all but the arena's files.

        A second call does nothing. With ``on_error="raise"`` a failed last save raises SaveFailed.
        """
        self._close(self._options.timeout_s, goodbye=True)

    def _open(self) -> tuple[Job, Driver, Stager]:
        if self._unusable:
            raise ConfigError(f"this Checkpointer cannot be used any more: {self._unusable}")
        if self._job is None or self._driver is None or self._stager is None:
            group = self._group_given = as_group(self._group_given)
            job = open_job(self._options, group, self._snapshot.estimate_bytes, MonotonicClock())
            self._job, self._driver = job, Driver(job, self._emit)
            self._stager = Stager(job, self._driver, self._snapshot)
            atexit.register(self._at_exit)
            watch(self, Checkpointer._leave_to_parent)
        return self._job, self._driver, self._stager

    def _leave_to_parent(self) -> object:
        """In a forked child: let go of everything, and return what must not be destroyed here."""
        left = (self._job, self._driver, self._stager, self._group_given)
        if self._job is not None:
            self._job = self._driver = self._stager = None
            self._unusable = f"it is open in pid {os.getppid()}, of which this is a forked child"
            atexit.unregister(self._at_exit)
        return left

    def _raise_failed(self, last: Ticket | None) -> None:
        """With ``on_error="raise"``: a failed save raises in the next call, once."""
        if self._options.on_error != "raise" or last is None or not last.failed:
            return
        if last is not self._told:
            self._told = last
            raise SaveFailed(f"step {last.step} was not committed: {last.reason}")

    def _session(self, restorer: Restorer, *, load_state: bool) -> RestoreOutcome:
        job, driver, _ = self._open()
        timeout_s = self._options.timeout_s
        with driver.held(timeout_s) as stands_still:
            if not stands_still:
                raise PeerError("a save is still under way; restore() waited for it in vain")
            context = job.restore_context(restorer.report(), self._restores)
            self._restores += 1
            try:
                job.links.tell_all_broken()
            except StoreError as error:
                raise RestoreAborted(f"rank {job.rank} lost the store: {error}") from error
            outcome = Runner(job.front, job.clock).run(
                restore_session(context, load_state=load_state),
                restorer.handlers(),
                timeout_s=timeout_s,
                per_wait=True,
            )
            self._settle(outcome, restorer.regrown)
            return outcome

    def _choose_base(self) -> None:
        """A save without a restore before it must not overwrite the newest generation there is."""
        job, _, _ = self._open()
        self._session(Restorer(job, self._snapshot), load_state=False)

    def _settle(self, outcome: RestoreOutcome, regrown: Regrown | None) -> None:
        job, driver, _ = self._open()
        if outcome.world_saved not in (0, job.world):
            self._unusable = (
                f"job {job.name!r} was saved by {outcome.world_saved} ranks and this run has "
                f"{job.world}; resharding is not supported: start it with as many ranks as before, "
                "or under another job= name, or remove its arenas on every node with "
                f"`planaria clean --job {shlex.quote(job.name)}`"
            )
            raise ConfigError(self._unusable)
        if job.rank == 0:
            log.log(logging.WARNING if outcome.lost else logging.INFO, "%s", outcome.reason)
        self._based = True
        driver.restored(outcome, self._restores, regrown)

    def _restore_event(
        self, outcome: RestoreOutcome, restorer: Restorer, total_s: float
    ) -> dict[str, Any]:
        job, _, _ = self._open()
        rebuild = outcome.plan.rebuilds[job.rank] if outcome.plan else None
        return {
            "event": "restore",
            "step": outcome.generation.step if outcome.generation else None,
            "source": rebuild.source if rebuild else outcome.source,
            "source_farthest": outcome.source,
            "bytes_received": restorer.received_bytes,
            "bytes_local": restorer.local_bytes,
            "shard_bytes": rebuild.kind.shard_bytes if rebuild else 0,
            "protection": outcome.protection,
            "seconds": {**restorer.seconds, "total": total_s},
            "reason": outcome.reason,
        }

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
        job, driver, stager = self._job, self._driver, self._stager
        if job is None or driver is None or stager is None:
            return
        reach("close")
        self._unusable = self._unusable or "it is closed"
        deadline_s = job.clock.now_s() + timeout_s
        goodbye, self._closing = goodbye and not self._closing, True
        try:
            if driver.wait_decided(timeout_s) and goodbye:
                driver.leave()
                self._say_goodbye(job)
        except BaseException:
            deadline_s = 0.0  # Ctrl-C, say: no more waiting
            raise
        finally:
            # Broken off in here, a second call or the interpreter's end does it all again.
            ended = driver.stop(max(STOP_S, deadline_s - job.clock.now_s()))
            job.links.close()
            job.pairs.close()
            job.front.close()
            if ended:
                job.arena.close()
            self._job = self._driver = self._stager = None
            atexit.unregister(self._at_exit)
        last = stager.last
        if last is not None and not last.done:
            last.fail(f"not decided within the {timeout_s} s that close() waits")
        if last is not None and last.failed:
            log.error("the last save, step %d, was not committed: %s", last.step, last.reason)
            if self._options.on_error == "raise":
                raise SaveFailed(f"step {last.step} was not committed: {last.reason}")

    def _say_goodbye(self, job: Job) -> None:
        """Rank 0 may serve the store, so it leaves last: all can read the last decision."""
        try:
            job.front.set(f"bye/{job.rank}", b"1")
            if job.rank == 0 and job.config.store_address is None and job.world > 1:
                keys = [f"bye/{rank}" for rank in range(job.world)]
                limit_s = job.clock.now_s() + min(GOODBYE_S, self._options.timeout_s)
                while not job.front.check(keys) and job.clock.now_s() < limit_s:
                    job.clock.pause(0.02)
        except StoreError as error:
            log.info("closing without a goodbye: %s", error)
