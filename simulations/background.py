"""The background thread, as ``replica.driver`` and ``replica.idle`` have it.

The same effects in the same order: one save or mend after another, the ledger, the keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recovery.actions import StoreLost
from recovery.commit import (
    Prepared,
    SaveContext,
    SaveOutcome,
    decision_key,
    resolve,
    save_session,
)
from recovery.errors import RecoveryError
from recovery.ledger import COMMITTED, HELD, STAGED
from recovery.manifest import Generation
from recovery.mend import DONE, KNOWN, MendOutcome, give_way
from recovery.slots import surplus_slots
from simulations.memory import Slot
from simulations.mender import Mender
from simulations.runner import moving_timeout_s, run_session
from simulations.saver import Exchanging, verifies
from simulations.tasks import Delete, PeerLost, Sleep, Steps, StoreDown, Task, Until

if TYPE_CHECKING:
    from simulations.process import Process

IDLE_S = 0.5
RETRY_S = 0.5
LOOK = "look"


@dataclass(frozen=True)
class Request:
    """A staged generation, or with ``refusal`` one that this rank could not stage and aborts."""

    generation: Generation
    sequence: int
    admission_key: str
    slot: Slot | None
    shard_bytes: int
    refusal: str = ""


class Background:
    """What the training thread shares with it: the queue, ``held``, the mend under way."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.task: Task
        self.queue: deque[Request | str] = deque()
        self.held = False
        self.mending = ""
        self.protection = -1
        self.mender = Mender(process)
        self._scrubbed = -1

    def loop(self) -> Steps:
        """Run for ever."""
        process = self.process
        while True:
            self.task.phase = "idle"
            yield Until(lambda: bool(self.queue), process.clock_s() + IDLE_S)
            request = self.queue.popleft() if self.queue else LOOK
            if isinstance(request, Request):
                self.task.phase = "save"
                yield from self._save(request)
            elif not self.held:
                yield from self._turn()

    def submit(self, request: Request) -> None:
        """Hand a generation over; its slot belongs to the background until the ledger frees it."""
        self.note_keys(request.sequence, request.admission_key, decision_key(request.generation))
        self.queue.append(request)
        self.process.notify()

    def look(self) -> None:
        self.queue.append(LOOK)
        self.process.notify()

    def note_keys(self, sequence: int, *decided: str) -> None:
        """Decisions and admissions are removed by the root."""
        keys = self.process.keys.open(sequence)
        if self.process.rank == 0:
            keys.update(decided)

    def may_admit(self, timeout_s: float) -> Steps:
        """Wait until the decision before has been read; whether a generation may be begun."""
        process = self.process
        yield Until(lambda: process.ledger.may_admit, process.clock_s() + timeout_s)
        return process.ledger.may_admit

    def stands_still(self, why: str, timeout_s: float) -> Steps:
        """Wait until nothing writes to the arena; a mend gives way. Whether it is so."""
        process, told = self.process, ""
        deadline_s = process.clock_s() + timeout_s
        while True:
            known = ("", told)
            yield Until(lambda k=known: process.ledger.idle or self.mending not in k, deadline_s)  # type: ignore[misc]
            if process.ledger.idle:
                return True
            if self.mending in known:
                return False
            told = self.mending
            session = give_way(told, process.layout.group_of(process.rank), why)
            try:
                timeout = process.world.config.timeout_s
                yield from run_session(process, session, {}, timeout_s=timeout)
            except StoreLost:
                continue

    def _save(self, request: Request) -> Steps:
        process = self.process
        context = SaveContext(
            rank=process.rank,
            layout=process.layout,
            generation=request.generation,
            base=process.ledger.base,
            shard_bytes=request.shard_bytes,
            incarnation=process.arena.head.incarnation,
            held_root=process.held_root,
        )
        began_s, began_down = process.world.now_s, process.world.store.failed_requests
        if request.slot is None:
            outcome = SaveOutcome(HELD, request.refusal)
        else:
            process.change(process.ledger.apply(STAGED))
            yield from self.mender.give_way("has a save to do")
            outcome = yield from self._protect(request, request.slot, context)
        reason = outcome.reason
        while outcome.state == HELD:
            session = resolve(context, reason)
            try:
                outcome = yield from run_session(process, session, {}, timeout_s=RETRY_S)
            except StoreLost as lost:
                outcome = SaveOutcome(HELD, str(lost))
                yield Sleep(RETRY_S)
        calm = process.world.store.failed_requests == began_down
        process.world.checker.took(process, "save", began_s, calm=calm)
        if request.slot is not None:
            request.slot.taken = False
        yield from self._finish(request, outcome)

    def _protect(self, request: Request, slot: Slot, context: SaveContext) -> Steps:
        process = self.process
        timeout_s = moving_timeout_s(process, process.layout.redundancy.n * request.shard_bytes)
        work = Exchanging(
            process=process,
            generation=request.generation,
            own=slot,
            shard_bytes=request.shard_bytes,
            deadline_s=process.clock_s() + timeout_s,
            expected=len(process.layout.held_by(process.rank)),
            over_key=decision_key(request.generation),
        )

        def prepared(_: Prepared) -> Steps:
            yield Sleep(0.0)
            process.change(process.ledger.apply(HELD))

        published = process.keys.open(request.sequence)
        try:
            yield from process.links.tell_all_broken()
            outcome = yield from run_session(
                process,
                save_session(context),
                {**work.edges(), Prepared: prepared},
                timeout_s=timeout_s,
                published=published,
            )
        except (RecoveryError, StoreDown, PeerLost) as error:
            outcome = SaveOutcome(HELD, str(error))
        yield from work.end()
        return outcome

    def _finish(self, request: Request, outcome: SaveOutcome) -> Steps:
        """Obey the decision: head, ledger, slots, keys."""
        process = self.process
        process.world.checker.obeyed(process, request.generation, outcome.state)
        if outcome.state == COMMITTED:
            process.arena.update_head(process, committed=request.generation)
            yield Sleep(0.0)
        process.change(process.ledger.apply(outcome.state))
        if outcome.state != COMMITTED:
            self.mender.agenda.after("a save was aborted", sequence=request.sequence)
            self.look()
            return
        self.protection = process.layout.redundancy.survivable_nodes
        self.mender.agenda.after("", sequence=request.sequence)
        expected = len(process.layout.held_by(process.rank))
        for number in surplus_slots(process.arena.facts(), process.ledger, expected):
            process.arena.drop(process, process.arena.slots[number])
        process.world.checker.trimmed(process, expected)
        keys = process.keys.expired(request.sequence)
        if keys:
            try:
                yield Delete(tuple(keys))
            except StoreDown:
                return

    def _turn(self) -> Steps:
        """Mend the base if that is called for, else verify a little of it."""
        process = self.process
        base = process.ledger.base
        if base is None or not process.layout.redundancy.n:
            return
        try:
            why = yield from self.mender.wanted()
        except StoreDown:
            why = ""
        if not why:
            yield from self._scrub()
        elif process.ledger.idle and not self.held:
            yield from self._mend(base)

    def _mend(self, base: Generation) -> Steps:
        process, mender = self.process, self.mender
        published = process.keys.open(mender.agenda.sequence)
        self.task.phase = "mend"
        process.change(process.ledger.mend())
        self.mending = process.mend_name = mender.agenda.name
        process.world.checker.mends.began(f"{process.nonce}/{mender.agenda.name}")
        process.notify()
        began_s, began_down = process.world.now_s, process.world.store.failed_requests
        outcome: MendOutcome = yield from mender.run(base, published, self._withdraw)
        calm = process.world.store.failed_requests == began_down
        process.world.checker.took(process, "mend", began_s, calm=calm)
        mender.ended(outcome)
        known = outcome.state in KNOWN
        committed = process.arena.head.committed
        if outcome.state == DONE and (committed is None or committed < base):
            process.arena.update_head(process, committed=base)
            yield Sleep(0.0)
        process.world.checker.mends.ended(process, base, outcome)
        protection = outcome.protection if known else -1
        self.protection = protection if known else self.protection
        self.mending = ""
        ledger = process.ledger.mended(protection)
        if mender.agenda.is_last(outcome) and ledger.kept is not None:
            process.world.checker.mends.gave_up(process, ledger.kept)
            ledger = ledger.give_up_kept()
        process.change(ledger)

    def _scrub(self) -> Steps:
        """Verify one slot of what has to be kept; a damaged one becomes an erasure."""
        process, ledger = self.process, self.process.ledger
        wanted = [
            slot
            for _, slot in sorted(process.arena.slots.items())
            if slot.record is not None
            and slot.record.generation in (ledger.base, ledger.kept)
            and not slot.holds
        ]
        self.task.phase = "scrub"
        yield Sleep(0.0)
        for slot in wanted:
            if slot.record is None or verifies(slot):
                continue
            self._withdraw(slot)
            return

    def _withdraw(self, slot: Slot) -> None:
        """A damaged slot is an erasure from now on."""
        process = self.process
        process.arena.invalidate(process, slot)
        process.world.checker.mends.scrubbed(process)
        self.protection = max(-1, self.protection - 1)
        self.mender.agenda.call("a slot was damaged")
        self.look()
