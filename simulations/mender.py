"""Carries out one mend at a rank, as ``replica.mender`` does (see ``recovery.mend``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from recovery.actions import Await, Got, Publish, StoreLost
from recovery.agenda import MendAgenda
from recovery.commit import Connect, Exchange, ExchangeResult, Settle
from recovery.inventory import report_of
from recovery.manifest import Generation
from recovery.mend import (
    CALL_KEY,
    DONE,
    FAILED,
    MendContext,
    MendOutcome,
    Regrow,
    decided_keys,
    give_way,
    mend_session,
    over_key,
    result_key,
)
from recovery.repair import Repair
from recovery.session import MoveResult
from simulations.fetcher import Fetched, Fetcher, Regrown, own_copy, take_own_slot
from simulations.memory import JOB, ArenaFull, Slot
from simulations.runner import moving_timeout_s, run_session
from simulations.saver import Exchanging, verifies
from simulations.tasks import PeerLost, Present, Steps, StoreDown, WaitKeys

if TYPE_CHECKING:
    from simulations.process import Process


@dataclass
class Mender:
    """Carries out what the agenda has, one mend at a time."""

    process: Process
    agenda: MendAgenda = field(default_factory=MendAgenda)
    regrown: Regrown | None = None
    works: list[Exchanging] = field(default_factory=list)

    def wanted(self) -> Steps:
        """Why a mend is to begin now, here or elsewhere; "" if not."""
        called = yield from self._called()
        if called:
            self.agenda.join(called)
            return "another rank called for it"
        kept = self.process.ledger.kept is not None
        return self.agenda.wants(self.process.clock_s(), kept=kept)

    def give_way(self, why: str) -> Steps:
        """Whoever waits in a mend for this rank need not wait any longer."""
        process = self.process
        try:
            called = yield from self._called()
            if called:
                group = process.layout.group_of(process.rank)
                session = give_way(called, group, f"rank {process.rank} {why}")
                timeout_s = process.world.config.timeout_s
                yield from run_session(process, session, {}, timeout_s=timeout_s)
        except (StoreDown, StoreLost):
            return

    def _called(self) -> Steps:
        """The name of a mend that is under way and that this rank has not been in, or ""."""
        answer = yield WaitKeys(Await((CALL_KEY,), "a call", look=True), 0.0)
        called = self.agenda.missed(answer.values[CALL_KEY]) if isinstance(answer, Got) else ""
        over = called and (yield Present((over_key(called),)))
        return "" if over else called

    def run(
        self, generation: Generation, published: set[str], withdraw: Callable[[Slot], None]
    ) -> Steps:
        """Mend ``generation``, the base, once."""
        process, name = self.process, self.agenda.name
        self.works = []
        if self.regrown is not None:
            try:
                yield from self.regrown.place(process)
                self.regrown = None
            except ArenaFull:
                pass
        try:
            # A name that is over calls nobody, and must not stand in the way of a newer one.
            if self.agenda.due and not (yield Present((over_key(name),))):
                yield Publish(CALL_KEY, name.encode())
            published.update(decided_keys(name, process.layout, process.rank))
            yield from process.links.tell_all_broken()
        except StoreDown as error:
            return MendOutcome(FAILED, -1, str(error))
        records = [
            slot.record
            for slot in process.arena.slots.values()
            if slot.record is not None and slot.record.generation == generation
        ]
        context = MendContext(
            rank=process.rank,
            layout=process.layout,
            name=name,
            generation=generation,
            report=report_of(process.rank, JOB, records),
        )
        edges = {
            Connect: lambda action: self._connect(generation, name, action),
            Settle: self._settle,
            Exchange: self._exchange,
            Regrow: self._regrow,
        }
        outcome = yield from run_session(
            process,
            mend_session(context),
            edges,
            timeout_s=process.world.config.timeout_s / 2,
            per_wait=True,
            published=published,
        )
        for work in self.works:
            yield from work.end()
        if outcome.state == FAILED:
            self._doubt(outcome, withdraw)
        return outcome

    def ended(self, outcome: MendOutcome) -> None:
        """Remember how it ended: the next attempt comes after a pause, or not at all."""
        process = self.process
        self.agenda.ended(outcome, process.clock_s(), process.world.config.timeout_s)
        if outcome.state == DONE and outcome.repair is not None:
            self._free_strays(outcome.repair)

    def _doubt(self, outcome: MendOutcome, withdraw: Callable[[Slot], None]) -> None:
        """What this rank read or sent may be why it failed: withdraw what is damaged."""
        repair = outcome.repair
        if repair is None:
            return
        places = repair.touched_by(self.process.rank)
        for slot in self.process.arena.slots.values():
            sealed = slot.record
            if sealed is None or sealed.generation != repair.generation:
                continue
            if (sealed.owner, sealed.fragment) in places and not verifies(slot):
                withdraw(slot)

    def _connect(self, generation: Generation, name: str, action: Connect) -> Steps:
        process = self.process
        own = own_copy(process, generation)
        shard_bytes = own.record.shard_bytes if own is not None and own.record else 0
        moving_s = moving_timeout_s(process, process.layout.redundancy.n * shard_bytes)
        work = Exchanging(
            process=process,
            generation=generation,
            own=own,
            shard_bytes=shard_bytes,
            deadline_s=process.clock_s() + moving_s,
            expected=len(process.layout.held_by(process.rank)),
            over_key=result_key(name, process.layout.group_of(process.rank)),
            mends=True,
        )
        self.works.append(work)
        return (yield from work.connect(action))

    def _settle(self, action: Settle) -> Steps:
        work = self.works[-1]
        work.expected = max(work.expected, len(action.offers))
        coming = sum(offer.shard_bytes for offer in action.offers)
        limit_s = self.process.clock_s() + moving_timeout_s(self.process, coming)
        work.deadline_s = max(work.deadline_s, limit_s)
        return (yield from work.settle(action))

    def _exchange(self, action: Exchange) -> Steps:
        work = self.works[-1]
        if action.send and work.own is None:
            return ExchangeResult(b"", {}, ("its own shard is not in its arena",))
        return (yield from work.exchange(action))

    def _regrow(self, action: Regrow) -> Steps:
        process, plan = self.process, action.plan
        rebuild = plan.rebuilds[process.rank]
        most = max(plan.received_bytes(rank) for rank in range(process.group.size))
        slot = None
        if rebuild.reads:
            try:
                slot = take_own_slot(process, rebuild.kind.shard_bytes)
            except ArenaFull as error:
                return f"no room for its own shard: {error}"
        fetcher = Fetcher(process, plan, moving_timeout_s(process, most), slot)
        try:
            got: Fetched = yield from fetcher.run()
        except PeerLost as error:
            got = Fetched(None, MoveResult(error=str(error)))
        # What is still being received into it keeps it busy.
        if slot is not None:
            slot.taken = False
        if got.result != MoveResult():
            return f"its own shard could not be regrown: {got.result}"
        if got.shard is not None and slot is not None:
            regrown = Regrown(plan.generation, rebuild.kind, got.shard, got.chunk_digests)
            regrown.keep_in(process, slot)
        return ""

    def _free_strays(self, repair: Repair) -> None:
        """What of the base no longer protects anything makes room for the next generation."""
        arena = self.process.arena
        slots = arena.slots
        records = {n: s.record for n, s in slots.items() if s.record is not None and not s.holds}
        for number in repair.strays(self.process.rank, records):
            arena.invalidate(self.process, slots[number])
