"""Scrubbing: what lies idle in the arena is read again and compared with its digests.

Memory rots, and a fragment may lie for hours between two saves. While the background thread has
nothing else to do it verifies the slots of the base, chunk by chunk, at a bounded rate, round and
round. A damaged slot becomes an erasure: its record is withdrawn, and the base is mended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from erasure.digest import CHUNK_BYTES, digest
from recovery.manifest import Generation, SlotRecord
from replica.arena import Arena, Slot
from replica.chunks import damaged_chunks, digested_chunks

TURN_BYTES_MAX = 16 * CHUNK_BYTES
"""Most bytes of one turn, so that a save that comes never waits long for it."""


@dataclass
class Scrubber:
    """Verifies an arena's slots in turns, from one thread.

    ``bytes_per_s``: the rate; 0: never. ``rounds``: how often every slot was seen through. A chunk
    is read at once, and what it is beyond the rate is waited for afterwards.
    """

    arena: Arena
    bytes_per_s: float
    rounds: int = 0
    verified_bytes: int = 0
    _place: tuple[int, int] = (-1, 0)
    """The slot that is being read and the next chunk of it."""
    _last_s: float | None = None
    _left: float = 0.0
    """Bytes that may be read now; below 0 after a chunk that was larger than that."""

    def turn(
        self, now_s: float, wanted: Collection[Generation | None]
    ) -> tuple[Slot, SlotRecord] | None:
        """Verify as many chunks as the time since the last turn allows, of ``wanted`` generations.

        A slot that turns out to be damaged is returned with its record, which stands as yet.
        """
        since_s = 1.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._left = min(self._left + since_s * self.bytes_per_s, TURN_BYTES_MAX)
        while self._left > 0:
            slot = self._next(wanted)
            record = slot.record if slot is not None else None
            if slot is None or record is None:
                return None
            number, chunk = self._place
            for index, (start, stop, expected) in enumerate(digested_chunks(record)):
                if index < chunk:
                    continue
                if self._left <= 0:
                    self._place = (number, index)
                    return None
                self._left -= stop - start
                self.verified_bytes += stop - start
                if digest(slot.data[start:stop]) != expected:
                    self._place = (number + 1, 0)
                    return slot, record
            self._place = (number + 1, 0)
        return None

    def _next(self, wanted: Collection[Generation | None]) -> Slot | None:
        """The slot at the place; past the last one a round is over, and this turn with it."""
        slots = [
            slot
            for number, slot in sorted(self.arena.slots.items())
            if slot.record is not None and slot.generation in wanted and not slot.busy
            if number >= self._place[0]
        ]
        if not slots:
            self.rounds += self._place[0] > 0
            self._place = (-1, 0)
            return None
        if slots[0].number != self._place[0]:
            self._place = (slots[0].number, 0)
        return slots[0]


def damaged_slots(
    arena: Arena, generation: Generation, places: Collection[tuple[int, int]]
) -> Iterator[tuple[Slot, SlotRecord]]:
    """The slots of (owner, fragment or WHOLE) ``places`` that do not verify, with their records."""
    for _, slot in sorted(arena.slots.items()):
        record = slot.record
        if record is None or record.generation != generation:
            continue
        if (record.owner, record.fragment) in places and damaged_chunks(record, slot.data):
            yield slot, record
