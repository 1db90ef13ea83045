"""The channels of one rank, made when first needed and made anew after a failure (rule P21).

Two ranks agree on the number of their attempt through the store: attempt n of pair (a, b) is over
once either side has set ``pair/<a>-<b>/<n>/broken``. A channel is made only after both sides said
ready for the same number, in sorted order of the pairs, so that no two ranks wait for each other in
a ring.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from replica.at_exit import THREAD_PREFIX
from replica.clock import Clock
from replica.errors import PeerError, StoreError
from replica.runner import POLL_FIRST_S, POLL_MAX_S
from replica.store import Store
from replica.transport import Channel, Transport

log = logging.getLogger("planaria")


@dataclass
class _Link:
    attempt: int = 0
    swept: int = 0
    """Attempts below this one have no keys in the store any more."""
    channel: Channel | None = None
    broken: bool = False

    def drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class _Making:
    """One attempt at a channel, on a thread of its own."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._result: Channel | Exception | None = None
        self._taken = False
        self._lock = threading.Lock()

    def end(self, result: Channel | Exception) -> None:
        """For the thread: it stands, or why not."""
        with self._lock:
            self._result = result
            late = self._taken
        self.over.set()
        if late and not isinstance(result, Exception):
            result.close()

    def take(self) -> Channel | Exception | None:
        """For who waited: what has come so far; later nothing is wanted any more."""
        with self._lock:
            self._taken = True
            return self._result


class Links:
    """Channels to other ranks. Used by one thread at a time."""

    def __init__(
        self, rank: int, transport: Transport, store: Store, clock: Clock, channel_timeout_s: float
    ) -> None:
        self._rank, self._transport, self._store, self._clock = rank, transport, store, clock
        self._channel_timeout_s = channel_timeout_s
        self._links: dict[int, _Link] = {}

    def ensure(
        self, peers: Iterable[int], timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> dict[int, str]:
        """Connect to every peer that is not connected; what failed, by peer, in words.

        ``given_up`` is asked now and then; True ends the waiting: what it was for is over.
        """
        deadline_s = self._clock.now_s() + timeout_s
        failed: dict[int, str] = {}
        for peer in sorted(peers, key=lambda p: (min(p, self._rank), max(p, self._rank))):
            try:
                self._connect(peer, deadline_s, given_up)
            except PeerError as error:
                failed[peer] = str(error)
        return failed

    def channel(self, peer: int) -> Channel:
        """The channel that ``ensure`` made."""
        channel = self._links[peer].channel
        if channel is None:
            raise PeerError(f"rank {self._rank} is not connected to rank {peer}")
        return channel

    def break_off(self, peer: int) -> None:
        """Declare this attempt over; both sides make a new channel before they exchange more."""
        link = self._links[peer]
        link.drop()
        link.broken = True
        try:
            self._tell_broken(peer, link)
        except StoreError as error:
            # Told by tell_all_broken, before this rank takes part in anything else.
            log.warning("rank %d: %s", self._rank, error)

    def tell_all_broken(self) -> None:
        """Tell what ``break_off`` could not, before a peer may look for it. Raises StoreError."""
        for peer, link in self._links.items():
            if link.broken:
                self._tell_broken(peer, link)

    def close(self) -> None:
        """Drop every channel."""
        for link in self._links.values():
            link.drop()

    def _tell_broken(self, peer: int, link: _Link) -> None:
        self._store.set(self._key(peer, link.attempt, "broken"), b"1")
        link.broken = False

    def _connect(self, peer: int, deadline_s: float, given_up: Callable[[], bool]) -> None:
        link = self._links.setdefault(peer, _Link())
        if link.broken:
            self._tell_broken(peer, link)
        while self._store.check([self._key(peer, link.attempt, "broken")]):
            link.drop()
            link.attempt += 1
        if link.channel is not None:
            return
        name = self._key(peer, link.attempt, "group")
        self._store.set(self._key(peer, link.attempt, f"ready-{self._rank}"), b"1")
        theirs = self._key(peer, link.attempt, f"ready-{peer}")
        if not self._wait(lambda: self._store.check([theirs]), deadline_s, given_up):
            # A peer that becomes ready now must not make a channel that nobody else comes to.
            self.break_off(peer)
            raise PeerError(f"rank {peer} was not ready to connect to rank {self._rank} in time")
        try:
            link.channel = self._make(name, peer, deadline_s, given_up)
        except PeerError:
            log.warning("rank %d: connecting to rank %d failed", self._rank, peer)
            self.break_off(peer)
            raise
        self._sweep(peer, link)

    def _make(
        self, name: str, peer: int, deadline_s: float, given_up: Callable[[], bool]
    ) -> Channel:
        """A channel, made on a thread that is left behind when it takes too long.

        A transport cannot be woken, and gloo waits for a peer that is cut off silently five times
        as long as it is told (seen). What is made too late is closed.
        """
        making = _Making()

        def body() -> None:
            try:
                making.end(
                    self._transport.connect(
                        name, self._rank, peer, self._store, self._channel_timeout_s
                    )
                )
            except Exception as error:  # noqa: BLE001 - raised in the caller
                making.end(error)

        thread = f"{THREAD_PREFIX}connecting to rank {peer}"
        threading.Thread(target=body, name=thread, daemon=True).start()
        try:
            while self._clock.now_s() < deadline_s and not making.over.is_set():
                if not making.over.wait(POLL_MAX_S) and given_up():
                    break
        finally:
            result = making.take()
        if result is None:
            raise PeerError(f"rank {peer} was not reached by rank {self._rank} in time")
        if isinstance(result, Exception):
            raise result
        return result

    def _sweep(self, peer: int, link: _Link) -> None:
        """Both sides have come to this attempt, so nobody asks for the keys of earlier ones."""
        for attempt in range(link.swept, link.attempt):
            for what in ("broken", f"ready-{self._rank}", f"ready-{peer}"):
                self._store.delete(self._key(peer, attempt, what))
        link.swept = link.attempt

    def _wait(
        self, there: Callable[[], bool], deadline_s: float, given_up: Callable[[], bool]
    ) -> bool:
        pause_s = POLL_FIRST_S
        while not there():
            if self._clock.now_s() >= deadline_s or given_up():
                return False
            self._clock.pause(pause_s)
            pause_s = min(pause_s * 1.5, POLL_MAX_S)
        return True

    def _key(self, peer: int, attempt: int, what: str) -> str:
        return f"pair/{min(peer, self._rank)}-{max(peer, self._rank)}/{attempt}/{what}"
