"""The background thread: runs save sessions one after another and keeps the ledger.

The training thread hands over small messages (``Request``) and reads the ledger under a lock; all
else belongs to the thread. It does no work per tensor: its operations are store requests, 4 MiB
pieces and records.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from erasure.errors import PlanariaError
from recovery.actions import StoreLost
from recovery.commit import (
    COMMITTED,
    HELD,
    STAGED,
    KeyLog,
    Ledger,
    Prepared,
    SaveContext,
    SaveOutcome,
    decision_key,
    resolve,
    save_session,
)
from recovery.manifest import Generation
from replica.arena import HELD as HELD_SLOT
from replica.arena import Slot
from replica.at_exit import THREAD_PREFIX
from replica.errors import StoreError
from replica.job import Job
from replica.runner import Runner
from replica.saver import Saver, SaveWork
from replica.ticket import Ticket

log = logging.getLogger("planaria")

RETRY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Request:
    """A staged generation, or with ``refusal`` one that this rank could not stage and aborts."""

    generation: Generation
    sequence: int
    admission_key: str
    ticket: Ticket
    slot: Slot | None
    shard_bytes: int
    copy_s: float
    refusal: str = ""


@dataclass
class Counts:
    """Saves of this incarnation, by how they ended, and the newest failure."""

    committed: int = 0
    aborted: int = 0
    skipped: int = 0
    last_error: str = ""


@dataclass
class Driver:
    """Owns the background thread. ``emit`` is called there with one event per save."""

    job: Job
    emit: Callable[[dict[str, Any]], None]
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counts = field(default_factory=Counts)
    broken: str = ""
    """Why no further save is possible in this process; empty while all is well."""

    def __post_init__(self) -> None:
        self._saver = Saver(self.job)
        self._runner = Runner(self.job.store, self.job.clock)
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._keys = KeyLog()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._loop, name=f"{THREAD_PREFIX}driver", daemon=True
        )
        self._thread.start()

    def read(self) -> Ledger:
        """The ledger as it is now."""
        with self._changed:
            return self.ledger

    def wait_decided(self, timeout_s: float) -> bool:
        """Wait until the newest attempt's decision has been read here; whether it has been."""
        self.job.clock.nudge()
        with self._changed:
            self._changed.wait_for(lambda: self.ledger.decided or bool(self.broken), timeout_s)
            return self.ledger.decided

    def change(self, change: Callable[[Ledger], Ledger]) -> None:
        """Replace the ledger by ``change`` of it."""
        with self._changed:
            self.ledger = change(self.ledger)
            self._changed.notify_all()

    def submit(self, request: Request) -> None:
        """Hand a generation over; its slot belongs to the background until the ledger frees it."""
        self.note_keys(request.sequence, request.admission_key, decision_key(request.generation))
        self._queue.put(request)

    def skipped(self, ticket: Ticket, admission_key: str, sequence: int) -> None:
        """Count and tell a step that is not saved; its key goes with the generation before it."""
        self.counts.skipped += 1
        self.note_keys(sequence, admission_key)
        event = {"event": "save", "step": ticket.step, "outcome": "skipped"}
        self.emit({**event, "reason": ticket.reason})

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the save under way; whether nothing writes to the arena any more."""
        self._stopping = True
        self._queue.put(None)
        self.job.clock.nudge()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._saver.idle

    def note_keys(self, sequence: int, *decided: str) -> None:
        """Decisions and admissions are removed by the root."""
        with self._changed:
            keys = self._keys.open(sequence)
            if self.job.rank == 0:
                keys.update(decided)

    def _loop(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                self._save(request)
            except Exception as error:
                # A defect must neither leave a ticket unanswered nor let another save take a slot.
                log.exception("step %d: no further save in this process", request.generation.step)
                with self._changed:
                    self.broken = f"{type(error).__name__}: {error}"
                    self._changed.notify_all()
                request.ticket.fail(self.broken)

    def _save(self, request: Request) -> None:
        context, clock = self._context(request), self.job.clock
        started_s = clock.now_s()
        facts: dict[str, Any] = {"seconds": {"copy": request.copy_s}, "sent_bytes": 0}
        if request.slot is None:
            outcome = SaveOutcome(HELD, request.refusal)
        else:
            self.change(lambda ledger: ledger.apply(STAGED))
            outcome = self._protect(request, request.slot, context, facts)
        reason = outcome.reason
        while outcome.state == HELD:
            # Not decided as far as this rank knows: abort it, or learn what was decided.
            outcome = self._resolve(context, reason)
            if outcome.state == HELD:
                if self._stopping:
                    request.ticket.fail(f"undecided when this process closed: {outcome.reason}")
                    return
                clock.pause(RETRY_S)
        facts["seconds"]["total"] = clock.now_s() - started_s
        self._finish(request, outcome, facts)

    def _context(self, request: Request) -> SaveContext:
        return SaveContext(
            rank=self.job.rank,
            layout=self.job.layout,
            generation=request.generation,
            base=self.read().base,
            shard_bytes=request.shard_bytes,
            incarnation=self.job.arena.head.incarnation,
            held_root=self.job.held_root,
        )

    def _protect(
        self, request: Request, slot: Slot, context: SaveContext, facts: dict[str, Any]
    ) -> SaveOutcome:
        job, started_s = self.job, self.job.clock.now_s()
        timeout_s = job.moving_timeout_s(job.layout.redundancy.n * request.shard_bytes)
        work = SaveWork(
            generation=request.generation,
            own=slot,
            shard_bytes=request.shard_bytes,
            reusable=lambda generation: self.read().reusable(generation),
            deadline_s=started_s + timeout_s,
        )

        def prepared(_: Prepared) -> None:
            facts["seconds"]["protect"] = job.clock.now_s() - started_s
            self.change(lambda ledger: ledger.apply(HELD))
            request.ticket.advance("held")

        with self._changed:
            published = self._keys.open(request.sequence)
        try:
            job.links.tell_all_broken()
            return self._runner.run(
                save_session(context),
                {**self._saver.handlers(work), Prepared: prepared},
                timeout_s=timeout_s,
                published=published,
            )
        except PlanariaError as error:
            log.exception("step %d", request.generation.step)
            return SaveOutcome(HELD, str(error))
        finally:
            self._saver.end()
            facts["sent_bytes"] = work.sent_bytes

    def _resolve(self, context: SaveContext, reason: str) -> SaveOutcome:
        try:
            return self._runner.run(resolve(context, reason), {}, timeout_s=RETRY_S)
        except StoreLost as lost:
            return SaveOutcome(HELD, str(lost))

    def _finish(self, request: Request, outcome: SaveOutcome, facts: dict[str, Any]) -> None:
        """Obey the decision: head, ledger, keys; then tell."""
        generation, ticket = request.generation, request.ticket
        if outcome.state == COMMITTED:
            # The head goes first: the ledger frees slots that the head's readers may count on.
            self.job.arena.update_head(committed=generation)
        self.change(lambda ledger: ledger.apply(outcome.state))
        if outcome.state == COMMITTED:
            self.counts.committed += 1
            self._trim()
            self._delete_keys(request.sequence)
            ticket.advance("committed")
        else:
            self.counts.aborted += 1
            self.counts.last_error = outcome.reason
            log.warning("step %d was not committed: %s", generation.step, outcome.reason)
            ticket.fail(outcome.reason)
        event = {"event": "save", "step": generation.step, "outcome": outcome.state}
        event |= {"generation": generation.id, "bytes": request.shard_bytes}
        self.emit({**event, "reason": outcome.reason, **facts})

    def _trim(self) -> None:
        """Give back held slots beyond two for each fragment: a renumbered arena brings some."""
        arena, ledger = self.job.arena, self.read()
        held = [slot for slot in arena.slots.values() if slot.kind == HELD_SLOT]
        surplus = len(held) - 2 * len(self.job.layout.held_by(self.job.rank))
        stale = [
            slot
            for slot in held
            if ledger.reusable(slot.generation) and not self._saver.quarantined(slot)
        ]
        for slot in sorted(stale, key=lambda s: (s.capacity, s.number))[: max(0, surplus)]:
            arena.drop(slot)

    def _delete_keys(self, sequence: int) -> None:
        """P5; a store that fails here only keeps keys that nobody needs."""
        with self._changed:
            keys = self._keys.expired(sequence)
        try:
            for key in keys:
                self.job.store.delete(key)
        except StoreError as error:
            log.warning("keys of old saves were not removed: %s", error)
