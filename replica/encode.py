"""One pass over a staged shard: each block is digested and encoded in cache, then handed out.

Data fragments are sent straight from the slot; parity fragments live only in a ring of a few
blocks, so encoding needs no memory that grows with the shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import numpy as np

from erasure.code import Code
from erasure.codec import Codec
from erasure.digest import CHUNK_BYTES, digest, root_digest
from replica.errors import PeerError
from replica.fault_points import reach
from replica.streams import IN_FLIGHT, chunks_of
from replica.transport import Bytes

RING_BLOCKS = IN_FLIGHT + 1


class ParityRing:
    """uint8[RING_BLOCKS, m, CHUNK_BYTES], allocated and touched once and reused by every save.

    With k = 1 every fragment is the shard itself, and nothing is needed.
    """

    def __init__(self, code: Code) -> None:
        rows = code.m if code.k > 1 else 0
        self.blocks = np.zeros((RING_BLOCKS, rows, CHUNK_BYTES), np.uint8)
        self.codec = Codec(code)


class EncodePass:
    """Digests and parity of one shard. ``run`` makes them; senders ask for blocks and trailers."""

    def __init__(
        self,
        code: Code,
        shard: Bytes,
        ring: ParityRing,
        sent: Collection[int],
        now_s: Callable[[], float],
    ) -> None:
        """``shard``: uint8[S], unchanged until all have left. ``sent``: which fragments go."""
        self._code, self._shard, self._ring, self._now_s = code, shard, ring, now_s
        self._length = code.fragment_bytes(shard.size)
        self._digests: list[list[bytes]] = [[] for _ in range(code.n)]
        self._sent = {index: 0 for index in sent if index >= code.k > 1}
        self._encodes = bool(self._sent)
        self._produced = 0
        self._failed = False
        self._changed = threading.Condition()
        self.deadline_s = 0.0
        self.shard_digest = b""
        self.chunk_digests = b""

    def run(self) -> None:
        """Digest and encode everything. PeerError when senders fail or the deadline passes."""
        reach("save.encode")
        for index in range(chunks_of(self._length)):
            self._digest_data(index)
            if self._encodes:
                self._encode(index)
            with self._changed:
                self._produced = index + 1
                self._changed.notify_all()
        self.chunk_digests = b"".join(b"".join(self._digests[i]) for i in range(self._code.k))
        with self._changed:
            self.shard_digest = root_digest(self.chunk_digests, self._shard.size)
            self._changed.notify_all()

    def fail(self) -> None:
        """A sender gave up: wake everybody that waits for it or for us."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def length(self, fragment: int) -> int:
        """Payload bytes of a fragment."""
        return self._code.length(fragment, self._shard.size)

    def block(self, fragment: int, index: int) -> Bytes:
        """Chunk ``index`` of a fragment; waits until a parity chunk is made."""
        if fragment < self._code.k or not self._encodes:
            return self._data(0 if self._code.k == 1 else fragment, index)
        self._wait(lambda: self._produced > index, "parity")
        return self._parity(index)[fragment - self._code.k]

    def sent(self, fragment: int, index: int) -> None:
        """Chunk ``index`` has left; once all parity senders said so, its place is free."""
        if index == 0:
            reach("save.first_chunk")
        if fragment in self._sent:
            with self._changed:
                self._sent[fragment] = index + 1
                self._changed.notify_all()

    def trailer(self, fragment: int) -> bytes:
        """The digests that follow the payload of a fragment."""
        reach("save.last_chunk")
        self._wait(lambda: bool(self.shard_digest), "digests")
        same = 0 if self._code.k == 1 else fragment
        return b"".join(self._digests[same]) + self.shard_digest

    def _digest_data(self, index: int) -> None:
        for fragment in range(self._code.k):
            part = self._data(fragment, index)
            if part.size:
                self._digests[fragment].append(digest(part))

    def _encode(self, index: int) -> None:
        self._wait(lambda: min(self._sent.values(), default=index) > index - RING_BLOCKS, "senders")
        parity = self._parity(index)
        self._ring.codec.encode([self._data(i, index) for i in range(self._code.k)], parity)
        for row, part in enumerate(parity):
            self._digests[self._code.k + row].append(digest(part))

    def _data(self, fragment: int, index: int) -> Bytes:
        start, stop = self._code.span(fragment, self._shard.size)
        return self._shard[
            min(start + index * CHUNK_BYTES, stop) : min(start + (index + 1) * CHUNK_BYTES, stop)
        ]

    def _parity(self, index: int) -> list[Bytes]:
        size = min(CHUNK_BYTES, self._length - index * CHUNK_BYTES)
        rows = self._ring.blocks[index % RING_BLOCKS]
        return [rows[row, :size] for row in range(self._code.m)]

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        with self._changed:
            left_s = self.deadline_s - self._now_s()
            self._changed.wait_for(lambda: there() or self._failed, max(0.0, left_s))
            if not there():
                words = "a sender failed" if self._failed else "the deadline passed"
                raise PeerError(f"waiting for {what}: {words}")
