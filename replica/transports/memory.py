"""Channels inside one process: ranks are threads. For tests and for trying things out.

They fail as gloo's pairs do, so that what holds here holds there: a wait that runs out and a
``close`` end at once what either side has posted.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from replica.errors import PeerError
from replica.store import Store
from replica.transport import Bytes, Pending, check_buffer

SEND, RECEIVE = "send", "receive"


@dataclass(eq=False)
class _Posted:
    """A buffer posted by one side; over when both sides met or the line broke."""

    buffer: Bytes
    done: bool = False
    error: str = ""

    @property
    def over(self) -> bool:
        return self.done or bool(self.error)


class _Line:
    """What joins two ranks: what each has posted in each direction, met in order."""

    def __init__(self, ranks: tuple[int, int]) -> None:
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self._ranks = ranks
        self._posted: dict[tuple[int, str], deque[_Posted]] = {
            (rank, verb): deque() for rank in ranks for verb in (SEND, RECEIVE)
        }
        self._broken = ""

    def join(self, rank: int, timeout_s: float) -> bool:
        """Whether the other side has come in time."""
        with self.changed:
            self.joined.add(rank)
            self.changed.notify_all()
            return self.changed.wait_for(lambda: len(self.joined) == 2, timeout_s)

    def post(self, rank: int, verb: str, buffer: Bytes) -> _Posted:
        check_buffer(buffer)
        posted = _Posted(buffer)
        with self.changed:
            if self._broken:
                raise PeerError(self._broken)
            self._posted[rank, verb].append(posted)
            self._meet()
        return posted

    def wait(self, posted: _Posted, timeout_s: float) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: posted.over, timeout_s):
                self._break(f"nothing came within {timeout_s} s")
        if posted.error:
            raise PeerError(posted.error)

    def close(self, rank: int) -> None:
        with self.changed:
            self._break(f"rank {rank} closed the channel")

    def _meet(self) -> None:
        for sender, receiver in (self._ranks, self._ranks[::-1]):
            sends, receives = self._posted[sender, SEND], self._posted[receiver, RECEIVE]
            while sends and receives:
                sent, received = sends[0].buffer, receives[0].buffer
                if sent.size != received.size:
                    self._break(f"{sent.size} bytes sent, {received.size} expected")
                    return
                received[:] = sent
                sends.popleft().done = receives.popleft().done = True
        self.changed.notify_all()

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        for queue in self._posted.values():
            for posted in queue:
                posted.error = self._broken
            queue.clear()
        self.changed.notify_all()


class MemoryTransport:
    """Shared by all ranks of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def connect(
        self, name: str, rank: int, peer: int, store: Store, timeout_s: float
    ) -> MemoryChannel:
        """Join ``peer``; waits until it comes. ``timeout_s`` bounds that and every later wait."""
        del store
        with self._lock:
            line = self._lines.setdefault(name, _Line((min(rank, peer), max(rank, peer))))
        came = line.join(rank, timeout_s)
        with self._lock:
            # Both sides have it now; the name is not used again.
            self._lines.pop(name, None)
        if not came:
            raise PeerError(f"rank {rank}: rank {peer} did not come within {timeout_s} s")
        return MemoryChannel(line, rank, peer, timeout_s)


class MemoryChannel:
    """One side of a line."""

    def __init__(self, line: _Line, rank: int, peer: int, timeout_s: float) -> None:
        self._line, self._rank, self._timeout_s = line, rank, timeout_s
        self._words = f"rank {rank} with rank {peer}"

    def send(self, buffer: Bytes) -> Pending:
        """Post a send of ``buffer``."""
        return self._post(SEND, buffer)

    def receive(self, buffer: Bytes) -> Pending:
        """Post a receive into ``buffer``."""
        return self._post(RECEIVE, buffer)

    def close(self) -> None:
        """End what is posted, and refuse more, on both sides."""
        self._line.close(self._rank)

    def wait_for(self, posted: _Posted) -> None:
        """Wait until ``posted`` met its other side; after an error nothing touches its buffer."""
        try:
            self._line.wait(posted, self._timeout_s)
        except PeerError as error:
            raise PeerError(f"{self._words}: {error}") from error

    def _post(self, verb: str, buffer: Bytes) -> Pending:
        try:
            return _MemoryPending(self, self._line.post(self._rank, verb, buffer))
        except PeerError as error:
            raise PeerError(f"{self._words}: {error}") from error


class _MemoryPending:
    def __init__(self, channel: MemoryChannel, posted: _Posted) -> None:
        self._channel, self._posted = channel, posted

    def wait(self) -> None:
        """Wait for the other side, at most the channel's timeout."""
        self._channel.wait_for(self._posted)
