"""One suite for every transport, between two threads: order, sizes, deadlines, closing."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from replica.errors import ConfigError, PeerError
from replica.store import MemoryStore, TorchStore, connector
from replica.transports.gloo import GlooTransport
from replica.transports.memory import MemoryTransport
from tests.replica.inprocess import all_of, outcomes

WAIT_S = 20.0
SHORT_S = 0.3


@pytest.fixture(scope="module")
def clients():
    """Yield a client of one TCP store for each rank, used by all tests.

    Torch asks the name server about every new connection, which takes seconds on some machines.
    """
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WAIT_S)
    )
    connect = connector(f"127.0.0.1:{server.port}", WAIT_S)
    yield [connect(), connect()]
    del server


class Wires:
    """Makes channels between two ranks, each end on a thread of its own."""

    def __init__(self, kind, clients, name):
        self._transports = [MemoryTransport()] * 2
        self._stores = [MemoryStore()] * 2
        if kind == "gloo":
            self._transports = [GlooTransport(), GlooTransport()]
            self._stores = [TorchStore(lambda c=client: c, name) for client in clients]
        self._made = 0

    def connect(self, rank, peer=None, timeout_s=WAIT_S, name="alone"):
        """Connect one end only."""
        transport, store = self._transports[rank], self._stores[rank]
        return transport.connect(name, rank, 1 - rank if peer is None else peer, store, timeout_s)

    def pair(self, timeout_s=WAIT_S):
        """Connect both ends."""
        self._made += 1
        name = f"pair/{self._made}"
        return all_of(outcomes(2, lambda rank: self.connect(rank, None, timeout_s, name)))


@pytest.fixture(params=["memory", "gloo"])
def wires(request, clients):
    """Return the maker of channels for each transport."""
    return Wires(request.param, clients, f"test/{request.node.name}")


def pattern(size, seed=0):
    """Make uint8[size] whose bytes tell position and seed."""
    return (np.arange(size) * 7 + seed).astype(np.uint8)


@pytest.mark.parametrize("size", [1, 16, 4096, 3_000_001])
def test_bytes_arrive_as_they_were(wires, size):
    """One buffer each way at the same time, tiny to large: equal bytes on both sides."""
    ends = wires.pair()

    def swap(rank):
        got = np.zeros(size, np.uint8)
        receiving = ends[rank].receive(got)
        sending = ends[rank].send(pattern(size, rank))
        sending.wait()
        receiving.wait()
        return np.array_equal(got, pattern(size, 1 - rank))

    assert all_of(outcomes(2, swap)) == [True, True]


def test_buffers_keep_their_order(wires):
    """Ten buffers of falling size, four posted at once on each side: each in its own place."""
    a, b = wires.pair()
    sizes = [1000 - 90 * n for n in range(10)]

    def run(rank):
        if rank == 0:
            buffers = [pattern(size, n) for n, size in enumerate(sizes)]
            post = a.send
        else:
            buffers = [np.zeros(size, np.uint8) for size in sizes]
            post = b.receive
        works = [post(buffer) for buffer in buffers[:4]]
        for n, _ in enumerate(buffers):
            works[n].wait()
            if n + 4 < len(buffers):
                works.append(post(buffers[n + 4]))
        return buffers

    sent, got = all_of(outcomes(2, run))
    assert all(np.array_equal(x, y) for x, y in zip(sent, got, strict=True))


def test_a_receive_may_be_posted_long_before_the_send(wires):
    """The receiver waits on another thread before the sender posts anything."""
    a, b = wires.pair()
    got, posted = np.zeros(50, np.uint8), threading.Event()

    def run(rank):
        if rank == 1:
            work = b.receive(got)
            posted.set()
            work.wait()
        else:
            assert posted.wait(WAIT_S)
            a.send(pattern(50)).wait()

    all_of(outcomes(2, run))
    assert np.array_equal(got, pattern(50))


def test_a_slice_of_larger_memory_is_filled_and_nothing_else(wires):
    """A receive into the middle of an array leaves the bytes around it alone."""
    a, b = wires.pair()
    memory = np.full(300, 9, np.uint8)
    work = b.receive(memory[100:200])
    sending = a.send(pattern(300)[50:150])
    all_of(outcomes(2, lambda rank: (sending, work)[rank].wait()))
    assert np.array_equal(memory[100:200], pattern(300)[50:150])
    assert set(memory[:100]) == set(memory[200:]) == {9}


@pytest.mark.parametrize(
    "buffer",
    [
        np.empty(0, np.uint8),
        np.zeros(4, np.int8),
        np.zeros(4, np.float32),
        np.zeros(8, np.uint8)[::2],
    ],
    ids=["empty", "int8", "float32", "strided"],
)
def test_what_no_channel_carries_is_refused_before_it_is_posted(wires, buffer):
    """Empty, strided or other than uint8: ConfigError for sending and for receiving."""
    a, _ = wires.pair()
    for post in (a.send, a.receive):
        with pytest.raises(ConfigError, match="non-empty contiguous uint8"):
            post(buffer)


def test_a_buffer_of_another_size_is_an_error_and_overruns_nothing():
    """200 bytes meet a receive of 100 in memory: PeerError on both sides, no byte is written.

    Over gloo that ends the process, so offers settle all sizes before a buffer is posted.
    """
    a, b = Wires("memory", [], "").pair()
    memory = np.full(300, 9, np.uint8)
    works = b.receive(memory[:100]), a.send(pattern(200))
    for work in works:
        with pytest.raises(PeerError, match="200 bytes sent, 100 expected"):
            work.wait()
    assert set(memory) == {9}


@pytest.mark.parametrize("verb", ["send", "receive"])
def test_a_wait_ends_by_the_channels_deadline(wires, verb):
    """Nobody posts the other side: PeerError that names both ranks; later waits fail as well."""
    a, b = wires.pair(SHORT_S)
    # Large enough that no socket buffer swallows it.
    work = getattr(a, verb)(np.ones(1 << 24, np.uint8))
    with pytest.raises(PeerError, match=r"rank 0.*rank 1"):
        work.wait()
    with pytest.raises(PeerError):
        a.receive(np.ones(1, np.uint8)).wait()
    with pytest.raises(PeerError):
        b.receive(np.ones(1, np.uint8)).wait()


def test_connecting_alone_ends_by_its_deadline(wires):
    """The peer never comes: PeerError that names it."""
    with pytest.raises(PeerError, match="rank 1"):
        wires.connect(0, timeout_s=SHORT_S)


def test_a_closed_channel_takes_nothing_more(wires):
    """After close both verbs are refused; closing again does nothing."""
    a, _ = wires.pair()
    a.close()
    a.close()
    for post in (a.send, a.receive):
        with pytest.raises(PeerError, match="closed"):
            post(np.ones(3, np.uint8))


@pytest.mark.parametrize("closing", [0, 1])
def test_closing_ends_what_both_sides_have_posted(wires, closing):
    """Both sides wait for bytes, one closes: PeerError on both, long before the deadline (P22)."""
    ends = wires.pair()
    works = [end.receive(np.zeros(10, np.uint8)) for end in ends for _ in range(3)]
    ends[closing].close()
    for found in outcomes(6, lambda number: works[number].wait(), deadline_s=WAIT_S / 2):
        assert isinstance(found, PeerError)


def test_two_pairs_do_not_disturb_each_other(wires):
    """One pair breaks at its deadline, the other carries bytes before and after."""
    broken, whole = wires.pair(SHORT_S), wires.pair()

    def swap():
        got = np.zeros(9, np.uint8)
        work = whole[1].receive(got)
        whole[0].send(pattern(9)).wait()
        work.wait()
        return np.array_equal(got, pattern(9))

    assert swap()
    with pytest.raises(PeerError):
        broken[0].receive(np.zeros(5, np.uint8)).wait()
    assert swap()


def test_gloo_needs_a_torch_store():
    """A store of another kind is a ConfigError that names it."""
    with pytest.raises(ConfigError, match="MemoryStore"):
        GlooTransport().connect("x", 0, 1, MemoryStore(), 1.0)


def test_gloo_takes_the_interface_from_option_or_environment(monkeypatch):
    """The option goes before GLOO_SOCKET_IFNAME; an unknown one is named when it is given."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert GlooTransport("lo")._interface == "lo"
    assert GlooTransport()._interface is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert GlooTransport()._interface == "lo"
    with pytest.raises(ConfigError, match="network interface nosuch0"):
        GlooTransport("nosuch0")
