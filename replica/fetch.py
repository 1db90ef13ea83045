"""The drivers' half of moving bytes in a restore: serve what others need, fetch, verify, decode.

Nothing is believed: every fragment is compared with the chunk digests that its owner made, and the
whole shard with the shard digest of the frozen inventory, whether it was copied, received or
decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from erasure.codec import Codec
from erasure.digest import CHUNK_BYTES, DIGEST_BYTES, chunk_digests, root_digest
from recovery.errors import RecoveryError
from recovery.manifest import WHOLE, Generation, SlotRecord, chunk_count
from recovery.plan import Read, Rebuild, RestorePlan
from recovery.session import MoveResult
from replica.arena import ArenaView, Slot, read_arenas
from replica.fault_points import reach
from replica.job import Job
from replica.streams import BadBytes, Crew, receive_stream, send_stream
from replica.transport import Bytes, Channel


@dataclass
class _Target:
    """Where fragments land, by index. ``digests`` of the parts that were verified one by one."""

    shard: Bytes
    parts: dict[int, Bytes]
    digests: dict[int, bytes] = field(default_factory=dict)


class Fetcher:
    """Carries out one ``Move`` at this rank.

    ``received_bytes``: payload that came over the transport, from any attempt that ended well or
    not; ``local_bytes``: payload read from the memory of this node. ``target``: the slot
    where the shard is to go; None: scratch memory. ``chunk_digests``: those of the verified shard.
    """

    def __init__(
        self, job: Job, plan: RestorePlan, timeout_s: float, target: Slot | None = None
    ) -> None:
        self._job, self._plan, self._into = job, plan, target
        self.chunk_digests = b""
        self._deadline_s = job.clock.now_s() + timeout_s
        self._crew = Crew()
        self._open: dict[str, tuple[int, Read]] = {}
        self._damaged: set[Read] = set()
        self._peers: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.received_bytes = 0
        self.local_bytes = 0
        self.transfer_s = 0.0
        self.decode_s = 0.0

    def run(self) -> tuple[Bytes | None, MoveResult]:
        """Serve and fetch. This rank's verified shard, or None and what the vote has to know.

        The shard is uint8[S]: the target or, when it lies there, the own slot. A rank without
        reads only serves, and gets None.
        """
        job, clock = self._job, self._job.clock
        mine = self._plan.rebuilds[job.rank]
        started_s = clock.now_s()
        peers = self._plan.peers_of(job.rank)
        cut_off = job.links.ensure(peers, self._left_s())
        self._peers = peers
        for read in self._plan.reads_from(job.rank):
            if not read.local and read.to not in cut_off:
                self._start_serving(read)
        target = self._target(mine) if mine.reads else _Target(np.empty(0, np.uint8), {})
        bad: list[Read] = []
        silent = [r for r in mine.reads if not r.local and r.source in cut_off]
        for read in mine.reads:
            if read.local:
                bad += self._copy_local(read, target)
            elif read not in silent:
                self._start_fetching(read, target)
        reach("restore.transfer")
        for read in self._finish():
            (bad if read in self._damaged else silent).append(read)
        moved_s = clock.now_s()
        self.transfer_s = moved_s - started_s
        if bad or silent:
            return None, MoveResult(bad=tuple(sorted(set(bad))), silent=tuple(sorted(silent)))
        if not mine.reads:
            return None, MoveResult()
        wrong = self._decode(mine, target)
        self.decode_s = clock.now_s() - moved_s
        if wrong is not None:
            return None, wrong
        return target.shard, MoveResult()

    @property
    def generation(self) -> Generation:
        """What it fetches a part of."""
        return self._plan.generation

    def give_up(self) -> None:
        """After ``run`` raised: break off every pair, so that no peer waits for our bytes."""
        for peer in self._peers:
            self._job.links.break_off(peer)

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._job.clock.now_s())

    def _target(self, mine: Rebuild) -> _Target:
        code, size = mine.kind.code, mine.kind.shard_bytes
        only = mine.reads[0]
        here = only.fragment == WHOLE and only.source == self._job.rank
        # What a node of more ranks left is mapped read-only, so that is copied.
        found = self._in_arena(only) if here else None
        if found is not None:
            shard = found[1][:size]
        else:
            shard = self._job.scratch(size) if self._into is None else self._into.data[:size]
        parts = {i: shard[slice(*code.span(i, size))] for i in range(code.k)}
        for read in mine.reads:
            if read.fragment >= code.k:
                parts[read.fragment] = np.empty(read.length, np.uint8)
        return _Target(shard, parts)

    def _find(self, read: Read) -> tuple[SlotRecord, Bytes] | None:
        """Record and bytes of a read that this rank serves: from its arena, else a left one."""
        mine = self._in_arena(read)
        return mine or _seen(self._job.left_over(), self._plan.generation, read)

    def _in_arena(self, read: Read) -> tuple[SlotRecord, Bytes] | None:
        """Record and bytes of a read in this rank's own arena."""
        for slot in self._job.arena.slots.values():
            if slot.record is not None and _matches(slot.record, self._plan.generation, read):
                return slot.record, slot.data
        return None

    def _find_on_node(self, read: Read) -> tuple[SlotRecord, Bytes] | None:
        """Record and bytes of a read from any arena of this node; another rank's is read-only."""
        if read.source == self._job.rank:
            return self._find(read)
        node_id = self._job.arena.head.node_id
        views = read_arenas(self._job.config.arena_dir, self._job.name, node_id)
        # What the source answers for beside its own arena has another rank in its head.
        views.sort(key=lambda view: view.head is None or view.head.rank != read.source)
        return _seen(views, self._plan.generation, read)

    def _copy_local(self, read: Read, target: _Target) -> list[Read]:
        found = self._find_on_node(read)
        if found is None:
            return [read]
        record, data = found
        part = target.shard if read.fragment == WHOLE else target.parts[read.fragment]
        if not np.shares_memory(part, data):
            part[:] = data[: read.length]
        for index in _parts_of(read, record):
            digests = chunk_digests(target.parts[index])
            if digests != _digests_of(record, index):
                self._forget_own(read)
                return [read]
            target.digests[index] = digests
        self.local_bytes += read.length
        return []

    def _forget_own(self, read: Read) -> None:
        """Damaged bytes of our own arena are an erasure from now on."""
        for slot in self._job.arena.slots.values():
            if slot.record is not None and _matches(slot.record, self._plan.generation, read):
                slot.invalidate()

    def _start_serving(self, read: Read) -> None:
        found = self._find(read)
        channel = self._job.links.channel(read.to)
        name = f"serving fragment {read.fragment} of owner {read.owner} to rank {read.to}"
        self._open[name] = (read.to, read)

        def body() -> None:
            if found is None:
                raise RecoveryError("it is not in the arena any more")
            for index in _parts_of(read, found[0]):
                _serve_part(channel, found[0], index, found[1])

        self._crew.start(name, body, lambda: None)

    def _start_fetching(self, read: Read, target: _Target) -> None:
        channel = self._job.links.channel(read.source)
        name = f"fetching fragment {read.fragment} of owner {read.owner} from rank {read.source}"
        self._open[name] = (read.source, read)
        kind = self._plan.rebuilds[read.to].kind
        indices = range(kind.k) if read.fragment == WHOLE else (read.fragment,)

        def body() -> None:
            try:
                fetch()
            finally:
                if self._into is not None:
                    self._into.let_go()

        def fetch() -> None:
            for index in indices:
                try:
                    got = receive_stream(channel, target.parts[index], lambda: None)
                    if got.shard_digest.hex() != kind.shard_digest:
                        raise BadBytes("the sender names another shard digest than the inventory")
                except BadBytes:
                    self._damaged.add(read)
                    raise
                with self._lock:
                    target.digests[index] = got.chunk_digests
                    self.received_bytes += target.parts[index].size

        if self._into is not None:
            self._into.hold()
        self._crew.start(name, body, lambda: None)

    def _finish(self) -> list[Read]:
        """Wait for all streams, break off the pairs that failed; our reads that did not come."""
        self._crew.join(self._left_s)
        unfinished = self._crew.unfinished()
        bad = []
        for name in sorted(set(self._crew.failures) | unfinished):
            peer, read = self._open[name]
            self._job.links.break_off(peer)
            if read.to == self._job.rank:
                bad.append(read)
        return bad

    def _decode(self, mine: Rebuild, target: _Target) -> MoveResult | None:
        reach("restore.decode")
        code, size = mine.kind.code, mine.kind.shard_bytes
        missing = [i for i in range(code.k) if i not in target.digests]
        if missing:
            have = {i: target.parts[i] for i in target.digests}
            Codec(code).decode(have, {i: target.parts[i] for i in missing})
            for index in missing:
                target.digests[index] = chunk_digests(target.parts[index])
        digests = b"".join(target.digests[i] for i in range(code.k))
        if root_digest(digests, size).hex() == mine.kind.shard_digest:
            self.chunk_digests = digests
            return None
        if mine.reads[0].fragment == WHOLE:
            return MoveResult(bad=mine.reads)
        return MoveResult(wrong=mine.fragments)


def _seen(
    views: Iterable[ArenaView], generation: Generation, read: Read
) -> tuple[SlotRecord, Bytes] | None:
    for view in views:
        for slot in view.slots.values():
            if slot.record and _matches(slot.record, generation, read):
                return slot.record, slot.data
    return None


def _matches(record: SlotRecord, generation: Generation, read: Read) -> bool:
    return (
        record.generation == generation
        and record.owner == read.owner
        and record.fragment == read.fragment
        and record.length == read.length
    )


def _parts_of(read: Read, record: SlotRecord) -> range:
    if read.fragment == WHOLE:
        return range(record.k)
    return range(read.fragment, read.fragment + 1)


def _digests_of(record: SlotRecord, index: int) -> bytes:
    """The chunk digests of one fragment from the record of it, or of the whole shard."""
    if record.fragment != WHOLE:
        return record.chunk_digests
    facts = (record.shard_bytes, record.chunk_bytes)
    counts = [chunk_count(record.code, i, *facts) for i in range(record.k)]
    start = sum(counts[:index]) * DIGEST_BYTES
    return record.chunk_digests[start : start + counts[index] * DIGEST_BYTES]


def _serve_part(channel: Channel, record: SlotRecord, index: int, data: Bytes) -> None:
    start, stop = (0, record.length)
    if record.fragment == WHOLE:
        start, stop = record.code.span(index, record.shard_bytes)
    payload = data[start:stop]
    trailer = _digests_of(record, index) + record.shard_digest
    send_stream(
        channel,
        payload.size,
        lambda i: np.require(payload[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES], requirements="W"),
        lambda _: None,
        lambda: trailer,
    )
