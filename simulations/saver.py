"""The edges of a save, as ``replica.saver`` has them: slots, bytes, records.

A mend uses the same pieces for its fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from erasure.code import Code
from erasure.codec import Codec
from erasure.digest import CHUNK_BYTES, digest, root_digest
from recovery.commit import Connect, Exchange, ExchangeResult, Incoming, Settle
from recovery.errors import RecoveryError
from recovery.layout import Fragment
from recovery.manifest import WHOLE, Generation, SlotRecord, payload_bytes
from recovery.slots import HELD, held_slot
from simulations.memory import JOB, ArenaFull, Slot
from simulations.network import Parcel, Work
from simulations.runner import Edges
from simulations.tasks import PeerLost, Present, Sleep, Steps, StoreDown, Until

if TYPE_CHECKING:
    from simulations.process import Process


@dataclass(frozen=True)
class Encoded:
    """One shard in fragments, with the digests of a pass over it."""

    parts: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    chunk_digests: bytes
    shard_digest: bytes


NOTHING = Encoded((), (), b"", b"")


@lru_cache
def codec_of(code: Code) -> Codec:
    """The arithmetic of ``code``."""
    return Codec(code)


def digest_of(part: bytes) -> bytes:
    """The chunk digests of a part, which is never longer than a chunk here."""
    return digest(part) if part else b""


def encode(code: Code, shard: bytes) -> Encoded:
    """Cut, make parity, digest."""
    data = [shard[slice(*code.span(index, len(shard)))] for index in range(code.k)]
    if code.k == 1:
        parts = [*data, *data * code.m]
    else:
        arrays = [np.frombuffer(part, np.uint8) for part in data]
        parity = [np.zeros(code.fragment_bytes(len(shard)), np.uint8) for _ in range(code.m)]
        codec_of(code).encode(arrays, parity)
        parts = [*data, *(array.tobytes() for array in parity)]
    digests = tuple(digest_of(part) for part in parts)
    chunk_digests = b"".join(digests[: code.k])
    return Encoded(tuple(parts), digests, chunk_digests, root_digest(chunk_digests, len(shard)))


def verifies(slot: Slot) -> bool:
    """Whether a slot's bytes are what its record's digests say."""
    sealed = slot.record
    if sealed is None:
        return False
    if sealed.fragment != WHOLE:
        return digest_of(slot.payload) == sealed.chunk_digests
    spans = [sealed.code.span(index, sealed.shard_bytes) for index in range(sealed.k)]
    parts = [slot.payload[start:stop] for start, stop in spans]
    return b"".join(map(digest_of, parts)) == sealed.chunk_digests


def record(
    process: Process,
    *,
    generation: Generation,
    owner: int,
    fragment: int,
    shard_bytes: int,
    chunk_digests: bytes,
    shard_digest: bytes,
) -> SlotRecord:
    """A record of this job's code and world."""
    code = process.layout.redundancy.code
    return SlotRecord(
        job=JOB,
        generation=generation,
        owner=owner,
        world=process.group.size,
        k=code.k,
        m=code.m,
        fragment=fragment,
        shard_bytes=shard_bytes,
        length=payload_bytes(code, fragment, shard_bytes),
        chunk_bytes=CHUNK_BYTES,
        chunk_digests=chunk_digests,
        shard_digest=shard_digest,
        fence_epoch=process.epoch,
    )


@dataclass
class Exchanging:
    """One generation's bytes at this rank: what was staged, what is sent and has come in.

    ``over_key``: when it is set, what this is for is over. ``mends``: the generation is there
    already, and parts of it are sent once more.
    """

    process: Process
    generation: Generation
    own: Slot | None
    shard_bytes: int
    deadline_s: float
    expected: int
    over_key: str
    mends: bool = False
    received: dict[Fragment, bytes] = field(default_factory=dict)
    open_peers: set[int] = field(default_factory=set)
    streams: dict[str, Work | None] = field(default_factory=dict)
    over: bool = False

    def edges(self) -> Edges:
        return {Connect: self.connect, Settle: self.settle, Exchange: self.exchange}

    def end(self) -> Steps:
        """After the outcome: break off every pair that still has a buffer posted (P21, P22)."""
        self.over = True
        for peer in sorted(self.open_peers):
            yield from self.process.links.break_off(peer)

    def connect(self, action: Connect) -> Steps:
        """Be connected to all peers."""
        process = self.process
        return (yield from process.links.ensure(action.peers, self.deadline_s, self.over_key))

    def settle(self, action: Settle) -> Steps:
        """Choose a slot for each offer, declare it empty, post its receive."""
        yield from self._await_receives()
        answers: dict[Fragment, str] = {}
        taken: set[int] = set()
        for offer in action.offers:
            yield Sleep(0.0)
            try:
                slot = self._slot_for(offer, taken)
                taken.add(slot.number)
                self.process.arena.invalidate(self.process, slot)
                self.receive(offer, slot)
            except (RecoveryError, ArenaFull, PeerLost) as error:
                answers[offer.fragment] = str(error)
            else:
                answers[offer.fragment] = ""
        return answers

    def exchange(self, action: Exchange) -> Steps:
        """Digest, encode, send; wait for what comes in; seal the own slot."""
        process, encoded = self.process, NOTHING
        yield Sleep(0.001)
        if self.own is not None and (action.send or not self.mends):
            shard = bytes(self.own.data[: self.shard_bytes])
            encoded = encode(process.layout.redundancy.code, shard)
        for fragment in action.send:
            self._send(fragment, encoded)
        failures = yield from self._join()
        if self.own is not None and not self.mends:
            sealed = record(
                process,
                generation=self.generation,
                owner=process.rank,
                fragment=WHOLE,
                shard_bytes=self.shard_bytes,
                chunk_digests=encoded.chunk_digests,
                shard_digest=encoded.shard_digest,
            )
            process.arena.write_record(process, self.own, sealed)
        if not failures:
            self.open_peers.clear()
        return ExchangeResult(encoded.shard_digest, dict(self.received), tuple(failures))

    def _join(self) -> Steps:
        """Wait for all streams; what went wrong, in words."""
        ending = yield from self._ending()
        failures = []
        for name, work in sorted(self.streams.items()):
            if work is None or not work.over:
                failures.append(f"{name}: still under way {ending}")
            elif work.error:
                failures.append(f"{name}: {work.error}")
        return failures

    def receive(self, offer: Incoming, slot: Slot) -> None:
        """Post the receive of a fragment into a slot, which is busy until that returns."""
        fragment, process = offer.fragment, self.process
        channel = process.links.channel(fragment.owner)
        name = f"receiving fragment {fragment.index} of rank {fragment.owner}"
        self.open_peers.add(fragment.owner)
        slot.holds += 1
        told: list[Parcel] = []

        def fill(parcel: Parcel) -> str:
            told.append(parcel)
            process.arena.write(process, slot, parcel.payload)
            if digest_of(bytes(slot.data[: len(parcel.payload)])) != parcel.chunk_digests:
                return "digest differs from what its sender says"
            if offer.shard_digest not in ("", parcel.shard_digest.hex()):
                return "these bytes are of another shard than the one that is mended"
            return ""

        def then(work: Work) -> None:
            slot.holds -= 1
            # A stream that outlived its generation must not revive the slot.
            if not work.error and not self.over:
                self._seal(offer, slot, told[0])

        self.streams[name] = channel.receive(process, fill, then)

    def _seal(self, offer: Incoming, slot: Slot, parcel: Parcel) -> None:
        sealed = record(
            self.process,
            generation=self.generation,
            owner=offer.fragment.owner,
            fragment=offer.fragment.index,
            shard_bytes=offer.shard_bytes,
            chunk_digests=parcel.chunk_digests,
            shard_digest=parcel.shard_digest,
        )
        self.process.arena.write_record(self.process, slot, sealed)
        self.received[offer.fragment] = parcel.shard_digest

    def _send(self, fragment: Fragment, encoded: Encoded) -> None:
        process, index = self.process, fragment.index
        name = f"sending fragment {index} to rank {fragment.holder}"
        self.open_peers.add(fragment.holder)
        self.streams[name] = None
        channel = process.links.channel(fragment.holder)
        parcel = Parcel(encoded.parts[index], encoded.digests[index], encoded.shard_digest)
        channel.send(process, parcel, self._sent(name))

    def _sent(self, name: str) -> Callable[[Work], None]:
        def then(work: Work) -> None:
            self.streams[name] = work

        return then

    def _await_receives(self) -> Steps:
        """What an aborted save left posted returns once both sides have given that pair up."""
        process = self.process
        box = process.world.store.subscribe(process, self.over_key)
        slots = process.arena.slots
        yield Until(
            lambda: bool(box) or not any(slot.holds for slot in slots.values()), self.deadline_s
        )

    def _slot_for(self, offer: Incoming, taken: set[int]) -> Slot:
        process = self.process
        arena, code = process.arena, process.layout.redundancy.code
        need = code.length(offer.fragment.index, offer.shard_bytes)
        take = held_slot(arena.facts(), process.ledger, need, taken=taken, expected=self.expected)
        if take.number is not None:
            return arena.slots[take.number]
        if take.drop is not None:
            arena.drop(process, arena.slots[take.drop])
        return arena.allocate(process, need, HELD)

    def _ending(self) -> Steps:
        """Wait until the streams have ended, the deadline passes or the save is aborted."""
        process = self.process
        box = process.world.store.subscribe(process, self.over_key)
        yield Until(lambda: self._ended() or bool(box), self.deadline_s)
        if self._ended():
            return "at the end"
        try:
            decided = yield Present((self.over_key,))
        except StoreDown:
            decided = ()
        return "when the save was aborted" if decided else "at the deadline"

    def _ended(self) -> bool:
        return all(work is not None and work.over for work in self.streams.values())
