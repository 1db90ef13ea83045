"""One incarnation of a job at one rank: what was agreed at its opening, and its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from erasure.digest import CHUNK_BYTES
from recovery.inventory import Report
from recovery.layout import Layout
from recovery.manifest import WHOLE, Generation, SlotRecord, payload_bytes
from recovery.session import RestoreContext
from recovery.topology import Topology
from replica.arena import Arena, ArenaView, Slot, left_over
from replica.clock import Clock
from replica.config import Config
from replica.encode import EncodePass
from replica.links import Links
from replica.runner import MOVING_BYTES_PER_S_MIN
from replica.store import Store
from replica.timed_store import TimedStore
from replica.transport import Bytes


def plain_memory(nbytes: int) -> Bytes:
    """uint8[nbytes] of this process's own."""
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Frozen; what changes (slots, channels, keys) lives in its members.

    ``store`` belongs to the background thread, ``front`` to the training thread, ``pairs`` to
    ``links``, which either may use; all under the nonce's prefix.
    """

    name: str
    config: Config
    clock: Clock
    rank: int
    epoch: int
    nonce: str
    layout: Layout
    arena: Arena
    held_root: bytes
    store: Store
    front: TimedStore
    pairs: TimedStore
    links: Links
    scratch: Callable[[int], Bytes] = plain_memory
    """Makes the memory, uint8[n], that a restore needs beside the slots."""

    @property
    def topology(self) -> Topology:
        return self.layout.topology

    @property
    def world(self) -> int:
        return self.layout.topology.world

    def left_over(self) -> list[ArenaView]:
        """Arenas of this node that no rank opens any more and that this one answers for."""
        node_id = self.arena.head.node_id
        return left_over(
            self.config.arena_dir,
            self.name,
            node_id,
            ranks=len(self.topology.ranks_by_node[node_id]),
            position=self.topology.position(self.rank),
        )

    def moving_timeout_s(self, nbytes: int) -> float:
        """Deadline of what moves at most ``nbytes``: the option's, and the time that bytes take."""
        return self.config.options.timeout_s + nbytes / MOVING_BYTES_PER_S_MIN

    def restore_context(self, report: Report, number: int) -> RestoreContext:
        """What a restore session of this rank starts from."""
        return RestoreContext(rank=self.rank, topology=self.topology, report=report, number=number)

    def record(
        self,
        *,
        generation: Generation,
        owner: int,
        fragment: int,
        shard_bytes: int,
        chunk_digests: bytes,
        shard_digest: bytes,
    ) -> SlotRecord:
        """A record of this job's code and world."""
        code = self.layout.redundancy.code
        return SlotRecord(
            job=self.name,
            generation=generation,
            owner=owner,
            world=self.world,
            k=code.k,
            m=code.m,
            fragment=fragment,
            shard_bytes=shard_bytes,
            length=payload_bytes(code, fragment, shard_bytes),
            chunk_bytes=CHUNK_BYTES,
            chunk_digests=chunk_digests,
            shard_digest=shard_digest,
            fence_epoch=self.epoch,
        )

    def write_own(
        self, slot: Slot, generation: Generation, shard_bytes: int, encode: EncodePass
    ) -> None:
        """Declare the own slot valid with the digests of the pass over it."""
        slot.write_record(
            self.record(
                generation=generation,
                owner=self.rank,
                fragment=WHOLE,
                shard_bytes=shard_bytes,
                chunk_digests=encode.chunk_digests,
                shard_digest=encode.shard_digest,
            )
        )
