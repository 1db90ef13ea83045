"""The drivers' half of one restore: move bytes, check, load (see ``recovery.session``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from erasure.digest import digest
from erasure.errors import PlanariaError
from recovery.inventory import Report, failures_of, report_of
from recovery.plan import RestorePlan
from recovery.session import Doubt, Load, Move, MoveResult, NoteFailure
from replica.arena import Arena, ArenaView
from replica.errors import StoreError
from replica.fault_points import reach
from replica.fetch import Fetcher
from replica.job import Job
from replica.regrown import Regrown, own_copy, target_slot
from replica.runner import Handlers
from replica.scrub import damaged_slots
from replica.source import Prepared, StateSource
from replica.transport import Bytes

log = logging.getLogger("planaria")

_VARYING = re.compile(r"/\S+|\w*\d\w*|\b[0-9a-f]{8,}\b", re.IGNORECASE)
"""Paths, words with a digit in them (numbers, addresses, temporary names), hexadecimal runs."""


def masked(error: str) -> str:
    """The text of an error without what differs from one time to the next."""
    return _VARYING.sub("#", error)


class Restorer:
    """Carries out Move, Load and NoteFailure of one restore, in the training thread."""

    def __init__(self, job: Job, snapshot: StateSource) -> None:
        self._job, self._snapshot = job, snapshot
        self._prepared: Prepared | None = None
        self.load_error: Exception | None = None
        self.regrown: Regrown | None = None
        self.received_bytes = 0
        self.local_bytes = 0
        self.seconds = {"inventory": 0.0, "transfer": 0.0, "decode": 0.0, "load": 0.0}
        self._started_s = job.clock.now_s()
        self._tried: RestorePlan | None = None

    def report(self) -> Report:
        """What this rank's arena holds, and those that it answers for."""
        head = self._job.arena.head
        arenas: list[Arena | ArenaView] = [self._job.arena, *self._job.left_over()]
        records = [s.record for a in arenas for s in a.slots.values() if s.record is not None]
        return report_of(
            self._job.rank,
            self._job.name,
            records,
            committed=head.committed,
            failures=failures_of(head.attempts),
        )

    def handlers(self) -> Handlers:
        """The handlers of this restore."""
        return {
            Move: self._move,
            Doubt: self._doubt,
            Load: lambda _: self._load(),
            NoteFailure: self._note,
        }

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        started_s = self._job.clock.now_s()
        try:
            return work()
        finally:
            self.seconds[phase] += self._job.clock.now_s() - started_s

    def _move(self, action: Move) -> MoveResult:
        job, plan = self._job, action.plan
        if action.attempt == 0:
            self.seconds["inventory"] = job.clock.now_s() - self._started_s
        if self._tried is not None and self._tried.generation != plan.generation:
            log.warning(
                "rank %d: what is left does not give %s back, so %s is tried",
                job.rank,
                self._tried.generation.describe(),
                plan.generation.describe(),
            )
        self._tried = plan
        most = max(plan.received_bytes(rank) for rank in range(job.world))
        rebuild = plan.rebuilds[job.rank]
        slot = target_slot(job, plan.generation, rebuild)
        fetcher = Fetcher(job, plan, job.moving_timeout_s(most), slot)
        try:
            shard, result = fetcher.run()
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - no memory, say: all hear it before the vote
            fetcher.give_up()
            return self._failed(error)
        self.received_bytes += fetcher.received_bytes
        self.local_bytes += fetcher.local_bytes
        self.seconds["transfer"] += fetcher.transfer_s
        self.seconds["decode"] += fetcher.decode_s
        if shard is None:
            if result != MoveResult():  # else it only served
                said = result.describe(plan.generation)
                log.warning("rank %d: %s; all ranks try again without it", job.rank, said)
            return result
        if own_copy(job, plan.generation) is None:
            self.regrown = Regrown(plan.generation, rebuild.kind, shard, fetcher.chunk_digests)
            if slot is not None:
                self.regrown.keep_in(job, slot)
        try:
            self._prepared = self._timed("load", lambda: self._prepare(shard, plan.generation.id))
        except Exception as error:  # noqa: BLE001 - a user's object may raise anything
            return self._failed(error)
        return result

    def _doubt(self, action: Doubt) -> None:
        for slot, _ in damaged_slots(self._job.arena, action.generation, action.places):
            log.error("rank %d: slot %d is damaged and withdrawn", self._job.rank, slot.number)
            slot.invalidate()

    def _failed(self, error: Exception) -> MoveResult:
        self.load_error = error
        ours = isinstance(error, PlanariaError)
        return MoveResult(error=str(error) if ours else f"{type(error).__name__}: {error}")

    def _prepare(self, shard: Bytes, generation: str) -> Prepared:
        prepared = self._snapshot.prepare(shard)
        if (prepared.header.generation, prepared.header.owner) != (generation, self._job.rank):
            raise PlanariaError(
                f"the shard says that it is {prepared.header}, not owner {self._job.rank}'s"
            )
        return prepared

    def _load(self) -> str:
        reach("restore.load")
        try:
            if self._prepared is None:
                raise PlanariaError("nothing was prepared")
            self._timed("load", self._prepared.commit)
        except Exception as error:  # noqa: BLE001 - a user's method may raise anything; all hear it
            self.load_error = error
            return f"{type(error).__name__}: {error}"
        finally:
            self._prepared = None
        return ""

    def _note(self, action: NoteFailure) -> None:
        """Count identical failures: after two the next restore steps back (P19)."""
        cause = digest(masked(action.error).encode()).hex()
        counts = {(gen, error): count for gen, error, count in self._job.arena.head.attempts}
        key = (action.generation.id, cause)
        counts[key] = counts.get(key, 0) + 1
        attempts = tuple((gen, error, count) for (gen, error), count in list(counts.items())[-16:])
        self._job.arena.update_head(attempts=attempts)
