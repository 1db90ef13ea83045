"""The training thread's part of a save: agree on the plan once, admit, copy, hand over."""

from __future__ import annotations

import logging

from recovery.actions import StoreLost
from recovery.admission import Admission, admission_key, admit_session
from recovery.agree import agree_session
from recovery.commit import abort_value, decision_key
from recovery.manifest import Generation, generation_id
from recovery.session import ALL_RESTORE
from recovery.slots import OWN
from recovery.tree import GatherFailed, dump, merge_texts, texts_from
from replica.arena import Slot
from replica.driver import Driver
from replica.errors import ArenaError, PeerError, StateError, StoreError
from replica.fault_points import reach
from replica.image import ShardHeader
from replica.job import Job
from replica.regrown import take_free_own_slot
from replica.request import Request
from replica.runner import Runner
from replica.source import Captured, NeedCapacity, StateSource
from replica.ticket import Ticket
from replica.unsupported import explains_itself

log = logging.getLogger("planaria")


class Stager:
    """For the training thread only. ``last``: ticket of the newest step that was not skipped."""

    def __init__(self, job: Job, driver: Driver, snapshot: StateSource) -> None:
        self._job, self._driver, self._snapshot = job, driver, snapshot
        self._sequence = self._restores = self._plans = 0
        self._skips = -1, 0
        self._planned = False
        self.last: Ticket | None = None

    def plan_once(self) -> None:
        """Before the first save all ranks plan; an unsupported value is StateError everywhere."""
        if self._planned:
            return
        job, error = self._job, self._plan_error()
        value = dump([str(error)] if error else [])
        self._plans += 1
        session = agree_session(f"planned/{self._plans}", job.rank, job.world, value, merge_texts)
        try:
            raw = Runner(job.front, job.clock).run(
                session, {}, timeout_s=job.config.options.timeout_s
            )
        except StoreLost as lost:
            raise StoreError(
                f"rank {job.rank}: the first save() cannot ask the others: {lost}; call it again"
            ) from lost
        except GatherFailed as failed:
            raise PeerError(
                f"rank {job.rank}: the first save() waits for all ranks; {failed} within "
                f"{job.config.options.timeout_s} s: every rank must call save() with the same "
                f"steps, and {ALL_RESTORE}"
            ) from failed
        errors = texts_from(raw)
        if errors:
            raise StateError("; ".join(errors)) from error
        self._planned = True

    def _plan_error(self) -> StateError | None:
        try:
            options = self._job.config.options
            self._snapshot.plan(self._job.rank, self_check=options.self_check)
        except StateError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a user's state_dict may raise anything
            found = StateError(f"rank {self._job.rank}: {type(error).__name__}: {error}")
            found.__cause__ = error
            return found
        return None

    def rewind(self, restores: int) -> None:
        """After a restore, the number ``restores`` of this process: steps start from there."""
        self._restores, self.last, self._skips = restores, None, (-1, 0)

    def save(self, step: int, *, wait: bool) -> Ticket:
        """Admit, with ``wait`` after the save under way, and stage.

        Never raises for a failed save: the ticket does.
        """
        job, driver, timeout_s = self._job, self._driver, self._job.config.options.timeout_s
        if wait:
            driver.wait_ready(timeout_s)
        try:
            admission = self._admit(step)
        except StoreLost as error:
            # P1: without the store both generations are kept and nothing new is begun.
            log.warning("step %d is not saved: %s", step, error)
            driver.counts.note_failed(step, str(error), driver.read().base, loud=True)
            return self._skip(step, str(error))
        if not admission.take:
            kept = driver.read().kept
            why = f"{kept.describe()} is kept until the restored step is protected" if kept else ""
            ticket = self._skip(step, why or "a save is under way")
            # All ranks have read the same decision: given again, the step is asked for anew.
            self._skips = step, self._skips_of(step) + 1
            return ticket
        self._sequence = admission.sequence
        self.last = ticket = Ticket(step)
        ticket.limit_s = 2 * timeout_s
        # A rank that missed an admission may count from below, but never over a restore: the same
        # step may come again after one, and is another generation.
        sequence = (self._restores << 32) + admission.sequence
        identity = generation_id(job.name, job.nonce, step, sequence)
        generation = Generation(job.epoch, step, identity)
        try:
            admitted = driver.admit(generation, timeout_s)
            if admitted:
                driver.submit(self._stage(generation, ticket))
        except BaseException as error:
            # Ctrl-C, say. The generation was begun, and all would wait for what never comes.
            self._break_off(generation, ticket, f"{type(error).__name__} during save({step})")
            raise
        if not admitted:
            self._give_up(generation, ticket, "the decision before it could not be read")
        return ticket

    def _skip(self, step: int, reason: str) -> Ticket:
        ticket = Ticket(step, skipped=True, reason=reason)
        self._driver.skipped(ticket, self._admission_key(step), self._sequence)
        return ticket

    def _admit(self, step: int) -> Admission:
        ledger, skips = self._driver.read(), self._skips_of(step)
        session = admit_session(step, self._restores, self._sequence, ledger, skips)
        timeout_s = self._job.config.options.timeout_s
        return Runner(self._job.front, self._job.clock).run(session, {}, timeout_s=timeout_s)

    def _admission_key(self, step: int) -> str:
        return admission_key(step, self._restores, self._skips_of(step))

    def _skips_of(self, step: int) -> int:
        """How often all ranks have skipped it, as far as the newest step given goes."""
        return self._skips[1] if self._skips[0] == step else 0

    def _break_off(self, generation: Generation, ticket: Ticket, reason: str) -> None:
        """Abort a step in the middle of whose staging this thread was interrupted."""
        if self._driver.read().current != generation:
            self._give_up(generation, ticket, reason)
            return
        self._driver.submit(
            Request(
                generation=generation,
                sequence=self._sequence,
                admission_key=self._admission_key(generation.step),
                ticket=ticket,
                slot=None,
                captured=None,
                copy_s=0.0,
                refusal=reason,
            )
        )

    def _give_up(self, generation: Generation, ticket: Ticket, reason: str) -> None:
        """The others took a step that this rank cannot take: abort it at once (P2)."""
        ticket.fail(reason)
        self._driver.keys.note(
            self._sequence, self._admission_key(generation.step), decision_key(generation)
        )
        try:
            value = abort_value(f"rank {self._job.rank}: {reason}")
            self._job.front.compare_set(decision_key(generation), value)
        except StoreError as error:
            log.warning("step %d: %s", generation.step, error)

    def _stage(self, generation: Generation, ticket: Ticket) -> Request:
        reach("save.stage")
        started_s = self._job.clock.now_s()
        slot, captured, refusal = None, None, ""
        try:
            slot, captured = self._copy(generation)
            sent_bytes = self._job.layout.redundancy.n * captured.nbytes
            ticket.limit_s = self._job.config.options.timeout_s + self._job.moving_timeout_s(
                sent_bytes
            )
            if captured.late_bytes:
                ticket.limit_s += self._job.moving_timeout_s(captured.late_bytes)
            else:
                ticket.advance("staged")
        # A user's state_dict may raise anything; all ranks hear it.
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
            if explains_itself(error):
                log.warning("step %d cannot be staged: %s", generation.step, error)
            else:
                log.warning("step %d cannot be staged", generation.step, exc_info=True)
        return Request(
            generation=generation,
            sequence=self._sequence,
            admission_key=self._admission_key(generation.step),
            ticket=ticket,
            slot=slot,
            captured=captured,
            copy_s=self._job.clock.now_s() - started_s,
            refusal=refusal,
        )

    def _copy(self, generation: Generation) -> tuple[Slot, Captured]:
        job = self._job
        header = ShardHeader(
            job=job.name,
            epoch=generation.epoch,
            step=generation.step,
            generation=generation.id,
            owner=job.rank,
            world=job.world,
        )
        slot = self._take_slot()
        try:
            try:
                captured = self._snapshot.begin_capture(slot.data, header)
            except NeedCapacity as need:
                # The state has grown (P8): only this slot, which is not base, makes room.
                self._snapshot.forget_buffers()
                job.arena.drop(slot)
                slot = job.arena.allocate(need.capacity_bytes, OWN, taken=True)
                captured = self._snapshot.begin_capture(slot.data, header)
            # Until the last late byte is in place nobody else uses it, whatever becomes of the step
            # (P22).
            slot.hold()
            captured.start(slot.let_go)
        except BaseException:
            slot.taken = False
            raise
        return slot, captured

    def _take_slot(self) -> Slot:
        """Taken until the save's outcome is known: a mend must not write where it is staged."""
        if self._job.arena.lost:
            raise ArenaError(self._job.arena.lost)
        slot = take_free_own_slot(self._job, self._driver.read(), 0)
        if slot is not None:
            return slot
        # What it replaces is unmapped only when no view of it is left.
        self._snapshot.forget_buffers()
        nbytes = self._snapshot.estimate_bytes(self._job.rank)
        return self._job.arena.allocate(nbytes, OWN, taken=True)
