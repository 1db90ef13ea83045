"""Channels between two ranks: made when both are ready, made anew after a failure (rule P21)."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from replica.clock import MonotonicClock
from replica.errors import PeerError, StoreError
from replica.links import Links
from replica.store import MemoryStore
from replica.transports.memory import MemoryTransport
from tests.replica.inprocess import all_of, outcomes

WAIT_S = 20.0


class Refusing:
    """A transport that fails the next ``failures`` connections."""

    def __init__(self, failures: int = 0) -> None:
        self._inner, self.failures, self.names = MemoryTransport(), failures, []
        self._lock = threading.Lock()

    def connect(self, name, rank, peer, store, timeout_s):
        """Fail, or connect in memory."""
        with self._lock:
            self.names.append((name, rank))
            if self.failures > 0 and rank == 0:
                self.failures -= 1
                raise PeerError("no route")
        return self._inner.connect(name, rank, peer, store, timeout_s)


class Stuck:
    """A transport that connects only once it is let go, whatever its deadline, as gloo may."""

    def __init__(self) -> None:
        self.gate, self.closed = threading.Event(), threading.Event()

    def connect(self, *_):
        """Wait, then give something that can be closed."""
        self.gate.wait(WAIT_S)
        return self

    def close(self):
        """Note it."""
        self.closed.set()


class Flaky(MemoryStore):
    """A store that can be lost."""

    lost = False

    def set(self, key, value):
        """Set, if the store is there."""
        if self.lost:
            raise StoreError("the store is lost")
        super().set(key, value)


@pytest.fixture
def pair():
    """Return the links of two ranks over one store and one transport."""
    return links_of(2)


def links_of(world, transport=None, store=None, timeout_s=2.0):
    """Make the links of some ranks."""
    transport, store = transport or MemoryTransport(), store or MemoryStore()
    return [Links(rank, transport, store, MonotonicClock(), timeout_s) for rank in range(world)]


def ensure(links, wanted=None, timeout_s=WAIT_S):
    """Let every rank connect to its peers at the same time; what failed, by rank."""
    world = len(links)
    peers = wanted or {rank: [p for p in range(world) if p != rank] for rank in range(world)}
    return all_of(outcomes(world, lambda rank: links[rank].ensure(peers[rank], timeout_s)))


def carries(sender, receiver, to, source):
    """Whether one buffer gets across."""
    sent, got = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    work = receiver.channel(source).receive(got)
    sender.channel(to).send(sent).wait()
    work.wait()
    return bool((sent == got).all())


def test_both_sides_get_a_channel_and_keep_it(pair):
    """Connected once, bytes go both ways; connecting again keeps the very channel."""
    assert ensure(pair) == [{}, {}]
    assert carries(pair[0], pair[1], 1, 0)
    assert carries(pair[1], pair[0], 0, 1)
    kept = [pair[0].channel(1), pair[1].channel(0)]
    assert ensure(pair) == [{}, {}]
    assert kept == [pair[0].channel(1), pair[1].channel(0)]


def test_five_ranks_connect_all_pairs_at_once():
    """Ten pairs in sorted order: nobody waits for another in a ring, every pair carries bytes."""
    links = links_of(5)
    assert ensure(links) == [{}] * 5
    for a in range(5):
        for b in range(a):
            assert carries(links[a], links[b], b, a)


def test_peers_may_be_asked_for_in_any_order():
    """Each rank names its peers in another order: connected all the same."""
    links = links_of(4)
    wanted = {0: [3, 1, 2], 1: [2, 0, 3], 2: [0, 3, 1], 3: [1, 2, 0]}
    assert ensure(links, wanted) == [{}] * 4


def test_a_peer_that_does_not_come_is_named(pair):
    """Rank 1 is not there: rank 0 says so at the deadline and has no channel."""
    (words,) = pair[0].ensure([1], 0.05).values()
    assert words == "rank 1 was not ready to connect to rank 0 in time"
    with pytest.raises(PeerError, match="rank 0 is not connected to rank 1"):
        pair[0].channel(1)
    # It comes later: the same attempt still serves.
    assert ensure(pair) == [{}, {}]
    assert carries(pair[0], pair[1], 1, 0)


def test_a_missing_peer_does_not_keep_others_apart():
    """Rank 2 of three stays away: ranks 0 and 1 are connected, and both name it."""
    links = links_of(3)
    found = all_of(outcomes(2, lambda rank: links[rank].ensure([1 - rank, 2], 0.3)))
    assert [sorted(failed) for failed in found] == [[2], [2]]
    assert carries(links[0], links[1], 1, 0)


def test_after_a_break_both_sides_make_a_new_channel(pair):
    """One side breaks the pair off: at the next connect both have another one that carries."""
    ensure(pair)
    old = pair[1].channel(0)
    pair[0].break_off(1)
    with pytest.raises(PeerError):
        pair[0].channel(1)
    assert ensure(pair) == [{}, {}]
    assert pair[1].channel(0) is not old
    assert carries(pair[0], pair[1], 1, 0)
    with pytest.raises(PeerError, match="closed"):
        old.send(np.ones(1, np.uint8))


def test_both_sides_may_break_the_same_attempt_off(pair):
    """Both break off, twice in a row: each round leads to one new common channel."""
    for _ in range(2):
        ensure(pair)
        pair[0].break_off(1)
        pair[1].break_off(0)
        pair[1].break_off(0)
    assert ensure(pair) == [{}, {}]
    assert carries(pair[1], pair[0], 0, 1)


def test_a_side_that_missed_some_breaks_catches_up(pair):
    """Rank 0 broke three attempts off alone: rank 1 skips them all."""
    for _ in range(3):
        pair[0].ensure([1], 0.0)
        pair[0].break_off(1)
    assert ensure(pair) == [{}, {}]
    assert carries(pair[0], pair[1], 1, 0)


def test_keys_of_earlier_attempts_are_removed():
    """Twenty breaks, one new channel each: the store keeps the keys of the last attempt only."""
    store = MemoryStore()
    links = links_of(2, store=store)
    for turn in range(20):
        assert ensure(links) == [{}, {}]
        links[turn % 2].break_off(1 - turn % 2)
    assert ensure(links) == [{}, {}]
    assert sorted(store._shared.values) == ["pair/0-1/20/ready-0", "pair/0-1/20/ready-1"]
    assert carries(links[0], links[1], 1, 0)


def test_waiting_for_a_peer_ends_when_it_is_for_nothing(pair):
    """The caller says that what it connects for is given up: named at once, not at the deadline."""
    asked = []

    def given_up():
        asked.append(1)
        return len(asked) > 2

    assert "was not ready" in pair[0].ensure([1], WAIT_S, given_up)[1]


def test_a_failed_connection_is_tried_anew_under_another_name():
    """The transport fails on one side: the other gives up too; the next attempt has a new name."""
    transport = Refusing(failures=1)
    links = links_of(2, transport, timeout_s=0.2)
    failed = ensure(links)
    assert "no route" in failed[0][1]
    assert "did not come" in failed[1][0]
    assert ensure(links) == [{}, {}]
    assert carries(links[0], links[1], 1, 0)
    assert len({name for name, _ in transport.names}) == 2


@pytest.mark.parametrize("wait_s", [0.2, WAIT_S])
def test_a_transport_that_is_stuck_is_left_behind(wait_s):
    """The peer is ready and its bytes never come: ended by the deadline, or when it is for nothing.

    What is made in the end is closed.
    """
    transport, store = Stuck(), MemoryStore()
    (links, _) = links_of(2, transport, store)
    store.set("pair/0-1/0/ready-1", b"1")
    words = links.ensure([1], wait_s, lambda: wait_s == WAIT_S)
    assert words == {1: "rank 1 was not reached by rank 0 in time"}
    assert store.check(["pair/0-1/0/broken"])
    transport.gate.set()
    assert transport.closed.wait(WAIT_S)


def test_a_break_that_could_not_be_told_is_told_later():
    """The store is lost at the break: told when it is back, and then both connect anew."""
    store = Flaky()
    links = links_of(2, store=store)
    ensure(links)
    store.lost = True
    links[0].break_off(1)
    with pytest.raises(StoreError):
        links[0].tell_all_broken()
    store.lost = False
    links[0].tell_all_broken()
    assert links[1].ensure([0], 0.0) == {0: "rank 0 was not ready to connect to rank 1 in time"}
    assert ensure(links) == [{}, {}]
    assert carries(links[0], links[1], 1, 0)


def test_closed_links_have_no_channels(pair):
    """After close no channel is left; a second close does nothing."""
    ensure(pair)
    pair[0].close()
    pair[0].close()
    with pytest.raises(PeerError):
        pair[0].channel(1)
