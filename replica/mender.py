"""The drivers' half of mending the base (see ``recovery.mend``), in the background thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recovery.commit import Connect, Exchange, ExchangeResult, Settle
from recovery.inventory import Report, report_of
from recovery.ledger import Ledger
from recovery.manifest import Generation
from recovery.mend import (
    CALL_KEY,
    DONE,
    MendContext,
    MendOutcome,
    Regrow,
    decided_keys,
    mend_name,
    mend_session,
    over_key,
    parse_name,
    result_key,
)
from recovery.session import MoveResult
from replica.errors import ArenaError, StoreError
from replica.fault_points import reach
from replica.fetch import Fetcher
from replica.job import Job
from replica.regrown import Regrown, free_own_slot, own_copy
from replica.runner import Runner
from replica.saver import Saver, SaveWork

log = logging.getLogger("planaria")

ATTEMPTS_MAX = 8
"""So often the base is mended anew before the next save; each time after a longer pause."""


@dataclass
class Mender:
    """Knows whether and why the base has to be mended, and carries one mend out.

    ``due``: why this rank calls for a mend, or "".
    ``regrown``: what a restore got from elsewhere and is not in the arena yet.
    """

    job: Job
    saver: Saver
    runner: Runner
    read: Callable[[], Ledger]
    due: str = ""
    regrown: Regrown | None = None
    restores: int = 0
    sequence: int = 0
    attempt: int = 0
    sent_bytes: int = 0
    regrown_bytes: int = 0
    _not_before_s: float = 0.0
    _keys: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Name of the next mend: the same on all ranks."""
        return mend_name(self.restores, self.sequence, self.attempt)

    def after(self, why: str, *, restores: int | None = None, sequence: int | None = None) -> None:
        """A restore or a save has ended: names count from there, ``why`` says whether to mend."""
        self.restores = self.restores if restores is None else restores
        self.sequence = max(self.sequence, sequence or 0)
        self.due, self.attempt, self._not_before_s = why, 0, 0.0

    def call(self, why: str) -> None:
        """This rank wants the base mended."""
        self.due = self.due or why

    def wanted(self) -> str:
        """Why a mend is to begin now, here or elsewhere; "" if not. Raises StoreError."""
        if self._called():
            return "another rank called for it"
        if self.due and self.attempt < ATTEMPTS_MAX:
            return self.due if self.job.clock.now_s() >= self._not_before_s else ""
        return ""

    def _called(self) -> bool:
        """Whether a mend was called for that this rank has not been in; its name is ours then."""
        store = self.job.store
        if not store.check([CALL_KEY]):
            return False
        raw = store.get([CALL_KEY])[0]
        restores, sequence, attempt = parse_name(raw)
        ours = (self.restores, self.sequence, self.attempt)
        if restores != self.restores or (restores, sequence, attempt) < ours:
            return False
        if store.check([over_key(raw.decode())]):
            return False
        # A rank that missed a save counts from below.
        self.sequence, self.attempt = sequence, attempt
        return True

    def run(self, generation: Generation, published: set[str]) -> MendOutcome:
        """Mend ``generation``, the base, once."""
        job, name = self.job, self.name
        self.sent_bytes = self.regrown_bytes = 0
        self._place_regrown()
        reach("mend.report")
        try:
            if self.due:
                job.store.set(CALL_KEY, name.encode())
            published.update(decided_keys(name, job.layout, job.rank))
            job.links.tell_all_broken()
        except StoreError as error:
            return MendOutcome("failed", -1, str(error))
        context = MendContext(
            rank=job.rank,
            layout=job.layout,
            name=name,
            generation=generation,
            report=self._report(generation),
        )
        try:
            return self.runner.run(
                mend_session(context),
                self._handlers(generation, name),
                timeout_s=job.config.options.timeout_s / 2,
                per_wait=True,
                published=published,
            )
        finally:
            self.saver.end()

    def ended(self, outcome: MendOutcome) -> None:
        """Remember how it ended: the next attempt comes after a pause, or not at all."""
        self.attempt += 1
        if outcome.state == DONE:
            self.due = ""
            self._free_strays(outcome)
        else:
            pause_s = self.job.config.options.timeout_s * self.attempt
            self._not_before_s = self.job.clock.now_s() + pause_s

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

        def work_of(expected: int) -> SaveWork:
            own = own_copy(job, generation)
            shard_bytes = own.record.shard_bytes if own is not None and own.record else 0
            moving_s = job.moving_timeout_s(job.layout.redundancy.n * shard_bytes)
            return SaveWork(
                generation=generation,
                own=own,
                shard_bytes=shard_bytes,
                ledger=self.read,
                ended_key=result_key(name, group),
                expected=max(expected, len(job.layout.held_by(job.rank))),
                deadline_s=job.clock.now_s() + moving_s,
                mends=True,
            )

        def handle(action: Connect | Settle | Exchange) -> Any:
            # One work for all three: it begins with the first, Connect.
            if isinstance(action, Connect):
                works.append(work_of(0))
            work = works[-1]
            if isinstance(action, Settle):
                work.expected = max(work.expected, len(action.offers))
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
                slot = free_own_slot(job, self.read(), rebuild.kind.shard_bytes)
            except ArenaError as error:
                return f"no room for its own shard: {error}"
        fetcher = Fetcher(job, plan, job.moving_timeout_s(most), slot)
        try:
            shard, result = fetcher.run()
        except StoreError:
            raise
        except Exception as error:
            log.exception("rank %d: regrowing its shard", job.rank)
            fetcher.give_up()
            return f"{type(error).__name__}: {error}"
        if result != MoveResult():
            return f"its own shard could not be regrown: {result}"
        if shard is not None and slot is not None:
            regrown = Regrown(plan.generation, rebuild.kind, shard, fetcher.chunk_digests)
            regrown.keep_in(job, slot)
            self.regrown_bytes += shard.size
        return ""

    def _free_strays(self, outcome: MendOutcome) -> None:
        """What of the base no longer protects anything makes room for the next generation."""
        if outcome.repair is None:
            return
        needed, seen = outcome.repair.needed_at(self.job.rank), set()
        for _, slot in sorted(self.job.arena.slots.items()):
            record = slot.record
            if record is None or record.generation != outcome.repair.generation or slot.busy:
                continue
            place = (record.owner, record.fragment)
            if place not in needed or place in seen:
                slot.invalidate()
            seen.add(place)
