"""The drivers' half of mending the base (see ``recovery.mend``), in the background thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recovery.actions import StoreLost
from recovery.agenda import MendAgenda
from recovery.commit import Connect, Exchange, ExchangeResult, Settle
from recovery.errors import RecoveryError
from recovery.inventory import Report, report_of
from recovery.ledger import Ledger
from recovery.manifest import Generation, SlotRecord
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
from recovery.plan import Rebuild, RestorePlan
from recovery.repair import Repair
from recovery.session import MoveResult
from replica.arena import Slot
from replica.errors import ArenaError, StoreError
from replica.fault_points import reach
from replica.fetch import Fetcher
from replica.job import Job
from replica.regrown import Regrown, own_copy, take_own_slot
from replica.runner import Runner
from replica.saver import Saver, SaveWork
from replica.scrub import damaged_slots
from replica.store import Store

log = logging.getLogger("planaria")


@dataclass
class Mender:
    """Carries out what the agenda has, one mend at a time.

    ``withdraw``: counts and tells a damaged slot, which is an erasure from then on.
    ``regrown``: what a restore got from elsewhere and is not in the arena yet.
    ``foreign``: the base was saved with another redundancy; parts by this one beside it would be a
    second kind of one generation.
    """

    job: Job
    saver: Saver
    runner: Runner
    read: Callable[[], Ledger]
    withdraw: Callable[[Slot, SlotRecord], None]
    agenda: MendAgenda = field(default_factory=MendAgenda)
    regrown: Regrown | None = None
    foreign: bool = False
    sent_bytes: int = 0
    regrown_bytes: int = 0

    def take_over(self, plan: RestorePlan | None, regrown: Regrown | None) -> None:
        """What was restored, by ``plan``, is the base now."""
        self.regrown, code = regrown, self.job.layout.redundancy.code
        self.foreign = plan is not None and any(r.kind.code != code for r in plan.rebuilds)
        if self.foreign and self.job.rank == 0:
            text = "%s was saved with another redundancy and stays as it is until the next commit"
            log.warning(text, plan.generation.describe() if plan else "")

    def wanted(self) -> str:
        """Why a mend is to begin now, here or elsewhere; "" if not. Raises StoreError."""
        if self.foreign:
            return ""
        called = self._called(self.job.store)
        if called:
            self.agenda.join(called)
            return "another rank called for it"
        return self.agenda.wants(self.job.clock.now_s(), kept=self.read().kept is not None)

    def give_way(self, store: Store, why: str, name: str = "") -> None:
        """End the mend ``name``, or the one that others are in, because this rank ``why``.

        What comes matters more, or makes it needless; nobody need wait for this rank in it.
        """
        job, group = self.job, self.job.layout.group_of(self.job.rank)
        try:
            name = name or self._called(store)
            if name:
                session = give_way(name, group, f"rank {job.rank} {why}")
                Runner(store, job.clock).run(session, {}, timeout_s=job.config.options.timeout_s)
        except (StoreError, StoreLost) as error:
            log.warning("rank %d: a mend was not told that this rank %s: %s", job.rank, why, error)

    def _called(self, store: Store) -> str:
        """The name of a mend that is under way and that this rank has not been in, or ""."""
        if not self.job.layout.redundancy.n or not store.check([CALL_KEY]):
            return ""
        try:
            called = self.agenda.missed(store.get([CALL_KEY])[0])
        except RecoveryError as error:
            log.warning("rank %d: nobody can be in this mend: %s", self.job.rank, error)
            return ""
        return "" if not called or store.check([over_key(called)]) else called

    def run(self, generation: Generation, published: set[str]) -> MendOutcome:
        """Mend ``generation``, the base, once."""
        job, name = self.job, self.agenda.name
        self.sent_bytes = self.regrown_bytes = 0
        self._place_regrown()
        reach("mend.report")
        try:
            # A name that is over calls nobody, and must not stand in the way of a newer one.
            if self.agenda.due and not job.store.check([over_key(name)]):
                job.store.set(CALL_KEY, name.encode())
            published.update(decided_keys(name, job.layout, job.rank))
            job.links.tell_all_broken()
        except StoreError as error:
            return MendOutcome(FAILED, -1, str(error))
        context = MendContext(
            rank=job.rank,
            layout=job.layout,
            name=name,
            generation=generation,
            report=self._report(generation),
        )
        try:
            outcome = self.runner.run(
                mend_session(context),
                self._handlers(generation, name),
                timeout_s=job.config.options.timeout_s / 2,
                per_wait=True,
                published=published,
            )
        finally:
            self.saver.end()
        if outcome.state == FAILED:
            self._doubt(outcome)
        return outcome

    def ended(self, outcome: MendOutcome) -> None:
        """Remember how it ended: the next attempt comes after a pause, or not at all."""
        self.agenda.ended(outcome, self.job.clock.now_s(), self.job.config.options.timeout_s)
        if outcome.state == DONE and outcome.repair is not None:
            self._free_strays(outcome.repair)

    def _doubt(self, outcome: MendOutcome) -> None:
        """What this rank read or sent may be why it failed: look, and withdraw what is damaged."""
        repair = outcome.repair
        if repair is not None:
            places = repair.touched_by(self.job.rank)
            for found in damaged_slots(self.job.arena, repair.generation, places):
                self.withdraw(*found)

    def _place_regrown(self) -> None:
        if self.regrown is None:
            return
        try:
            self.regrown.place(self.job, self.read())
        except ArenaError as error:
            log.warning("rank %d: no room for its own restored shard: %s", self.job.rank, error)
        else:
            self.regrown = None

    def _report(self, generation: Generation) -> Report:
        records = [
            slot.record
            for slot in self.job.arena.slots.values()
            if slot.record is not None and slot.record.generation == generation
        ]
        return report_of(self.job.rank, self.job.name, records)

    def _handlers(self, generation: Generation, name: str) -> dict[type, Callable[[Any], Any]]:
        job = self.job
        group = job.layout.group_of(job.rank)
        works: list[SaveWork] = []

        def new_work() -> SaveWork:
            own = own_copy(job, generation)
            shard_bytes = own.record.shard_bytes if own is not None and own.record else 0
            moving_s = job.moving_timeout_s(job.layout.redundancy.n * shard_bytes)
            return SaveWork(
                generation=generation,
                own=own,
                shard_bytes=shard_bytes,
                ledger=self.read,
                ended_key=result_key(name, group),
                expected=len(job.layout.held_by(job.rank)),
                deadline_s=job.clock.now_s() + moving_s,
                mends=True,
            )

        def handle(action: Connect | Settle | Exchange) -> Any:
            # One work for all three: it begins with the first, Connect.
            if isinstance(action, Connect):
                works.append(new_work())
            work = works[-1]
            if isinstance(action, Settle):
                work.expected = max(work.expected, len(action.offers))
                coming = sum(offer.shard_bytes for offer in action.offers)
                limit_s = job.clock.now_s() + job.moving_timeout_s(coming)
                work.deadline_s = max(work.deadline_s, limit_s)
            if isinstance(action, Exchange):
                reach("mend.transfer")
                if action.send and work.own is None:
                    return ExchangeResult(b"", {}, ("its own shard is not in its arena",))
            answer = self.saver.handlers(work)[type(action)](action)
            self.sent_bytes = work.sent_bytes
            return answer

        return {Connect: handle, Settle: handle, Exchange: handle, Regrow: self._regrow}

    def _regrow(self, action: Regrow) -> str:
        job, plan = self.job, action.plan
        rebuild = plan.rebuilds[job.rank]
        most = max(plan.received_bytes(rank) for rank in range(job.world))
        slot = None
        if rebuild.reads:
            try:
                slot = take_own_slot(job, self.read(), rebuild.kind.shard_bytes)
            except ArenaError as error:
                return f"no room for its own shard: {error}"
        fetcher = Fetcher(job, plan, job.moving_timeout_s(most), slot)
        try:
            return self._fetch(fetcher, rebuild, slot)
        except StoreError:
            raise
        except Exception as error:
            log.exception("rank %d: regrowing its shard", job.rank)
            fetcher.give_up()
            return f"{type(error).__name__}: {error}"
        finally:
            # What is still being received into it keeps it busy.
            if slot is not None:
                slot.taken = False

    def _fetch(self, fetcher: Fetcher, rebuild: Rebuild, slot: Slot | None) -> str:
        shard, result = fetcher.run()
        if result != MoveResult():
            return f"its own shard could not be regrown: {result.describe(fetcher.generation)}"
        if shard is not None and slot is not None:
            regrown = Regrown(fetcher.generation, rebuild.kind, shard, fetcher.chunk_digests)
            regrown.keep_in(self.job, slot)
            self.regrown_bytes += shard.size
        return ""

    def _free_strays(self, repair: Repair) -> None:
        """What of the base no longer protects anything makes room for the next generation."""
        slots = self.job.arena.slots
        records = {n: s.record for n, s in slots.items() if s.record is not None and not s.busy}
        for number in repair.strays(self.job.rank, records):
            slots[number].invalidate()
