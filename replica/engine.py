"""What the calls of a ``Checkpointer`` do on an open job, in whichever process that is open.

The face (see ``checkpointer.py``) has one of these in its own process, with the background work on
a thread, or speaks with one in a process of its own (see ``remote.py``).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recovery.errors import RecoveryError
from recovery.manifest import Generation
from recovery.session import (
    RestoreAborted,
    RestoreHalfDone,
    RestoreOutcome,
    restore_session,
)
from replica.clock import MonotonicClock
from replica.config import Options
from replica.driver import Driver
from replica.errors import ConfigError, PeerError, SaveFailed, StoreError
from replica.fault_points import reach
from replica.group import Group
from replica.job import Job
from replica.opening import open_job
from replica.regrown import Regrown
from replica.restorer import Restorer
from replica.runner import Runner
from replica.source import StateSource
from replica.staging import Stager
from replica.ticket import Ticket
from replica.transport import Bytes

log = logging.getLogger("planaria")

STOP_S = 0.5
"""Least time for the background thread to end, when all of a close's time is gone already."""
GOODBYE_S = 10.0
"""How long rank 0 stays for the others' last look at the store that its process serves."""

Emit = Callable[[dict[str, Any]], None]


class Engine:
    """One open job of one rank. Its methods belong to one thread, but for ``status``.

    ``unusable``: why nothing but ``close`` may be called any more; empty while all is well.
    ``closed``: all is released; until then ``close`` may be called again.
    """

    def __init__(self, options: Options, job: Job, snapshot: StateSource, emit: Emit) -> None:
        self.unusable = ""
        self.closed = False
        self.job = job
        self.driver = Driver(job, emit)
        self.stager = Stager(job, self.driver, snapshot)
        self._options, self._snapshot, self._emit = options, snapshot, emit
        self._restores = 0
        self._based = False
        self._restored: Generation | None = None
        self._told: Ticket | None = None
        self._closing = False

    @classmethod
    def open(
        cls,
        options: Options,
        group: Group,
        snapshot: StateSource,
        emit: Emit,
        scratch: Callable[[int], Bytes] | None = None,
    ) -> Engine:
        """Open the arena and agree with all ranks; raises what ``open_job`` does.

        ``scratch``: makes the memory that a restore needs beside the slots, uint8[n].
        """
        job = open_job(options, group, snapshot.estimate_bytes, MonotonicClock())
        job = job if scratch is None else replace(job, scratch=scratch)
        return cls(options, job, snapshot, emit)

    def restore(self) -> int | None:
        """Load the newest state there is for every rank (see ``Checkpointer.restore``)."""
        job = self.job
        restorer = Restorer(job, self._snapshot)
        started_s = job.clock.now_s()
        try:
            outcome = self._session(restorer, load_state=True)
        except RestoreHalfDone as error:
            self.unusable = str(error)
            raise error from restorer.load_error
        except RecoveryError as error:
            raise error from restorer.load_error
        generation = outcome.generation
        self._restored = generation
        self.stager.rewind(self._restores)
        if generation is not None:
            # What failed in a newer one is kept: it must not be tried again and again (P19).
            attempts = tuple(one for one in job.arena.head.attempts if one[0] != generation.id)
            job.arena.update_head(restored=generation, attempts=attempts)
        self._emit(self._restore_event(outcome, restorer, job.clock.now_s() - started_s))
        return generation.step if generation is not None else None

    def save(self, step: int, *, wait: bool) -> Ticket:
        """Stage one step, with ``wait`` after the save under way (see ``Checkpointer.save``)."""
        stager = self.stager
        if self.driver.broken:
            raise SaveFailed(f"no further save is possible in this process: {self.driver.broken}")
        if step % self._options.interval_steps:
            return Ticket(step, skipped=True, reason="not a multiple of interval_steps")
        if stager.last is not None and step <= stager.last.step:
            if step == stager.last.step:
                return stager.last
            raise ConfigError(
                f"step {step} comes after step {stager.last.step} was saved: steps must rise"
            )
        kept = self._restored
        if kept is not None and kept.epoch == self.job.epoch and step <= kept.step:
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
        return stager.save(step, wait=wait)

    def status(self) -> dict[str, Any]:
        """What is safe now (see ``Checkpointer.status``); from any thread."""
        job, driver, stager = self.job, self.driver, self.stager
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
            "broken": driver.broken,
        }

    def _raise_failed(self, last: Ticket | None) -> None:
        """With ``on_error="raise"``: a failed save raises in the next call, once."""
        if self._options.on_error != "raise" or last is None or not last.failed:
            return
        if last is not self._told:
            self._told = last
            raise SaveFailed(f"step {last.step} was not committed: {last.reason}")

    def _session(self, restorer: Restorer, *, load_state: bool) -> RestoreOutcome:
        job, timeout_s = self.job, self._options.timeout_s
        with self.driver.held(timeout_s) as stands_still:
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
        outcome = self._session(Restorer(self.job, self._snapshot), load_state=False)
        if outcome.generation is not None and self.job.rank == 0:
            log.warning(
                "step %d of job %r is in memory, and restore() was not called or did not load it: "
                "this run begins without it, and its saves will take its place. Call restore() "
                "first to go on from it",
                outcome.generation.step,
                self.job.name,
            )

    def _settle(self, outcome: RestoreOutcome, regrown: Regrown | None) -> None:
        job = self.job
        if outcome.world_saved not in (0, job.world):
            self.unusable = (
                f"job {job.name!r} was saved by {outcome.world_saved} ranks and this run has "
                f"{job.world}; resharding is not supported: start it with as many ranks as before, "
                "or under another job= name, or remove its arenas on every node with "
                f"`planaria clean --job {shlex.quote(job.name)}`"
            )
            raise ConfigError(self.unusable)
        if job.rank == 0:
            log.log(logging.WARNING if outcome.lost else logging.INFO, "%s", outcome.reason)
        self._based = True
        self.driver.restored(outcome, self._restores, regrown)

    def _restore_event(
        self, outcome: RestoreOutcome, restorer: Restorer, total_s: float
    ) -> dict[str, Any]:
        rebuild = outcome.plan.rebuilds[self.job.rank] if outcome.plan else None
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

    def close(self, timeout_s: float, *, goodbye: bool) -> None:
        """Wait for the save under way, at most so long, and release all but the arena's files.

        ``goodbye``: also wait for what the others may still ask of this rank. With
        ``on_error="raise"`` a failed last save raises SaveFailed.
        """
        job, driver, stager = self.job, self.driver, self.stager
        reach("close")
        deadline_s = job.clock.now_s() + timeout_s
        goodbye, self._closing = goodbye and not self._closing, True
        try:
            if driver.wait_decided(timeout_s) and goodbye:
                driver.leave()
                self._say_goodbye()
        except BaseException:
            deadline_s = 0.0  # Ctrl-C, say: no more waiting
            raise
        finally:
            # Broken off in here, a second call or the interpreter's end does it all again.
            driver.stop(max(STOP_S, deadline_s - job.clock.now_s()))
            job.links.close()
            job.pairs.close()
            job.front.close()
            self.closed = True
        last = stager.last
        if last is not None and not last.done:
            last.fail(f"not decided within the {timeout_s} s that close() waits")
        if last is not None and last.failed:
            log.error("the last save, step %d, was not committed: %s", last.step, last.reason)
            if self._options.on_error == "raise":
                raise SaveFailed(f"step {last.step} was not committed: {last.reason}")

    def _say_goodbye(self) -> None:
        """Rank 0 may serve the store, so it leaves last: all can read the last decision."""
        job = self.job
        try:
            job.front.set(f"bye/{job.rank}", b"1")
            if job.rank == 0 and job.config.store_address is None and job.world > 1:
                keys = [f"bye/{rank}" for rank in range(job.world)]
                limit_s = job.clock.now_s() + min(GOODBYE_S, self._options.timeout_s)
                while not job.front.check(keys) and job.clock.now_s() < limit_s:
                    job.clock.pause(0.02)
        except StoreError as error:
            log.info("closing without a goodbye: %s", error)
