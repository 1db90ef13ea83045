"""The fake network: channels between two ranks, cut and slow links, what is under way.

As with gloo: a send ends when the other side has taken the bytes; a peer that is gone or cut off is
noticed at the channel's timeout, often not sooner; one timeout closes the channel; and a receive
that is in the middle of a message cannot be aborted, only outlived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recovery.manifest import SlotRecord
from simulations.tasks import Join, PeerLost, Task

if TYPE_CHECKING:
    from simulations.memory import Node
    from simulations.process import Process
    from simulations.world import World

BYTES_PER_S = 20_000.0
"""Slow on purpose: bytes are few, and their time on the wire should be seen."""
NOTICED = 0.5
"""How likely the end of a process is noticed at once by those that it has channels with."""


class Work:
    """A posted send or receive: open, then done or failed, once."""

    __slots__ = ("bad", "error", "fill", "over", "process", "then")

    def __init__(self, process: Process, then: Callable[[Work], None]) -> None:
        self.process, self.then = process, then
        self.over = False
        self.error = ""
        self.bad = False
        """The bytes came and are not what their sender's digests say."""
        self.fill: Callable[[Parcel], str] | None = None

    def end(self, error: str = "", *, bad: bool = False) -> None:
        """Finish; a second call does nothing."""
        if self.over:
            return
        self.over, self.error, self.bad = True, error, bad
        if self.process.alive:
            self.then(self)
            self.process.notify()


class Parcel:
    """One fragment on its way: payload first, then the digests."""

    __slots__ = ("chunk_digests", "payload", "receive", "record", "send", "shard_digest")

    def __init__(
        self,
        payload: bytes,
        chunk_digests: bytes,
        shard_digest: bytes,
        record: SlotRecord | None = None,
    ) -> None:
        self.payload = payload
        self.record = record
        """What it was read from, if it had lain in a slot."""
        self.chunk_digests, self.shard_digest = chunk_digests, shard_digest
        self.send: Work | None = None
        self.receive: Work | None = None


class Side:
    """One end of a channel."""

    __slots__ = ("closed", "last_s", "on_way", "posted", "process", "sends", "waiting")

    def __init__(self, process: Process) -> None:
        self.process = process
        self.posted: deque[Work] = deque()
        """Receives without bytes."""
        self.waiting: deque[Parcel] = deque()
        """Bytes without a receive."""
        self.sends: list[Work] = []
        self.last_s = 0.0
        """When the last parcel to this side arrives: none overtakes another."""
        self.on_way = 0
        """Parcels between the nodes."""
        self.closed = False


class Channel:
    """A pair's attempt. A process uses the side under its rank."""

    def __init__(self, world: World, name: str, first: Process, second: Process) -> None:
        self._world, self.name = world, name
        self.sides = {first.rank: Side(first), second.rank: Side(second)}

    def other(self, rank: int) -> Side:
        (found,) = (side for number, side in self.sides.items() if number != rank)
        return found

    def send(self, process: Process, parcel: Parcel, then: Callable[[Work], None]) -> None:
        """Post a send of ``parcel``."""
        work = parcel.send = Work(process, then)
        mine = self.sides[process.rank]
        if mine.closed:
            work.end("the channel is closed")
            return
        mine.sends.append(work)
        self._expire(process, work)
        self._world.network.transmit(self, self.other(process.rank), parcel)

    def receive(
        self, process: Process, fill: Callable[[Parcel], str], then: Callable[[Work], None]
    ) -> Work:
        """Post a receive; ``fill`` writes the payload down, and says what is wrong with it."""
        work = Work(process, then)
        work.fill = fill
        mine = self.sides[process.rank]
        if mine.closed:
            work.end("the channel is closed")
            return work
        mine.posted.append(work)
        self._expire(process, work)
        self._match(mine)
        return work

    def arrive(self, what: tuple[Side, Parcel]) -> None:
        """The payload has come to its side."""
        side, parcel = what
        if self._world.network.stalled(self, side, parcel):
            return
        if side.closed and not side.posted:
            return
        side.waiting.append(parcel)
        self._match(side)

    def close(self, process: Process, *, quietly: bool = False) -> None:
        """Give this side up. What is in the middle of a message goes on until its timeout."""
        mine = self.sides[process.rank]
        if mine.closed:
            return
        mine.closed = True
        network = self._world.network
        for work in list(mine.posted):
            if not network.under_way(mine) or work not in list(mine.posted)[:1]:
                mine.posted.remove(work)
                self._world.schedule(0.001, process, lambda w: w.end("closed"), work)
        for work in mine.sends:
            self._world.schedule(0.001, process, lambda w: w.end("closed"), work)
        theirs = self.other(process.rank).process
        if not quietly and not network.cut(process.node, theirs.node):
            self._world.schedule(
                0.002 + self._world.latency_s(theirs), theirs, self._closed_by_peer, theirs
            )

    def _closed_by_peer(self, process: Process) -> None:
        self.close(process, quietly=True)

    def _expire(self, process: Process, work: Work) -> None:
        timeout_s = self._world.config.timeout_s
        self._world.schedule(timeout_s, process, self._timed_out, (process, work))

    def _timed_out(self, what: tuple[Process, Work]) -> None:
        process, work = what
        if work.over:
            return
        mine, peer = self.sides[process.rank], self.other(process.rank).process
        if self._world.network.cut(process.node, peer.node):
            # Only now the cut has cost a message: late ones are a delay.
            self._world.faults.effect("cut", process.node.name, peer.node.name)
        mine.posted = deque(w for w in mine.posted if w is not work)
        work.end("no bytes in time")
        self.close(process)

    def _match(self, side: Side) -> None:
        while side.posted and side.waiting:
            work, parcel = side.posted.popleft(), side.waiting.popleft()
            if work.over:
                side.waiting.appendleft(parcel)
                continue
            if work.fill is None:
                raise TypeError("a receive without a place for its bytes")
            parcel.receive = work
            problem = work.fill(parcel)
            delay_s = self._world.latency_s(side.process)
            self._world.schedule(delay_s, side.process, self._complete, (parcel, problem))

    def _complete(self, what: tuple[Parcel, str]) -> None:
        """The digests have come too."""
        parcel, problem = what
        work = parcel.receive
        if work is None or work.over:
            return
        if problem:
            work.end(problem, bad=True)
        else:
            work.end()
        if parcel.send is not None:
            sender = parcel.send.process
            delay_s = self._world.latency_s(sender)
            self._world.schedule(delay_s, sender, lambda send: send.end(), parcel.send)


class Network:
    """Which nodes reach each other, and how fast."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[frozenset[str], float] = {}
        self._delays: dict[frozenset[str], tuple[float, float]] = {}
        self._stalled: list[tuple[Channel, Side, Parcel]] = []
        self._joins: dict[tuple[int, str], tuple[Task, int, Process]] = {}
        self.flip_next_of: set[str] = set()
        """Nodes whose next payload is damaged on the wire."""

    def cut_link(self, a: Node, b: Node, until_s: float) -> None:
        """Nothing passes between two nodes until then."""
        self._cuts[frozenset((a.name, b.name))] = until_s
        self._world.schedule(until_s - self._world.now_s + 1e-6, None, self.healed)

    def delay_link(self, a: Node, b: Node, extra_s: float, until_s: float) -> None:
        """What passes between two nodes takes longer until then."""
        self._delays[frozenset((a.name, b.name))] = (extra_s, until_s)

    def heal(self) -> None:
        """Every link is well again."""
        self._cuts.clear()
        self._delays.clear()
        self.flip_next_of.clear()
        self.healed()

    def cut(self, a: Node, b: Node) -> bool:
        """Whether nothing passes between the nodes now."""
        if a is b:
            return False
        if a.partitioned or b.partitioned:
            return True
        if not self._cuts:
            return False
        return self._cuts.get(frozenset((a.name, b.name)), 0.0) > self._world.now_s

    def transmit(self, channel: Channel, to: Side, parcel: Parcel) -> None:
        """Send a parcel on its way to ``to``."""
        sender = parcel.send.process if parcel.send is not None else to.process
        now_s = self._world.now_s
        delay_s = self._world.latency_s(sender) + len(parcel.payload) / BYTES_PER_S
        extra = self._delays.get(frozenset((sender.node.name, to.process.node.name)))
        if extra is not None and extra[1] > now_s:
            delay_s += extra[0]
            self._world.faults.effect("delay", sender.node.name, to.process.node.name)
        if sender.node.name in self.flip_next_of and parcel.payload:
            self._flip(sender.node, parcel)
        arrives_s = max(now_s + delay_s, to.last_s + 1e-6)
        to.last_s = arrives_s
        to.on_way += 1
        self._world.schedule(arrives_s - now_s, to.process, self._landed, (channel, to, parcel))

    def _flip(self, node: Node, parcel: Parcel) -> None:
        """Change what was sent: for who asked for it, its source is as good as damaged."""
        debt, record = self._world.checker.debt, parcel.record
        if record is not None:
            if self._world.config.sparing and not debt.affordable(node, record.owner):
                return
            debt.item_hit(node, record)
        self.flip_next_of.discard(node.name)
        parcel.payload = bytes([parcel.payload[0] ^ 0x41]) + parcel.payload[1:]
        self._world.faults.effect("corrupt-wire", node.name)

    def under_way(self, side: Side) -> bool:
        """Whether bytes for this side are between the nodes."""
        return side.on_way > 0 or any(s is side for _, s, _ in self._stalled)

    def stalled(self, channel: Channel, side: Side, parcel: Parcel) -> bool:
        """Keep a parcel that meets a cut link until the link is well."""
        sender = parcel.send.process.node if parcel.send is not None else side.process.node
        if not self.cut(sender, side.process.node) and not any(
            s is side for _, s, _ in self._stalled
        ):
            return False
        self._stalled.append((channel, side, parcel))
        return True

    def healed(self, _: Any = None) -> None:
        """Send on what was kept and may pass now, in order."""
        waiting, self._stalled = self._stalled, []
        for channel, side, parcel in waiting:
            sender = parcel.send.process.node if parcel.send is not None else side.process.node
            if self.cut(sender, side.process.node):
                self._stalled.append((channel, side, parcel))
            elif parcel.send is not None and not (parcel.send.over and side.closed):
                self.transmit(channel, side, parcel)

    def join(self, task: Task, action: Join) -> None:
        """Meet the peer that joins under the same name."""
        process = task.process
        key = (process.group.number, action.name)
        waiting = self._joins.get(key)
        if waiting is not None and not self._is_waiting(*waiting[:2]):
            waiting = None
        if waiting is None or waiting[2] is process:
            self._joins[key] = (task, task.token, process)
            error = PeerLost(f"rank {process.rank}: no connection to rank {action.peer}")
            turn = (task.token, error)
            self._world.schedule(action.timeout_s, process, task.fail, turn)
            return
        first, token, peer = waiting
        if self.cut(peer.node, process.node):
            self._world.faults.effect("cut", peer.node.name, process.node.name)
            error = PeerLost(f"rank {process.rank}: no connection to rank {action.peer}")
            self._world.schedule(action.timeout_s, process, task.fail, (task.token, error))
            return
        del self._joins[key]
        channel = Channel(self._world, action.name, peer, process)
        for who, number in ((first, token), (task, task.token)):
            side = who.process
            self._world.schedule(self._world.latency_s(side), side, who.answer, (number, channel))

    def ended(self, process: Process, channels: list[Channel]) -> None:
        """A process is gone; its peers may notice."""
        for channel in channels:
            peer = channel.other(process.rank).process
            if self._world.random.random() < NOTICED and not self.cut(process.node, peer.node):
                delay_s = 0.01 + self._world.latency_s(peer)
                self._world.schedule(delay_s, peer, channel._closed_by_peer, peer)  # noqa: SLF001

    def _is_waiting(self, task: Task, token: int) -> bool:
        return not task.over and task.token == token and task.process.alive

    def _landed(self, what: tuple[Channel, Side, Parcel]) -> None:
        channel, side, parcel = what
        side.on_way -= 1
        channel.arrive((side, parcel))
