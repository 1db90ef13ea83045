"""The drivers' half of one save: slots, streams, records (see ``recovery.commit``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from erasure.errors import PlanariaError
from recovery.commit import Connect, Exchange, ExchangeResult, Incoming, Settle
from recovery.layout import Fragment
from recovery.ledger import Ledger
from recovery.manifest import Generation, SlotRecord
from recovery.slots import HELD, OWN, held_slot
from replica.arena import Slot
from replica.encode import EncodePass, ParityRing
from replica.errors import ArenaError
from replica.job import Job
from replica.runner import POLL_MAX_S, Handlers
from replica.streams import BadBytes, Crew, Received, receive_stream, send_stream

log = logging.getLogger("planaria")


@dataclass
class SaveWork:
    """One generation at this rank: what was staged, and what has come in.

    ``ended_key``: the key whose presence says that all this is over. ``expected``: how many
    fragments this rank takes. ``mends``: the generation is there already, and parts of it are sent
    once more.
    """

    generation: Generation
    own: Slot | None
    shard_bytes: int
    ledger: Callable[[], Ledger]
    ended_key: str
    expected: int
    deadline_s: float
    crew: Crew = field(default_factory=Crew)
    received: dict[Fragment, bytes] = field(default_factory=dict)
    open_peers: set[int] = field(default_factory=set)
    sent_bytes: int = 0
    over: bool = False
    mends: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Saver:
    """Carries out Connect, Settle and Exchange. One save at a time, in the background thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ring = ParityRing(job.layout.redundancy.code)
        self._returned = threading.Condition()
        self._work: SaveWork | None = None

    def handlers(self, work: SaveWork) -> Handlers:
        """The handlers for the save of ``work``."""
        self._work = work
        return {
            Connect: lambda action: self._connect(work, action),
            Settle: lambda action: self._settle(work, action),
            Exchange: lambda action: self._exchange(work, action),
        }

    def end(self) -> None:
        """After the outcome: break off every pair that still has a buffer posted (P21, P22)."""
        work, self._work = self._work, None
        if work is None:
            return
        with work.lock:
            work.over = True
        if work.crew.unfinished():
            # What goes on for a moment must not make or send parity where the next save does.
            self._ring = ParityRing(self._job.layout.redundancy.code)
        for peer in sorted(work.open_peers):
            self._job.links.break_off(peer)

    def close_arena(self) -> None:
        """Close the arena, at the end of the background thread, once no receive is under way.

        There is no deadline: whoever opens it next would write where a late receive does too.
        """
        with self._returned:
            while not self.idle:
                self._returned.wait(POLL_MAX_S)
        self._job.arena.close()

    @property
    def idle(self) -> bool:
        """Nothing that was begun still writes into a slot, so the arena may be given up."""
        return not self._busy(HELD, OWN)

    def _busy(self, *kinds: str) -> bool:
        return any(slot.busy and slot.kind in kinds for slot in self._job.arena.slots.values())

    def _left_s(self, work: SaveWork) -> float:
        return self._seconds_to(work.deadline_s)

    def _seconds_to(self, time_s: float) -> float:
        return max(0.0, time_s - self._job.clock.now_s())

    def _connect(self, work: SaveWork, action: Connect) -> Mapping[int, str]:
        given_up = partial(self._decided, work)
        return self._job.links.ensure(action.peers, self._left_s(work), given_up)

    def _settle(self, work: SaveWork, action: Settle) -> Mapping[Fragment, str]:
        self._await_receives(work)
        answers: dict[Fragment, str] = {}
        taken: set[int] = set()
        for offer in action.offers:
            try:
                slot = self._slot_for(work, offer, taken)
                taken.add(slot.number)
                slot.invalidate()
                self._receive(work, offer, slot)
            except PlanariaError as error:
                log.warning("cannot hold %s: %s", offer.fragment, error)
                answers[offer.fragment] = str(error)
            else:
                answers[offer.fragment] = ""
        return answers

    def _await_receives(self, work: SaveWork) -> None:
        """What an aborted save left posted returns once both sides have given that pair up.

        Connect has seen to that: a moment, and the slots may be used again.
        """
        while self._left_s(work) > 0:
            with self._returned:
                if self._returned.wait_for(lambda: not self._busy(HELD), POLL_MAX_S):
                    return
            if self._decided(work):
                return

    def _slot_for(self, work: SaveWork, offer: Incoming, taken: set[int]) -> Slot:
        arena = self._job.arena
        need = self._job.layout.redundancy.code.length(offer.fragment.index, offer.shard_bytes)
        take = held_slot(arena.facts(), work.ledger(), need, taken=taken, expected=work.expected)
        if take.number is not None:
            return arena.slots[take.number]
        if take.drop is not None:
            arena.drop(arena.slots[take.drop])
        return arena.allocate(need, HELD)

    def _receive(self, work: SaveWork, offer: Incoming, slot: Slot) -> None:
        fragment, code = offer.fragment, self._job.layout.redundancy.code
        buffer = slot.data[: code.length(fragment.index, offer.shard_bytes)]
        channel = self._job.links.channel(fragment.owner)
        posted = threading.Event()
        name = f"receiving fragment {fragment.index} of rank {fragment.owner}"
        work.open_peers.add(fragment.owner)
        slot.hold()

        def body() -> None:
            try:
                got = receive_stream(channel, buffer, posted.set)
                if offer.shard_digest not in ("", got.shard_digest.hex()):
                    # A record of it would make two shards of one generation.
                    raise BadBytes("these bytes are of another shard than the one that is mended")
                with work.lock:
                    # A stream that outlived its generation must not revive the slot.
                    if not work.over:
                        slot.write_record(self._record(work, offer, got))
                        work.received[fragment] = got.shard_digest
            finally:
                with self._returned:
                    slot.let_go()
                    self._returned.notify_all()

        work.crew.start(name, body, posted.set)
        if not posted.wait(self._left_s(work)):
            raise ArenaError(f"{name}: the receive could not be posted in time")

    def _record(self, work: SaveWork, offer: Incoming, got: Received) -> SlotRecord:
        return self._job.record(
            generation=work.generation,
            owner=offer.fragment.owner,
            fragment=offer.fragment.index,
            shard_bytes=offer.shard_bytes,
            chunk_digests=got.chunk_digests,
            shard_digest=got.shard_digest,
        )

    def _exchange(self, work: SaveWork, action: Exchange) -> ExchangeResult:
        job, code = self._job, self._job.layout.redundancy.code
        shard = work.own.data[: work.shard_bytes] if work.own else np.empty(0, np.uint8)
        sent = [fragment.index for fragment in action.send]
        encode = EncodePass(code, shard, self._ring, sent, job.clock.now_s)
        encode.deadline_s = work.deadline_s
        for fragment in action.send:
            self._send(work, encode, fragment)
        if action.send or not work.mends:
            work.crew.start("encoding", encode.run, encode.fail)
        ending = self._join(work)
        late = sorted(work.crew.unfinished())
        failures = [text for _, text in sorted(work.crew.failures.items())]
        failures += [f"{name}: still under way {ending}" for name in late]
        if encode.shard_digest and work.own and not work.mends:
            job.write_own(work.own, work.generation, work.shard_bytes, encode)
        if failures:
            encode.fail()
        else:
            work.open_peers.clear()
        with work.lock:
            return ExchangeResult(encode.shard_digest, dict(work.received), tuple(failures))

    def _join(self, work: SaveWork) -> str:
        """Wait until the streams have ended, the deadline passes or the save is aborted."""
        while self._left_s(work) > 0:
            turn_s = min(work.deadline_s, self._job.clock.now_s() + POLL_MAX_S)
            if work.crew.join(partial(self._seconds_to, turn_s)):
                return "at the end"
            if self._decided(work):
                return "when the save was aborted"
        return "at the deadline"

    def _decided(self, work: SaveWork) -> bool:
        """Until this rank is HELD that means aborted: peers may never connect or send."""
        return self._job.store.check([work.ended_key])

    def _send(self, work: SaveWork, encode: EncodePass, fragment: Fragment) -> None:
        channel = self._job.links.channel(fragment.holder)
        index, length = fragment.index, encode.length(fragment.index)
        work.open_peers.add(fragment.holder)

        def body() -> None:
            send_stream(
                channel,
                length,
                lambda i: encode.block(index, i),
                lambda i: encode.sent(index, i),
                lambda: encode.trailer(index),
            )
            with work.lock:
                work.sent_bytes += length

        work.crew.start(f"sending fragment {index} to rank {fragment.holder}", body, encode.fail)
