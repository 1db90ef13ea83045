"""The training thread: opening, restore, steps and the foreground half of every save.

As ``replica.checkpointer``, ``replica.restorer`` and ``replica.staging`` have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erasure.digest import digest
from recovery.actions import CompareSet, StoreLost
from recovery.admission import admission_key, admit_session
from recovery.agree import agree_session
from recovery.commit import abort_value, decision_key
from recovery.inventory import failures_of, report_of
from recovery.manifest import Generation, generation_id
from recovery.session import (
    Doubt,
    Load,
    Move,
    MoveResult,
    NoteFailure,
    RestoreContext,
    RestoreOutcome,
    restore_session,
)
from recovery.slots import OWN
from recovery.tree import dump, merge_texts
from simulations.background import Background, Request
from simulations.fetcher import (
    Fetched,
    Fetcher,
    Regrown,
    own_copy,
    take_free_own_slot,
    take_own_slot,
    target_slot,
)
from simulations.memory import JOB, ArenaFull, Slot
from simulations.opening import open_job
from simulations.runner import Edges, moving_timeout_s, run_session
from simulations.saver import verifies
from simulations.tasks import Meet, OpenFailed, PeerLost, Sleep, Steps, StoreDown, Task
from simulations.workload import advance, size_of

if TYPE_CHECKING:
    from simulations.process import Process

STEP_S = 0.25
BARRIER_S = 40.0
MEET_STEPS = 4
"""Even skewed ranks wait for each other every so many steps."""


class Trainer:
    """One rank's script."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.task: Task
        self._background: Background
        self._loaded: bytes | None = None
        self._regrown: Regrown | None = None
        self._sequence = self._restores = 0
        self._planned = False
        self._newest_step = -1

    def script(self) -> Steps:
        """The whole life of the process."""
        process = self.process
        self.task.phase = "open"
        yield from open_job(process)
        self._background = Background(process)
        self._background.task = process.start(self._background.loop(), "idle")
        self.task.phase = "restore"
        yield from self._restore()
        self.task.phase = "train"
        process.world.checker.training(process)
        config = process.world.config
        while True:
            self.task.phase = "train"
            pace = process.world.random.uniform(0.5, 1.5) if config.skewed else 1.0
            yield Sleep(STEP_S * pace)
            if not config.skewed or process.step % MEET_STEPS == 0:
                yield Meet(f"step/{process.step}", None, BARRIER_S)
            process.step += 1
            size = size_of(config, process.rank, process.step)
            process.state = advance(
                process.state,
                owner=process.rank,
                step=process.step,
                nonce=process.nonce,
                size=size,
            )
            if process.step % config.interval == 0 and not process.world.paused:
                self.task.phase = "stage"
                yield from self._save(process.step)

    def _restore(self) -> Steps:
        process, background = self.process, self._background
        timeout_s = process.world.config.timeout_s
        background.held = True
        if not (yield from background.stands_still("a restore begins", timeout_s)):
            raise OpenFailed("the background is busy before a restore")
        head = process.arena.head
        records = [s.record for s in process.arena.slots.values() if s.record is not None]
        report = report_of(
            process.rank,
            JOB,
            records,
            committed=head.committed,
            failures=failures_of(head.attempts),
        )
        context = RestoreContext(
            rank=process.rank,
            topology=process.layout.topology,
            report=report,
            number=self._restores,
        )
        self._restores += 1
        began_s = process.world.now_s
        yield from process.links.tell_all_broken()
        edges: Edges = {
            Move: self._move,
            Doubt: self._doubt,
            Load: self._load,
            NoteFailure: self._note,
        }
        outcome: RestoreOutcome = yield from run_session(
            process, restore_session(context), edges, timeout_s=timeout_s, per_wait=True
        )
        process.world.checker.took(process, "restore", began_s, calm=True)
        if outcome.world_saved not in (0, process.group.size):
            raise OpenFailed(outcome.reason)
        self._settle(outcome)

    def _settle(self, outcome: RestoreOutcome) -> None:
        process, background, generation = self.process, self._background, outcome.generation
        ledger = process.ledger.rebase(generation, outcome.kept, outcome.kept_protection)
        background.protection = outcome.protection
        background.mender.regrown = self._regrown
        why = "it was restored" if generation else ""
        background.mender.agenda.after(why, restores=self._restores)
        process.change(ledger)
        self._newest_step = -1
        process.world.checker.restored(process, outcome)
        if generation is not None:
            attempts = tuple(one for one in process.arena.head.attempts if one[0] != generation.id)
            process.arena.update_head(process, restored=generation, attempts=attempts)
            process.step = generation.step
        background.held = False
        background.look()

    def _move(self, action: Move) -> Steps:
        process, plan = self.process, action.plan
        process.world.checker.moved(process, action.attempt)
        most = max(plan.received_bytes(rank) for rank in range(process.group.size))
        rebuild = plan.rebuilds[process.rank]
        slot = target_slot(process, plan.generation, rebuild)
        fetcher = Fetcher(process, plan, moving_timeout_s(process, most), slot)
        try:
            got: Fetched = yield from fetcher.run()
        except PeerLost as error:
            return MoveResult(error=str(error))
        if got.shard is None:
            return got.result
        if own_copy(process, plan.generation) is None:
            self._regrown = Regrown(plan.generation, rebuild.kind, got.shard, got.chunk_digests)
            if slot is not None:
                self._regrown.keep_in(process, slot)
        self._loaded = got.shard
        return got.result

    def _doubt(self, action: Doubt) -> Steps:
        """Others could not verify these: withdraw what is damaged."""
        process = self.process
        yield Sleep(0.0)
        for _, slot in sorted(process.arena.slots.items()):
            sealed = slot.record
            if sealed is None or sealed.generation != action.generation:
                continue
            if (sealed.owner, sealed.fragment) in action.places and not verifies(slot):
                process.arena.invalidate(process, slot)

    def _load(self, _: Load) -> Steps:
        process = self.process
        yield Sleep(0.001)
        if process.node.load_errors:
            process.node.load_errors -= 1
            process.world.faults.effect("load-error", process.node.name)
            return "the script's own object raised"
        if self._loaded is None:
            return "nothing was prepared"
        process.state = self._loaded
        process.world.checker.loaded(process, self._loaded)
        return ""

    def _note(self, action: NoteFailure) -> Steps:
        """Count identical failures: after two the next restore steps back (P19)."""
        head = self.process.arena.head
        counts = {(gen, error): count for gen, error, count in head.attempts}
        key = (action.generation.id, digest(action.error.encode()).hex())
        counts[key] = counts.get(key, 0) + 1
        attempts = tuple((gen, error, count) for (gen, error), count in list(counts.items())[-16:])
        self.process.arena.update_head(self.process, attempts=attempts)
        yield Sleep(0.0)

    def _save(self, step: int) -> Steps:
        process, background = self.process, self._background
        timeout_s = process.world.config.timeout_s
        if not self._planned:
            session = agree_session(
                "planned/1", process.rank, process.group.size, dump([]), merge_texts
            )
            yield from run_session(process, session, {}, timeout_s=timeout_s)
            self._planned = True
        admit = admit_session(step, self._restores, self._sequence, process.ledger)
        key = admission_key(step, self._restores)
        try:
            admission = yield from run_session(process, admit, {}, timeout_s=timeout_s)
        except StoreLost:
            background.note_keys(self._sequence, key)
            return
        process.world.checker.admitted(process, step, admission.take)
        if not admission.take:
            background.note_keys(self._sequence, key)
            return
        self._sequence = admission.sequence
        sequence = (self._restores << 32) + admission.sequence
        identity = generation_id(JOB, process.nonce, step, sequence)
        generation = Generation(process.epoch, step, identity)
        if (yield from background.may_admit(timeout_s)):
            process.change(process.ledger.admit(generation))
            background.submit((yield from self._stage(generation, key)))
            return
        background.note_keys(self._sequence, key, decision_key(generation))
        reason = "the decision of the save before it could not be read"
        try:
            value = abort_value(f"rank {process.rank}: {reason}")
            yield CompareSet(decision_key(generation), value)
        except StoreDown:
            return

    def _stage(self, generation: Generation, key: str) -> Steps:
        process = self.process
        slot, refusal = None, ""
        try:
            slot = self._slot(len(process.state))
            yield Sleep(0.0)
            process.arena.write(process, slot, process.state)
            process.world.checker.staged(process, generation, process.state)
        except ArenaFull as error:
            slot, refusal = None, str(error)
        return Request(
            generation=generation,
            sequence=self._sequence,
            admission_key=key,
            slot=slot,
            shard_bytes=len(process.state),
            refusal=refusal,
        )

    def _slot(self, need: int) -> Slot:
        """An own slot with room for the shard, taken until the save's outcome is known."""
        process, arena = self.process, self.process.arena
        slot = take_free_own_slot(process, 0)
        if slot is None:
            return take_own_slot(process, need)
        if slot.capacity < need:
            # The state has grown (P8): only this slot, which is not base, makes room.
            arena.drop(process, slot)
            slot = arena.allocate(process, need, OWN)
            slot.taken = True
        return slot
