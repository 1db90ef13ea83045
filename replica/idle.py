"""What the background thread does between two saves.

It sees whether the arena's files are still there, mends the base and scrubs idle slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from recovery.ledger import Ledger
from recovery.manifest import Generation, SlotRecord
from recovery.mend import DONE, FAILED, KNOWN, MendOutcome
from replica.arena import Slot
from replica.errors import ArenaError, StoreError
from replica.job import Job
from replica.mender import Mender
from replica.regrown import drop_surplus
from replica.request import Counts
from replica.runner import Runner
from replica.saver import Saver
from replica.scrub import Scrubber

log = logging.getLogger("planaria")


class Keeper(Protocol):
    """The driver, as seen from here: it keeps the ledger, and tells of what happened."""

    counts: Counts
    protection: int

    @property
    def emit(self) -> Callable[[dict[str, Any]], None]: ...

    def read(self) -> Ledger: ...
    def begin_mend(self, name: str, sequence: int) -> set[str] | None: ...
    def end_mend(self, protection: int | None, *, last: bool) -> Generation | None: ...
    def look(self) -> None: ...


class Idle:
    """One turn at a time, in the background thread, when nothing else is to be done."""

    def __init__(self, job: Job, saver: Saver, runner: Runner, keeper: Keeper) -> None:
        self._job, self._keeper = job, keeper
        self.mender = Mender(job, saver, runner, keeper.read, self._withdraw)
        self._scrubber = Scrubber(job.arena, job.config.options.scrub_bytes_per_s)

    def turn(self) -> None:
        """Mend the base if that is called for, else verify a little of it."""
        self.see_to_files()
        base = self._keeper.read().base
        if base is None or not self._job.layout.redundancy.n:
            return
        try:
            why = self.mender.wanted()
        except StoreError as error:
            log.info("rank %d could not look for a mend: %s", self._job.rank, error)
            why = ""
        if why:
            self._mend(base, why)
        else:
            self._scrub()

    def after_commit(self, sequence: int) -> None:
        """The save of that number is the base now: what came before needs no mend and no slot."""
        self.mender.foreign = False
        self.mender.agenda.after("", sequence=sequence)
        drop_surplus(self._job, self._keeper.read())
        self.see_to_files()

    def see_to_files(self) -> None:
        """What somebody removed from the arena is an erasure: nobody could adopt it any more."""
        arena, keeper, rank = self._job.arena, self._keeper, self._job.rank
        lost_before, before = arena.lost, keeper.protection
        gone = arena.removed()
        if arena.lost and not lost_before:
            log.error("rank %d: %s", rank, arena.lost)
        for slot in gone:
            record = self._let_go(slot)
            if record is not None:
                self._tell(record, f"was removed by somebody from {arena.path}")
        if keeper.protection < before:
            # However much of it was here, it is this one node that has lost it.
            keeper.protection = max(-1, before - 1)

    def _let_go(self, slot: Slot) -> SlotRecord | None:
        """Give a slot without files up, unless somebody fills it; what it held until now."""
        arena = self._job.arena
        with arena.choosing:
            record = slot.record
            if slot.facts.busy:
                return None
            try:
                if not arena.lost:
                    arena.drop(slot)
                elif record is not None:
                    slot.invalidate()
            except ArenaError as error:
                log.warning("rank %d: %s", self._job.rank, error)
            slot.record = None
            return record

    def _mend(self, base: Generation, why: str) -> None:
        """Mend the base, unless a save came in between."""
        mender, keeper, job = self.mender, self._keeper, self._job
        started_s = job.clock.now_s()
        published = keeper.begin_mend(mender.agenda.name, mender.agenda.sequence)
        if published is None:
            return
        outcome = MendOutcome(FAILED, -1, "it raised")
        try:
            outcome = mender.run(base, published)
        finally:
            mender.ended(outcome)
            known = outcome.state in KNOWN
            committed = job.arena.head.committed
            if outcome.state == DONE and (committed is None or committed < base):
                # Every rank holds it again under this epoch: as good as committed.
                job.arena.update_head(committed=base)
            protection = outcome.protection if known else None
            given_up = keeper.end_mend(protection, last=mender.agenda.is_last(outcome))
        keeper.counts.mended += outcome.state == DONE
        full = outcome.protection == job.layout.redundancy.survivable_nodes
        level = logging.INFO if full or not known else logging.WARNING
        after = f", {outcome.protection} more nodes may be lost" if known else ""
        text = "rank %d: mend of step %d, for %s, ended: %s%s%s"
        reason = f"; {outcome.reason}" if outcome.reason else ""
        log.log(level, text, job.rank, base.step, why, outcome.state, after, reason)
        if given_up is not None:
            text = (
                "rank %d: %s could not be protected as well as the older step %d in %d attempts; "
                "saves go on now, and until one of them is committed the older step is not there "
                "for losses that step %d does not survive: %s"
            )
            tried = (given_up.step, mender.agenda.attempt, base.step, outcome.reason)
            log.error(text, job.rank, base.describe(), *tried)
        keeper.emit(
            {
                "event": "mend",
                "step": base.step,
                "generation": base.id,
                "why": why,
                "outcome": outcome.state,
                "protection": protection,
                "reason": outcome.reason,
                "given_up_step": given_up.step if given_up else None,
                "sent_bytes": mender.sent_bytes,
                "regrown_bytes": mender.regrown_bytes,
                "seconds": {"total": job.clock.now_s() - started_s},
            }
        )

    def _scrub(self) -> None:
        ledger = self._keeper.read()
        found = self._scrubber.turn(self._job.clock.now_s(), (ledger.base, ledger.kept))
        if found is not None:
            self._withdraw(*found)

    def _withdraw(self, slot: Slot, record: SlotRecord) -> None:
        """A damaged slot is an erasure from now on."""
        slot.invalidate()
        self._tell(record, "does not verify any more")

    def _tell(self, record: SlotRecord, why: str) -> None:
        """Count and tell an erasure, and call for a mend."""
        keeper = self._keeper
        keeper.counts.damaged += 1
        keeper.protection = max(-1, keeper.protection - 1)
        part = "the whole shard" if record.fragment < 0 else f"fragment {record.fragment}"
        what = f"{part} of owner {record.owner} in {record.generation.describe()}"
        log.error("rank %d: %s %s and is withdrawn", self._job.rank, what, why)
        event = {"event": "scrub", "step": record.generation.step, "owner": record.owner}
        keeper.emit(event | {"fragment": record.fragment, "generation": record.generation.id})
        if not self._job.arena.lost:
            self.mender.agenda.call("a slot was damaged")
            keeper.look()
