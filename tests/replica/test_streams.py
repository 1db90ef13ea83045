"""Streams of fragments: chunks, trailers, the encode pass and its ring, and who wakes whom."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from erasure.code import Code
from erasure.codec import Codec
from erasure.digest import CHUNK_BYTES, chunk_digests, root_digest
from recovery.manifest import shard_digest
from replica.encode import RING_BLOCKS, EncodePass, ParityRing
from replica.errors import PeerError
from replica.store import MemoryStore
from replica.streams import IN_FLIGHT, Crew, chunks_of, receive_stream, send_stream
from replica.transports.memory import MemoryTransport
from tests.replica.inprocess import all_of, outcomes

WAIT_S = 20.0
CHUNK = CHUNK_BYTES
MANY = 5 * CHUNK + 12_345


def channels(timeout_s=WAIT_S):
    """Connect two ranks in memory."""
    transport, store = MemoryTransport(), MemoryStore()
    return all_of(
        outcomes(2, lambda rank: transport.connect("n", rank, 1 - rank, store, timeout_s))
    )


def random_bytes(size, seed=1):
    """Make uint8[size] of random bytes, whose period is no multiple of a chunk."""
    return np.resize(np.frombuffer(np.random.default_rng(seed).bytes(100_003), np.uint8), size)


def blocks_of(payload):
    """Return what gives chunk i of a payload."""
    return lambda i: payload[i * CHUNK : (i + 1) * CHUNK]


def trailer_of(payload, root=b"r" * 16):
    """Make the right trailer of a payload."""
    return chunk_digests(payload) + root


def transfer(payload, *, trailer=None, buffer=None):
    """Send a payload from one thread to another; (what the sender, what the receiver gave)."""
    a, b = channels(2.0)
    buffer = np.zeros(payload.size, np.uint8) if buffer is None else buffer
    sent = []

    def run(rank):
        if rank == 1:
            return receive_stream(b, buffer, lambda: None)
        words = trailer_of(payload) if trailer is None else trailer
        send_stream(a, payload.size, blocks_of(payload), sent.append, lambda: words)
        return sent

    return outcomes(2, run), buffer


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, MANY])
def test_a_payload_arrives_with_its_digests(size):
    """Empty, one byte, around a chunk and many chunks: bytes, digests and the order of ``sent``."""
    payload = random_bytes(size)
    (sent, got), buffer = transfer(payload)
    assert np.array_equal(buffer, payload)
    assert got.chunk_digests == chunk_digests(payload)
    assert got.shard_digest == b"r" * 16
    assert sent == list(range(chunks_of(size)))


def test_digests_are_of_what_arrived_and_not_of_what_was_told():
    """A trailer that lies about chunk 1 of 3 is refused, and the chunk is named."""
    payload = random_bytes(2 * CHUNK + 7)
    words = bytearray(trailer_of(payload))
    words[16] ^= 1
    (_, error), _ = transfer(payload, trailer=bytes(words))
    assert isinstance(error, PeerError)
    assert "digest of chunks [1] of 3 differs" in str(error)


def test_a_receiver_of_another_length_gets_an_error():
    """One byte more is expected than is sent: PeerError on the receiving side."""
    payload = random_bytes(100)
    found, _ = transfer(payload, buffer=np.zeros(101, np.uint8))
    assert isinstance(found[1], PeerError)


def test_posted_is_told_when_receives_stand_and_before_bytes_come():
    """``posted`` is called with the first buffers posted and nothing sent yet."""
    _, b = channels()
    posted = threading.Event()

    class Watching:
        """Counts posts."""

        posts = 0

        def receive(self, buffer):
            self.posts += 1
            return b.receive(buffer)

    watching = Watching()
    thread = threading.Thread(
        target=lambda: outcomes(
            1, lambda _: receive_stream(watching, np.zeros(MANY, np.uint8), posted.set)
        ),
        daemon=True,
    )
    thread.start()
    assert posted.wait(WAIT_S)
    assert watching.posts == IN_FLIGHT
    b.close()
    thread.join(WAIT_S)


def test_a_failed_receive_returns_only_when_no_buffer_is_posted_any_more():
    """The first of three receives fails: the others are waited for before it raises (P22)."""
    released, order = threading.Event(), []

    class Work:
        """A posted receive: the first fails, the others return when released."""

        def __init__(self, number):
            self.number = number

        def wait(self):
            if self.number == 0:
                order.append("failed")
                raise PeerError("cut")
            assert released.wait(WAIT_S)
            order.append(self.number)

    class Channel:
        """Hands out works by number."""

        count = 0

        def receive(self, _):
            self.count += 1
            return Work(self.count - 1)

    found = []

    def receive():
        found.extend(
            outcomes(1, lambda _: receive_stream(Channel(), np.zeros(MANY, np.uint8), lambda: None))
        )

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(0.05)
    assert found == []
    released.set()
    thread.join(WAIT_S)
    assert isinstance(found[0], PeerError)
    assert order == ["failed", 1, 2]


def test_a_crew_remembers_failures_and_waits_for_all():
    """One of three raises: its words are kept, its callback is called, the others end as well."""
    crew, failed, go = Crew(), [], threading.Event()

    def bad():
        raise PeerError("the peer is gone")

    crew.start("good", lambda: go.wait(WAIT_S), lambda: failed.append("good"))
    crew.start("bad", bad, lambda: failed.append("bad"))
    crew.start("odd", lambda: 1 // 0, lambda: failed.append("odd"))
    assert not crew.join(lambda: 0.01)
    assert crew.unfinished() >= {"good"}
    go.set()
    assert crew.join(lambda: WAIT_S)
    assert crew.failures["bad"] == "bad: the peer is gone"
    assert "division" in crew.failures["odd"]
    assert sorted(failed) == ["bad", "odd"]
    assert set(crew.failures) == {"bad", "odd"}


def encode_pass(code, shard, fragments=None, deadline_s=WAIT_S):
    """Make a pass over a shard that ends by a deadline."""
    count = code.n if fragments is None else fragments
    made = EncodePass(code, shard, ParityRing(code), range(count), time.monotonic)
    made.deadline_s = time.monotonic() + deadline_s
    return made


def collect(made, fragment):
    """Read one fragment as a sender does, IN_FLIGHT chunks at a time; (payload, trailer)."""
    parts, open_chunks = [], []
    for index in range(chunks_of(made.length(fragment))):
        if len(open_chunks) == IN_FLIGHT:
            made.sent(fragment, open_chunks.pop(0))
        parts.append(made.block(fragment, index).copy())
        open_chunks.append(index)
    for index in open_chunks:
        made.sent(fragment, index)
    return b"".join(part.tobytes() for part in parts), made.trailer(fragment)


CODES = [Code(1, 0), Code(1, 1), Code(1, 2), Code(2, 1), Code(3, 2), Code(6, 1)]


# The last ones go more than once around the ring.
PASSES = [(code, size) for code in CODES for size in (0, 1, 5, CHUNK, 2 * CHUNK + 1)]
PASSES += [(Code(1, 1), 6 * CHUNK), (Code(2, 1), 11 * CHUNK + 3), (Code(3, 2), 16 * CHUNK)]


@pytest.mark.parametrize(("code", "size"), PASSES)
def test_the_pass_gives_what_the_codec_gives(code, size):
    """Every fragment, read by its own thread, equals the codec's; digests are those of a shard."""
    shard = random_bytes(size)
    made = encode_pass(code, shard)
    found = {}

    def run(number):
        if number == code.n:
            made.run()
        else:
            found[number] = collect(made, number)

    all_of(outcomes(code.n + 1, run))
    data = [shard[slice(*code.span(i, size))] for i in range(code.k)]
    parity = [np.zeros(code.fragment_bytes(size), np.uint8) for _ in range(code.m)]
    Codec(code).encode(data, parity)
    digests = b"".join(chunk_digests(part) for part in data)
    assert made.chunk_digests == digests
    assert made.shard_digest == root_digest(digests, size) == shard_digest(digests, size)
    for index, part in enumerate(data + parity):
        payload, trailer = found[index]
        assert payload == part.tobytes()
        assert trailer == chunk_digests(part) + made.shard_digest


def test_without_fragments_to_send_nothing_waits():
    """A world of one digests its shard of many chunks with no sender and no encoding."""
    shard = random_bytes(MANY)
    made = encode_pass(Code(2, 1), shard, fragments=0)
    made.run()
    assert len(made.chunk_digests) == 6 * 16


def test_the_ring_waits_for_the_slowest_parity_sender():
    """Two parity senders, one idle: no block beyond the ring is made until it has sent."""
    code = Code(2, 2)
    made = encode_pass(code, random_bytes(2 * 6 * CHUNK))
    ended = []
    thread = threading.Thread(target=lambda: ended.extend(outcomes(1, lambda _: made.run())))
    thread.start()
    for index in range(RING_BLOCKS):
        made.block(2, index)
        made.sent(2, index)
    thread.join(0.05)
    assert made._produced == RING_BLOCKS
    made.block(3, 0)
    made.sent(3, 0)
    made.block(2, RING_BLOCKS)
    assert made._produced == RING_BLOCKS + 1
    made.fail()
    thread.join(WAIT_S)
    assert isinstance(ended[0], PeerError)


@contextmanager
def expecting_failure():
    """Expect that a wait ends because a sender failed."""
    with pytest.raises(PeerError, match="a sender failed"):
        yield


@pytest.mark.parametrize("where", ["encoder", "parity", "trailer"])
def test_a_failing_sender_wakes_everybody(where):
    """Whoever waits for senders, for parity or for digests ends long before the deadline."""
    made = encode_pass(Code(2, 1), random_bytes(2 * 6 * CHUNK))
    calls = {
        "encoder": made.run,
        "parity": lambda: made.block(2, 0),
        "trailer": lambda: made.trailer(0),
    }
    raised = threading.Event()

    def wait():
        with expecting_failure():
            calls[where]()
        raised.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    made.fail()
    assert raised.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_deadline_ends_a_wait_for_parity():
    """Nobody encodes: the sender's wait ends by the deadline and says so."""
    made = encode_pass(Code(2, 1), random_bytes(100), deadline_s=0.05)
    with pytest.raises(PeerError, match="waiting for parity: the deadline passed"):
        made.block(2, 0)


def test_one_bad_connection_ends_an_exchange_for_all_its_streams():
    """Three senders of one pass, one channel dead: all end, the pass too, and the cause is kept."""
    code, crew = Code(2, 1), Crew()
    made = encode_pass(code, random_bytes(2 * 6 * CHUNK))
    pairs = [channels() for _ in range(code.n)]
    pairs[2][1].close()
    buffers = [np.zeros(made.length(i), np.uint8) for i in range(code.n)]

    def start(i):
        sender, receiver = pairs[i]
        crew.start(
            f"sending {i}",
            lambda: send_stream(
                sender,
                made.length(i),
                lambda n: made.block(i, n),
                lambda n: made.sent(i, n),
                lambda: made.trailer(i),
            ),
            made.fail,
        )
        crew.start(
            f"receiving {i}",
            lambda: receive_stream(receiver, buffers[i], lambda: None),
            lambda: None,
        )

    for i in range(code.n):
        start(i)
    with expecting_failure():
        made.run()
    for sender, _ in pairs:
        sender.close()
    assert crew.join(lambda: WAIT_S)
    assert "rank 1 closed the channel" in crew.failures["sending 2"]
