"""The channels of one rank, made by attempt number as ``replica.links`` makes them (P21)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from recovery.actions import Await, Got, Publish
from simulations.network import Channel
from simulations.tasks import Delete, Join, PeerLost, Present, Steps, StoreDown, WaitKeys

if TYPE_CHECKING:
    from simulations.process import Process


class _Link:
    """One pair as this side knows it."""

    def __init__(self) -> None:
        self.attempt = self.swept = 0
        self.channel: Channel | None = None
        self.broken = False


class Links:
    """Used by one task at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._links: dict[int, _Link] = {}

    def channel(self, peer: int) -> Channel:
        """The channel that ``ensure`` made. PeerLost when there is none."""
        channel = self._links[peer].channel
        if channel is None:
            raise PeerLost(f"rank {self._process.rank} is not connected to rank {peer}")
        return channel

    def channels(self) -> list[Channel]:
        return [link.channel for link in self._links.values() if link.channel is not None]

    def ensure(self, peers: Iterable[int], deadline_s: float, given_up: str | None) -> Steps:
        """Connect to every peer; what failed, by peer. ``given_up``: a key that ends the wait."""
        rank, failed = self._process.rank, {}
        order = sorted(peers, key=lambda p: (min(p, rank), max(p, rank)))
        broken = yield from self._broken_now(order)
        for peer in order:
            try:
                yield from self._connect(peer, deadline_s, given_up, peer in broken)
            except PeerLost as error:
                failed[peer] = str(error)
        return failed

    def break_off(self, peer: int) -> Steps:
        """Declare this attempt over; both sides make a new channel before they exchange more."""
        link = self._links[peer]
        self._drop(link)
        link.broken = True
        try:
            yield from self._tell(peer, link)
        except StoreDown:
            return  # told by tell_all_broken, before this rank takes part in anything else

    def tell_all_broken(self) -> Steps:
        """Tell what ``break_off`` could not."""
        for peer, link in self._links.items():
            if link.broken:
                yield from self._tell(peer, link)

    def _broken_now(self, peers: Collection[int]) -> Steps:
        """One look at all pairs; who is among them is looked at again, one by one."""
        for peer in peers:
            link = self._links.setdefault(peer, _Link())
            if link.broken:
                yield from self._tell(peer, link)
        keys = {self._key(peer, self._links[peer].attempt, "broken"): peer for peer in peers}
        found = yield Present(tuple(keys))
        return {peer for key, peer in keys.items() if key in found}

    def _connect(self, peer: int, deadline_s: float, given_up: str | None, broken: bool) -> Steps:  # noqa: FBT001 - one caller
        link, process = self._links[peer], self._process
        while broken:
            self._drop(link)
            link.attempt += 1
            key = self._key(peer, link.attempt, "broken")
            broken = bool((yield Present((key,))))
        if link.channel is not None:
            return
        yield Publish(self._key(peer, link.attempt, f"ready-{process.rank}"), b"1")
        theirs = self._key(peer, link.attempt, f"ready-{peer}")
        answer = yield WaitKeys(Await((theirs,), "a pair", watch=given_up), deadline_s)
        if not isinstance(answer, Got):
            raise PeerLost(f"rank {peer} was not ready to connect to rank {process.rank} in time")
        name = self._key(peer, link.attempt, "group")
        try:
            link.channel = yield Join(name, peer, process.world.config.timeout_s)
        except PeerLost:
            yield from self.break_off(peer)
            raise
        old = [
            self._key(peer, attempt, what)
            for attempt in range(link.swept, link.attempt)
            for what in ("broken", f"ready-{process.rank}", f"ready-{peer}")
        ]
        link.swept = link.attempt
        if old:
            yield Delete(tuple(old))

    def _drop(self, link: _Link) -> None:
        if link.channel is not None:
            link.channel.close(self._process)
            link.channel = None

    def _tell(self, peer: int, link: _Link) -> Steps:
        yield Publish(self._key(peer, link.attempt, "broken"), b"1")
        link.broken = False

    def _key(self, peer: int, attempt: int, what: str) -> str:
        rank = self._process.rank
        return f"pair/{min(peer, rank)}-{max(peer, rank)}/{attempt}/{what}"
