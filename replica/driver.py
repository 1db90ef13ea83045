"""The background thread: runs save sessions one after another and keeps the ledger.

The training thread hands over small messages (``Request``) and reads the ledger under a lock; all
else belongs to the thread. It does no work per tensor: its operations are store requests, 4 MiB
pieces and records.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from erasure.errors import PlanariaError
from recovery.actions import StoreLost
from recovery.commit import (
    Prepared,
    SaveContext,
    SaveOutcome,
    decision_key,
    resolve,
    save_session,
)
from recovery.ledger import COMMITTED, HELD, STAGED, Ledger
from recovery.manifest import Generation
from recovery.session import RestoreOutcome
from replica.arena import Slot
from replica.at_exit import THREAD_PREFIX
from replica.changes import Changes
from replica.fault_points import reach
from replica.idle import Idle
from replica.job import Job
from replica.keys import Keys
from replica.regrown import Regrown
from replica.request import Counts, Request
from replica.runner import Runner
from replica.saver import Saver, SaveWork
from replica.ticket import Ticket

log = logging.getLogger("planaria")

RETRY_S = 0.5
IDLE_S = 1.0
"""So often an idle background thread looks whether a mend is called for."""
LOOK = "look"
MEND_GRACE_S = 0.5
"""How long the end of a process waits for a mend under way before it gives that up."""


@dataclass
class Driver:
    """Owns the background thread. ``emit`` is called there with one event per save."""

    job: Job
    emit: Callable[[dict[str, Any]], None]
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counts = field(default_factory=Counts)
    broken: str = ""
    """Why no further save is possible in this process; empty while all is well."""
    protection: int = -1
    """How many more nodes may be lost without losing the base, as far as this rank knows."""

    def __post_init__(self) -> None:
        self._saver = Saver(self.job)
        self.counts.loud = self.job.rank == 0
        self._runner = Runner(self.job.store, self.job.clock)
        self._queue: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._changes, self._over = Changes(), False
        self._lock = self._changes.lock
        self.keys = Keys(self.job.store, root=self.job.rank == 0)
        self._stopping = self._held = self._turning = False
        self._mending = ""
        self._idle_s = min(IDLE_S, self.job.config.options.timeout_s / 10)
        self._idle = Idle(self.job, self._saver, self._runner, self)
        self._thread = threading.Thread(
            target=self._loop, name=f"{THREAD_PREFIX}driver", daemon=True
        )
        self._thread.start()

    def read(self) -> Ledger:
        """The ledger as it is now."""
        with self._lock:
            return self.ledger

    def wait_decided(self, timeout_s: float) -> bool:
        """Wait until the newest attempt's decision has been read here; whether it has been."""
        self.job.clock.nudge()
        self._changes.wait_for(lambda: self.ledger.decided or bool(self.broken), timeout_s)
        return self.read().decided

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a step would be taken, or nothing is under way that could change that."""

        def over() -> bool:
            ledger, due = self.ledger, self._idle.mender.agenda.due
            held_up = ledger.kept is not None and (ledger.mending or bool(due))
            return bool(self.broken) or (ledger.decided and not held_up)

        self.job.clock.nudge()
        self._changes.wait_for(over, timeout_s)
        return self.read().may_admit

    def admit(self, generation: Generation, timeout_s: float) -> bool:
        """Begin ``generation`` once the decision before it has been read; whether it has begun.

        ``submit`` follows. A mend under way comes first, in the background.
        """

        def begin() -> bool:
            if self.ledger.may_admit and not self.broken:
                self.ledger = self.ledger.admit(generation)
            return bool(self.broken) or self.ledger.current == generation

        self.job.clock.nudge()
        self._changes.wait_for(begin, timeout_s)
        return self.read().current == generation

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[bool]:
        """Keep the background thread from all work meanwhile; whether it stands still."""
        self._held = True
        try:
            yield self._when_idle("begins a restore", timeout_s)
        finally:
            self._held = False
            self.look()

    def restored(self, outcome: RestoreOutcome, restores: int, regrown: Regrown | None) -> None:
        """What a restore chose is the base now, and is to be protected again (P10)."""
        base, mender = outcome.generation, self._idle.mender
        mender.take_over(outcome.plan, regrown)
        # What cannot be mended must not keep saves waiting for that.
        kept = None if mender.foreign else outcome.kept
        with self._lock:
            self.ledger = self.ledger.rebase(base, kept, outcome.kept_protection)
            self.protection = outcome.protection
        mender.agenda.after("it was restored" if base else "", restores=restores)

    def _when_idle(self, why: str, timeout_s: float) -> bool:
        deadline_s, told = self.job.clock.now_s() + timeout_s, ""
        self.job.clock.nudge()
        while True:
            left_s = max(0.0, deadline_s - self.job.clock.now_s())
            self._changes.wait_for(partial(self._stirs, told), left_s)
            with self._lock:
                mend = self._mending
                if self._still:
                    return True
            if mend in ("", told):
                return False
            told = mend
            self._idle.mender.give_way(self.job.front, why, mend)
            self.job.clock.nudge()

    @property
    def _still(self) -> bool:
        """Under the lock: the background thread touches no slot."""
        return self.ledger.idle and not self._turning

    def _stirs(self, told: str) -> bool:
        """Under the lock: it is still, or broken, or a mend other than ``told`` has begun."""
        return self._still or bool(self.broken) or self._mending not in ("", told)

    def change(self, change: Callable[[Ledger], Ledger]) -> None:
        """Replace the ledger by ``change`` of it."""
        with self._lock:
            self.ledger = change(self.ledger)
            self._changes.tell()

    def submit(self, request: Request) -> None:
        """Hand a generation over; its slot belongs to the background until the ledger frees it."""
        self.keys.note(request.sequence, request.admission_key, decision_key(request.generation))
        self._queue.put(request)

    def skipped(self, ticket: Ticket, admission_key: str, sequence: int) -> None:
        """Count and tell a step that is not saved; its key goes with the generation before it."""
        self.counts.skipped += 1
        self.keys.note(sequence, admission_key)
        event = {"event": "save", "step": ticket.step, "outcome": "skipped"}
        self.emit({**event, "reason": ticket.reason})

    def leave(self) -> None:
        """This process is about to end: others need not wait for it in a mend that it is not in."""
        if not self._mending:
            self._idle.mender.give_way(self.job.front, "closes")

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the save under way, and the arena with it; whether both have ended.

        Where they have not, the thread closes the arena when nothing writes to it any more.
        """
        self._stopping = True
        self._queue.put(None)
        # All ranks close at about the same time, and a mend mostly takes a moment.
        grace_s = min(MEND_GRACE_S, timeout_s / 4)
        self._changes.wait_for(lambda: not self._mending or bool(self.broken), grace_s)
        mend = self._mending
        if mend:
            self._idle.mender.give_way(self.job.front, "closes", mend)
        self.job.clock.nudge()
        over = self._changes.wait_for(lambda: self._over, timeout_s)
        if over and self._saver.idle:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            request = self._next()
            if request is None:
                with self._lock:
                    self._over = True
                    self._changes.tell()
                self._saver.close_arena()
                return
            try:
                if isinstance(request, Request):
                    self._save(request)
                else:
                    self._turn()
            except BaseException as error:
                # A listener that calls sys.exit(), or a defect of ours: no ticket stays unanswered,
                # and no other save takes a slot.
                log.exception("no further save in this process")
                with self._lock:
                    self.broken = f"{type(error).__name__}: {error}"
                    self._changes.tell()
                if isinstance(request, Request):
                    request.ticket.fail(self.broken)

    def _turn(self) -> None:
        with self._lock:
            if self._held or self._stopping:
                return
            self._turning = True
        try:
            self._idle.turn()
        finally:
            with self._lock:
                self._turning = False
                self._changes.tell()

    def begin_mend(self, name: str, sequence: int) -> set[str] | None:
        """Enter a mend in the ledger; the log of its keys, or None when a save came first."""
        with self._lock:
            if not self.ledger.idle or self._held:
                return None
            self.ledger, self._mending = self.ledger.mend(), name
            self._changes.tell()
            return self.keys.open(sequence)

    def end_mend(self, protection: int | None, *, last: bool) -> Generation | None:
        """The mend is over; the base survives ``protection`` losses (None: not known).

        With ``last`` no other comes; what was kept until then and is given up now is returned.
        """
        with self._lock:
            self.ledger = self.ledger.mended(-1 if protection is None else protection)
            given_up = self.ledger.kept if last else None
            if given_up is not None:
                self.ledger = self.ledger.give_up_kept()
            self._mending = ""
            self.protection = self.protection if protection is None else protection
            self._changes.tell()
            return given_up

    def look(self) -> None:
        """Have the background thread look for something to mend as soon as it is free."""
        self._queue.put(LOOK)

    def _next(self) -> Request | str | None:
        """The next thing to do; LOOK for a mend or something to scrub when nothing comes."""
        try:
            return self._queue.get(timeout=self._idle_s)
        except queue.Empty:
            return LOOK

    def _save(self, request: Request) -> None:
        if self.read().decided:
            return  # broken off in the middle of ``submit``, it was handed over a second time
        context, clock = self._context(request), self.job.clock
        started_s = clock.now_s()
        facts: dict[str, Any] = {"seconds": {"copy": request.copy_s}, "sent_bytes": 0}
        refusal = request.refusal or self._finish_copy(request, facts)
        if request.slot is None or refusal:
            outcome = SaveOutcome(HELD, refusal)
        else:
            self.change(lambda ledger: ledger.apply(STAGED))
            self._idle.mender.give_way(self.job.store, "has a save to do")
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

    def _finish_copy(self, request: Request, facts: dict[str, Any]) -> str:
        """Wait for what is copied late; why the step cannot be saved, "" if it can."""
        captured = request.captured
        if captured is not None and captured.late_bytes:
            started_s = self.job.clock.now_s()
            try:
                captured.finish(self.job.moving_timeout_s(captured.late_bytes))
            except PlanariaError as error:
                return f"{type(error).__name__}: {error}"
            facts["seconds"]["late_copy"] = self.job.clock.now_s() - started_s
            request.ticket.advance("staged")
        return ""

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
            ledger=self.read,
            ended_key=decision_key(request.generation),
            expected=len(job.layout.held_by(job.rank)),
            deadline_s=started_s + timeout_s,
        )

        def prepared(_: Prepared) -> None:
            facts["seconds"]["protect"] = job.clock.now_s() - started_s
            self.change(lambda ledger: ledger.apply(HELD))
            request.ticket.advance("held")

        published = self.keys.open(request.sequence)
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
            reach("save.release")
        if request.slot is not None:
            request.slot.taken = False
        self.change(lambda ledger: ledger.apply(outcome.state))
        if outcome.state == COMMITTED:
            self.counts.note_committed()
            self.protection = self.job.layout.redundancy.survivable_nodes
            self._idle.after_commit(request.sequence)
            self.keys.delete_expired(request.sequence)
            ticket.advance("committed")
        else:
            self.counts.note_aborted(generation.step, outcome.reason, self.read().base)
            log.warning("step %d was not committed: %s", generation.step, outcome.reason)
            ticket.fail(outcome.reason)
            # A rank may be gone for good: the others see to what it held.
            self._idle.mender.agenda.after("a save was aborted", sequence=request.sequence)
            self.look()
        event = {"event": "save", "step": generation.step, "outcome": outcome.state}
        event |= {"generation": generation.id, "bytes": request.shard_bytes}
        self.emit({**event, "reason": outcome.reason, **facts})
