"""A shard that a rank got back from elsewhere, and its way into the rank's own arena (P10)."""

from __future__ import annotations

from dataclasses import dataclass

from erasure.digest import CHUNK_BYTES
from recovery.inventory import ShardKind
from recovery.ledger import Ledger
from recovery.manifest import WHOLE, Generation
from recovery.plan import Rebuild
from recovery.slots import OWN, empty_own_slot, own_slot, surplus_slots
from replica.arena import Slot
from replica.job import Job
from replica.transport import Bytes


@dataclass(eq=False)
class Regrown:
    """The verified shard of this rank in ``generation``.

    ``shard``, uint8[S], is scratch memory, or the slot that it was received into. ``slot``: where
    it is kept; None: not in the arena yet.
    """

    generation: Generation
    kind: ShardKind
    shard: Bytes
    chunk_digests: bytes
    slot: Slot | None = None

    def keep_in(self, job: Job, slot: Slot) -> None:
        """Declare the slot valid that the shard was received into or copied to."""
        slot.write_record(
            job.record(
                generation=self.generation,
                owner=job.rank,
                fragment=WHOLE,
                shard_bytes=self.kind.shard_bytes,
                chunk_digests=self.chunk_digests,
                shard_digest=bytes.fromhex(self.kind.shard_digest),
            )
        )
        self.slot = slot

    def place(self, job: Job, ledger: Ledger) -> None:
        """Copy scratch memory into an own slot, one more than usual if none is free.

        Raises ArenaFull when there is no room for it.
        """
        if self.slot is not None or self.kind.code != job.layout.redundancy.code:
            return
        size = self.shard.size
        slot = take_own_slot(job, ledger, size)
        try:
            for start in range(0, size, CHUNK_BYTES):
                piece = slice(start, min(start + CHUNK_BYTES, size))
                slot.data[piece] = self.shard[piece]
            self.keep_in(job, slot)
        finally:
            slot.taken = False


def own_copy(job: Job, generation: Generation) -> Slot | None:
    """The slot of this rank's arena that has its whole shard in ``generation``."""
    for slot in job.arena.slots.values():
        record = slot.record
        wanted = (generation, job.rank, WHOLE)
        if record and (record.generation, record.owner, record.fragment) == wanted:
            return slot
    return None


def take_own_slot(job: Job, ledger: Ledger, need: int) -> Slot:
    """An own slot for ``need`` bytes, taken and marked invalid, made anew when none is free.

    Raises ArenaFull when there is no room for it.
    """
    slot = take_free_own_slot(job, ledger, need)
    return job.arena.allocate(need, OWN, taken=True) if slot is None else slot


def take_free_own_slot(job: Job, ledger: Ledger, need: int) -> Slot | None:
    """An own slot with room for ``need`` bytes, taken and marked invalid; None: none is free.

    A save is staged while the base is mended: what one of them has chosen is not the other's.
    """
    arena = job.arena
    with arena.choosing:
        take = own_slot([facts for facts in arena.facts() if facts.capacity >= need], ledger)
        if take.number is None:
            return None
        slot = arena.slots[take.number]
        slot.taken = True
    slot.invalidate()
    return slot


def drop_surplus(job: Job, ledger: Ledger) -> None:
    """After a commit: give back what a renumbering or a mend brought beyond the usual slots."""
    arena, expected = job.arena, len(job.layout.held_by(job.rank))
    # The next step may be staged by now: what it has taken is none of these.
    with arena.choosing:
        for number in surplus_slots(arena.facts(), ledger, expected):
            arena.drop(arena.slots[number])


def target_slot(job: Job, generation: Generation, rebuild: Rebuild) -> Slot | None:
    """An own slot for the shard that ``rebuild`` reads; None: it is here, or no slot is empty."""
    if not rebuild.reads or own_copy(job, generation) is not None:
        return None
    if rebuild.kind.code != job.layout.redundancy.code:
        return None
    number = empty_own_slot(job.arena.facts(), rebuild.kind.shard_bytes)
    return None if number is None else job.arena.slots[number]
