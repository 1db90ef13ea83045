"""The edge that moves bytes in a restore or a mend, as ``replica.fetch`` and ``regrown`` have it.

Nothing is believed: every part is compared with the digests that its owner made, and the whole
shard with the digest of the inventory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from erasure.digest import DIGEST_BYTES, root_digest
from recovery.inventory import ShardKind
from recovery.manifest import WHOLE, Generation, SlotRecord, chunk_count
from recovery.plan import Read, Rebuild, RestorePlan
from recovery.session import MoveResult
from recovery.slots import OWN, empty_own_slot, own_slot
from simulations.memory import Slot
from simulations.network import Parcel, Work
from simulations.saver import codec_of, digest_of, record
from simulations.tasks import Sleep, Steps, Until

if TYPE_CHECKING:
    from simulations.process import Process


@dataclass
class Fetched:
    """What a move gave: the shard, or None, and what the vote has to know."""

    shard: bytes | None
    result: MoveResult
    chunk_digests: bytes = b""


@dataclass
class Fetcher:
    """Carries out one plan at this rank. ``into``: the slot where the shard is to go."""

    process: Process
    plan: RestorePlan
    timeout_s: float
    into: Slot | None = None
    _shard: bytearray = field(default_factory=bytearray)
    _parts: dict[int, bytes] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(default_factory=dict)
    _streams: dict[str, tuple[int, Read, list[Work]]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _damaged: set[Read] = field(default_factory=set)

    def run(self) -> Steps:
        """Serve and fetch."""
        process, mine = self.process, self.plan.rebuilds[self.process.rank]
        deadline_s = process.clock_s() + self.timeout_s
        peers = self.plan.peers_of(process.rank)
        cut_off = yield from process.links.ensure(peers, deadline_s, None)
        for read in self.plan.reads_from(process.rank):
            if not read.local and read.to not in cut_off:
                self._serve(read)
        self._shard = bytearray(mine.kind.shard_bytes)
        bad: list[Read] = []
        silent = [r for r in mine.reads if not r.local and r.source in cut_off]
        for read in mine.reads:
            if read.local:
                yield Sleep(0.0)
                bad += self._copy(read)
            elif read not in silent:
                self._fetch(read, mine.kind)
        yield Until(self._ended, deadline_s)
        for read in (yield from self._finish()):
            (bad if read in self._damaged else silent).append(read)
        if not mine.reads:
            return Fetched(None, MoveResult())
        if bad or silent:
            result = MoveResult(bad=tuple(sorted(set(bad))), silent=tuple(sorted(silent)))
            return Fetched(None, result)
        return self._decode(mine)

    def _serve(self, read: Read) -> None:
        process, name = self.process, f"serving {read}"
        channel, works = process.links.channel(read.to), list[Work]()
        self._streams[name] = (read.to, read, works)
        found = matching(process.arena.slots.values(), self.plan.generation, read)
        if found is None:
            self._counts[name] = 1
            works.append(Work(process, lambda _: None))
            works[0].end("it is not in the arena any more")
            return
        slot, sealed = found
        parts = parts_of(read, sealed)
        self._counts[name] = len(parts)
        for index in parts:
            start, stop = (0, sealed.length)
            if read.fragment == WHOLE:
                start, stop = sealed.code.span(index, sealed.shard_bytes)
            payload = bytes(slot.data[start:stop])
            parcel = Parcel(payload, digests_in(sealed, index), sealed.shard_digest, sealed)
            channel.send(process, parcel, works.append)

    def _fetch(self, read: Read, kind: ShardKind) -> None:
        process, name = self.process, f"fetching {read}"
        channel, works = process.links.channel(read.source), list[Work]()
        indices = list(range(kind.k) if read.fragment == WHOLE else (read.fragment,))
        self._streams[name] = (read.source, read, works)
        self._counts[name] = len(indices)
        if self.into is not None:
            self.into.holds += 1

        def done(work: Work) -> None:
            works.append(work)
            if work.bad:
                self._damaged.add(read)
            if not work.error and len(works) < len(indices):
                channel.receive(process, self._fill(indices[len(works)], kind), done)
            elif self.into is not None:
                self.into.holds -= 1

        channel.receive(process, self._fill(indices[0], kind), done)

    def _fill(self, index: int, kind: ShardKind) -> Callable[[Parcel], str]:
        def fill(parcel: Parcel) -> str:
            self._put(index, parcel.payload, kind)
            if digest_of(parcel.payload) != parcel.chunk_digests:
                return "digest differs from what its sender says"
            if parcel.shard_digest.hex() != kind.shard_digest:
                return "the sender names another shard digest than the inventory"
            self._digests[index] = parcel.chunk_digests
            return ""

        return fill

    def _put(self, index: int, payload: bytes, kind: ShardKind) -> None:
        self._parts[index] = payload
        if index >= kind.code.k:
            return
        start, stop = kind.code.span(index, kind.shard_bytes)
        self._shard[start:stop] = payload
        if self.into is not None:
            self.process.arena.write(self.process, self.into, payload, start)

    def _copy(self, read: Read) -> list[Read]:
        """Read from the memory of this node."""
        process = self.process
        arenas = sorted(
            process.node.arenas.items(), key=lambda item: (item[1].head.rank != read.source, item)
        )
        found = None
        for _, arena in arenas:
            found = found or matching(arena.slots.values(), self.plan.generation, read)
        if found is None:
            return [read]
        slot, sealed = found
        kind = self.plan.rebuilds[read.to].kind
        for index in parts_of(read, sealed):
            start, stop = (0, sealed.length)
            if read.fragment == WHOLE:
                start, stop = sealed.code.span(index, sealed.shard_bytes)
            payload = bytes(slot.data[start:stop])
            self._put(index, payload, kind)
            if digest_of(payload) != digests_in(sealed, index):
                mine = matching(process.arena.slots.values(), self.plan.generation, read)
                if mine is not None:
                    process.arena.invalidate(process, mine[0])
                return [read]
            self._digests[index] = digests_in(sealed, index)
        return []

    def _ended(self) -> bool:
        return not self._unfinished()

    def _unfinished(self) -> list[str]:
        """Streams that are neither done nor failed."""
        return [
            name
            for name, (_, _, works) in self._streams.items()
            if len(works) < self._counts[name] and not any(work.error for work in works)
        ]

    def _finish(self) -> Steps:
        """Break off the pairs that failed; our reads that did not come."""
        missing = []
        open_still = self._unfinished()
        for name, (peer, read, works) in sorted(self._streams.items()):
            if name in open_still or any(work.error for work in works):
                yield from self.process.links.break_off(peer)
                if read.to == self.process.rank:
                    missing.append(read)
        return missing

    def _decode(self, mine: Rebuild) -> Fetched:
        code, size = mine.kind.code, mine.kind.shard_bytes
        missing = [index for index in range(code.k) if index not in self._digests]
        if missing:
            have = {i: np.frombuffer(self._parts[i], np.uint8) for i in self._digests}
            want = {i: np.zeros(code.length(i, size), np.uint8) for i in missing}
            codec_of(code).decode(have, want)
            for index, array in want.items():
                self._put(index, array.tobytes(), mine.kind)
                self._digests[index] = digest_of(self._parts[index])
        digests = b"".join(self._digests[index] for index in range(code.k))
        if root_digest(digests, size).hex() == mine.kind.shard_digest:
            return Fetched(bytes(self._shard), MoveResult(), digests)
        if mine.reads[0].fragment == WHOLE:
            return Fetched(None, MoveResult(bad=mine.reads))
        return Fetched(None, MoveResult(wrong=mine.fragments))


@dataclass
class Regrown:
    """This rank's verified shard on its way into its own arena (P10)."""

    generation: Generation
    kind: ShardKind
    shard: bytes
    chunk_digests: bytes
    placed: bool = False

    def keep_in(self, process: Process, slot: Slot) -> None:
        """Declare the slot valid that the shard is in."""
        sealed = record(
            process,
            generation=self.generation,
            owner=process.rank,
            fragment=WHOLE,
            shard_bytes=self.kind.shard_bytes,
            chunk_digests=self.chunk_digests,
            shard_digest=bytes.fromhex(self.kind.shard_digest),
        )
        process.arena.write_record(process, slot, sealed)
        self.placed = True

    def place(self, process: Process) -> Steps:
        """Copy it into an own slot; ArenaFull when there is no room."""
        if self.placed or self.kind.code != process.layout.redundancy.code:
            return
        slot = take_own_slot(process, len(self.shard))
        yield Sleep(0.0)
        process.arena.write(process, slot, self.shard)
        yield Sleep(0.0)
        self.keep_in(process, slot)
        slot.taken = False


def own_copy(process: Process, generation: Generation) -> Slot | None:
    """The slot of this rank's arena that has its whole shard in ``generation``."""
    for slot in process.arena.slots.values():
        sealed = slot.record
        wanted = (generation, process.rank, WHOLE)
        if sealed and (sealed.generation, sealed.owner, sealed.fragment) == wanted:
            return slot
    return None


def take_own_slot(process: Process, need: int) -> Slot:
    """An own slot for ``need`` bytes, taken and marked invalid, made anew when none is free."""
    slot = take_free_own_slot(process, need)
    if slot is None:
        slot = process.arena.allocate(process, need, OWN)
        slot.taken = True
    return slot


def take_free_own_slot(process: Process, need: int) -> Slot | None:
    """An own slot with room for ``need`` bytes, taken and marked invalid; None: none is free."""
    arena = process.arena
    fitting = [facts for facts in arena.facts() if facts.capacity >= need]
    take = own_slot(fitting, process.ledger)
    if take.number is None:
        return None
    slot = arena.slots[take.number]
    slot.taken = True
    arena.invalidate(process, slot)
    return slot


def target_slot(process: Process, generation: Generation, rebuild: Rebuild) -> Slot | None:
    """An own slot for the shard that ``rebuild`` reads; None: it is here, or no slot is empty."""
    if not rebuild.reads or own_copy(process, generation) is not None:
        return None
    if rebuild.kind.code != process.layout.redundancy.code:
        return None
    number = empty_own_slot(process.arena.facts(), rebuild.kind.shard_bytes)
    return None if number is None else process.arena.slots[number]


def matching(
    slots: Iterable[Slot], generation: Generation, read: Read
) -> tuple[Slot, SlotRecord] | None:
    """The slot whose record says that it holds what ``read`` wants."""
    for slot in slots:
        sealed = slot.record
        if (
            sealed is not None
            and sealed.generation == generation
            and (sealed.owner, sealed.fragment) == (read.owner, read.fragment)
            and sealed.length == read.length
        ):
            return slot, sealed
    return None


def parts_of(read: Read, sealed: SlotRecord) -> range:
    """The parts of a shard that a read brings."""
    return range(sealed.k) if read.fragment == WHOLE else range(read.fragment, read.fragment + 1)


def digests_in(sealed: SlotRecord, index: int) -> bytes:
    """The chunk digests of one part, from the record of it or of the whole shard."""
    if sealed.fragment != WHOLE:
        return sealed.chunk_digests
    facts = (sealed.shard_bytes, sealed.chunk_bytes)
    counts = [chunk_count(sealed.code, part, *facts) for part in range(sealed.k)]
    start = sum(counts[:index]) * DIGEST_BYTES
    return sealed.chunk_digests[start : start + counts[index] * DIGEST_BYTES]
