"""Bytes of fragments over channels: a few threads, mostly outside the interpreter lock.

A fragment travels as its payload in chunks of ``CHUNK_BYTES``, ``IN_FLIGHT`` posted at once, then a
trailer: the digest of each chunk and the digest of the owner's shard. The receiver digests each
chunk as it arrives, while it is in cache, and compares with the trailer; it never stores a digest
that its own bytes did not give.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from erasure.digest import CHUNK_BYTES, DIGEST_BYTES, digest
from erasure.errors import PlanariaError
from replica.at_exit import THREAD_PREFIX
from replica.errors import PeerError
from replica.transport import Bytes, Channel, Pending

log = logging.getLogger("planaria")

IN_FLIGHT = 3


class BadBytes(PeerError):
    """The bytes came, and are not what their sender's digests say."""


def chunks_of(length: int) -> int:
    """Number of chunks of a payload."""
    return -(-length // CHUNK_BYTES)


@dataclass
class Received:
    """What arrived: the digests of the payload as received, and the shard's as the sender says."""

    chunk_digests: bytes = b""
    shard_digest: bytes = b""


def send_stream(
    channel: Channel,
    length: int,
    block: Callable[[int], Bytes],
    sent: Callable[[int], None],
    trailer: Callable[[], bytes],
) -> None:
    """Send a payload.

    ``block(i)`` gives chunk i and may wait for it; ``sent(i)`` says that its memory is free.
    ``trailer`` is asked for after the last block. Raises PeerError.
    """
    pending: deque[tuple[int, Pending]] = deque()

    def finish_one() -> None:
        index, work = pending.popleft()
        work.wait()
        sent(index)

    for index in range(chunks_of(length)):
        if len(pending) == IN_FLIGHT:
            finish_one()
        pending.append((index, channel.send(block(index))))
    while pending:
        finish_one()
    channel.send(np.frombuffer(bytearray(trailer()), np.uint8)).wait()


def receive_stream(channel: Channel, buffer: Bytes, posted: Callable[[], None]) -> Received:
    """Receive a payload into ``buffer``, uint8[length] exactly.

    ``posted`` is called once receives are posted.
    Raises PeerError when bytes do not come, BadBytes when they do not match the trailer.
    """
    count, length = chunks_of(buffer.size), buffer.size
    trailer = np.empty((count + 1) * DIGEST_BYTES, np.uint8)
    parts = [buffer[i * CHUNK_BYTES : min((i + 1) * CHUNK_BYTES, length)] for i in range(count)]
    parts.append(trailer)
    pending: deque[Pending] = deque()
    digests = []
    try:
        for part in parts[:IN_FLIGHT]:
            pending.append(channel.receive(part))
        posted()
        for index, part in enumerate(parts):
            pending.popleft().wait()
            if index + IN_FLIGHT < len(parts):
                pending.append(channel.receive(parts[index + IN_FLIGHT]))
            if index < count:
                digests.append(digest(part))
    except PeerError:
        _outlive(pending)
        raise
    told = trailer.tobytes()
    ours = b"".join(digests)
    if ours != told[:-DIGEST_BYTES]:
        bad = [i for i in range(count) if digests[i] != told[i * 16 : i * 16 + 16]]
        raise BadBytes(f"digest of chunks {bad} of {count} differs from what their sender says")
    return Received(ours, told[-DIGEST_BYTES:])


def _outlive(pending: deque[Pending]) -> None:
    """Until every posted receive has returned, its memory may still be written to (P22)."""
    for work in pending:
        with contextlib.suppress(PeerError):
            work.wait()


@dataclass
class Crew:
    """Daemon threads for the streams of one exchange. A failed one is remembered, not raised.

    A thread that sits in a transport cannot be woken, only outlived: the transport's timeout ends
    it.
    """

    failures: dict[str, str] = field(default_factory=dict)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, name: str, work: Callable[[], None], failed: Callable[[], None]) -> None:
        """Run ``work`` on a thread of its own; ``failed`` is called there when it raises."""

        def body() -> None:
            try:
                work()
            # Told to all ranks, whatever it is.
            except Exception as error:
                if not isinstance(error, PlanariaError):
                    log.exception("planaria %s", name)
                with self._lock:
                    self.failures[name] = f"{name}: {error}"
                failed()

        thread = threading.Thread(target=body, name=f"{THREAD_PREFIX}{name}", daemon=True)
        self._threads[name] = thread
        thread.start()

    def join(self, seconds: Callable[[], float]) -> bool:
        """Wait for all, at most ``seconds()`` (what is left now); whether all have ended."""
        for thread in self._threads.values():
            thread.join(max(0.0, seconds()))
        return not self.unfinished()

    def unfinished(self) -> set[str]:
        """Names of those that still run."""
        return {name for name, thread in self._threads.items() if thread.is_alive()}
