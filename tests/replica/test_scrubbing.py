"""Idle memory is read again at a bounded rate; what rots there is withdrawn and made again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erasure.code import Code
from erasure.digest import CHUNK_BYTES, chunk_digests, root_digest
from recovery.manifest import WHOLE, Generation, SlotRecord, payload_bytes
from replica.scrub import TURN_BYTES_MAX, Scrubber
from tests.recovery.rigs import generation_of
from tests.replica.damage import own_slot, slots
from tests.replica.inprocess import COMMIT_S, Cluster, Member
from tests.replica.mend_tools import (
    MENDED_S,
    MendCluster,
    live_slot,
    mends,
    no_damage,
    places,
    protected,
    rot,
    verifies,
    wanted,
    withdraw,
)

FOUR = ["a", "b", "c", "d"]
BASE, OLDER = generation_of(2), generation_of(1)
CODE = Code(2, 1)


def fill(arena, rng, size, *, generation: Generation = BASE, fragment=WHOLE):
    """Make a slot with random bytes and a true record of them."""
    length = payload_bytes(CODE, fragment, size)
    slot = arena.allocate(length, "own" if fragment == WHOLE else "held")
    slot.data[:] = rng.integers(0, 256, length, dtype="uint8")
    spans = [CODE.span(i, size) for i in range(2)] if fragment == WHOLE else [(0, length)]
    digests = b"".join(chunk_digests(slot.data[start:stop]) for start, stop in spans)
    slot.write_record(
        SlotRecord(
            job="job",
            generation=generation,
            owner=0,
            world=4,
            k=2,
            m=1,
            fragment=fragment,
            shard_bytes=size,
            length=length,
            chunk_bytes=CHUNK_BYTES,
            chunk_digests=digests,
            shard_digest=root_digest(digests, size),
            fence_epoch=1,
        )
    )
    return slot


def turns(scrubber, count, *, every_s=1.0, start_s=0.0):
    """Take turns at even times; the slots found damaged."""
    found = []
    for turn in range(count):
        one = scrubber.turn(start_s + turn * every_s, (BASE,))
        found += [one[0].number] if one is not None else []
    return found


@pytest.fixture
def arena(open_arena):
    """Return an open arena without slots."""
    return open_arena()


def test_every_chunk_is_seen_round_and_round(arena, rng):
    """Whole shard and fragments of several chunks: each round reads them all once."""
    some = [
        fill(arena, rng, 3 * CHUNK_BYTES + 5),
        fill(arena, rng, 2 * CHUNK_BYTES + 1, fragment=0),
        fill(arena, rng, 0, fragment=2),
    ]
    total = sum(slot.record.length for slot in some)
    scrubber = Scrubber(arena, bytes_per_s=2.0 * CHUNK_BYTES)
    while scrubber.rounds < 2:
        assert turns(scrubber, 1, start_s=scrubber.verified_bytes) == []
    assert 2 * total <= scrubber.verified_bytes <= 3 * total


def test_a_flipped_bit_anywhere_is_found(arena, rng):
    """In each chunk of each slot in turn, at its first and last byte: that slot, and no other."""
    some = [fill(arena, rng, 2 * CHUNK_BYTES + 9), fill(arena, rng, CHUNK_BYTES + 7, fragment=1)]
    for slot in some:
        assert verifies(slot)
        for at in (0, slot.record.length // 2, slot.record.length - 1):
            slot.data[at] ^= 1
            assert not verifies(slot)
            scrubber = Scrubber(arena, bytes_per_s=1e9)
            assert turns(scrubber, 1) == [slot.number]
            slot.data[at] ^= 1
            assert turns(scrubber, 3, start_s=1.0) == []


@settings(max_examples=10)
@given(
    rate=st.floats(1.0, 40.0 * CHUNK_BYTES),
    waits_s=st.lists(st.floats(0.0, 30.0), max_size=12),
)
def test_the_rate_is_a_bound_whatever_the_turns(rate, waits_s):
    """At any rate and at turns at any times: never more than the rate, but for one chunk.

    The bytes are counted, not timed: the clock of the turns is the test's own.
    """
    scrubber = Scrubber(_Always(), rate)
    now_s = 5.0
    scrubber.turn(now_s, (BASE,))
    for wait_s in waits_s:
        before = scrubber.verified_bytes
        now_s += wait_s
        scrubber.turn(now_s, (BASE,))
        assert scrubber.verified_bytes - before <= TURN_BYTES_MAX + CHUNK_BYTES
        # One second's worth is given before the first turn.
        allowed = rate * (now_s - 5.0 + 1.0)
        assert scrubber.verified_bytes <= allowed + CHUNK_BYTES


class _Always:
    """An arena whose one slot never ends a round within a test: 64 chunks of zeros, shared."""

    def __init__(self):
        self.slots = {0: _ZEROS}


class _Zeros:
    number, busy, generation = 0, False, BASE

    def __init__(self):
        self.data = np.zeros(64 * CHUNK_BYTES, np.uint8)
        digests = chunk_digests(self.data)
        self.record = SlotRecord(
            job="job",
            generation=BASE,
            owner=0,
            world=4,
            k=2,
            m=1,
            fragment=0,
            shard_bytes=128 * CHUNK_BYTES,
            length=64 * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            chunk_digests=digests,
            shard_digest=b"\0" * 16,
            fence_epoch=1,
        )


_ZEROS = _Zeros()


def test_a_rate_of_nothing_reads_nothing(arena, rng):
    """Rate 0: not a byte is read, and no round is ever over."""
    fill(arena, rng, 100)
    scrubber = Scrubber(arena, bytes_per_s=0.0)
    assert turns(scrubber, 50) == []
    assert (scrubber.verified_bytes, scrubber.rounds) == (0, 0)


def test_only_what_lies_idle_is_read(arena, rng):
    """Another generation, an empty slot, and one under a receive: damaged, and left alone."""
    idle = fill(arena, rng, 1000)
    old = fill(arena, rng, 1000, generation=OLDER)
    busy, empty = fill(arena, rng, 1000, fragment=0), fill(arena, rng, 1000, fragment=1)
    for slot in (old, busy, empty):
        slot.data[3] ^= 1
    busy.hold()
    empty.invalidate()
    scrubber = Scrubber(arena, bytes_per_s=1e6)
    assert turns(scrubber, 5) == []
    assert scrubber.rounds > 0
    assert scrubber.verified_bytes == 1000 * scrubber.rounds
    busy.let_go()
    assert set(turns(scrubber, 5, start_s=9.0)) == {busy.number}
    assert verifies(idle)


@pytest.mark.parametrize(("owner", "fragment"), [(1, WHOLE), (0, 0)])
def test_what_rots_while_a_job_runs_is_withdrawn_and_made_again(arena_dir, owner, fragment):
    """A bit flips at rank 1, in its own copy or a fragment: told, counted, mended, all verify."""
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        if me.rank == 1:
            rot(me, owner, fragment, 1)
            assert me.events.wait_for(lambda: bool(me.events.of("scrub")))
            (event,) = me.events.of("scrub")
            assert (event["owner"], event["fragment"], event["step"]) == (owner, fragment, 1)
        told = mends(me)[0]
        assert (told["outcome"], told["protection"]) == ("done", 2)
        assert protected(me)
        status = me.ckpt.status()
        assert (status["slots_damaged"], status["mended"]) == (int(me.rank == 1), 1)
        assert places(me, 1) == wanted(me)
        together.wait()
        me.commit(2)

    MendCluster(arena_dir, FOUR, "stripe:2+1").run(body)
    assert no_damage(arena_dir)


def test_damage_beyond_mending_is_told_and_does_not_stop_saves(arena_dir):
    """Both copies of owner 0 rot, on two nodes: nobody has it any more; the next save commits."""
    together = threading.Barrier(2, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        rot(me, 0, WHOLE if me.rank == 0 else 0, 1)
        assert me.events.wait_for(lambda: me.ckpt.status()["protected"] == "none")
        assert me.events.wait_for(lambda: any(e["protection"] == -1 for e in me.events.of("mend")))
        together.wait()
        me.commit(2)
        status = me.ckpt.status()
        assert (status["committed_step"], status["protected"]) == (2, "full")

    MendCluster(arena_dir, ["a", "b"], "copies:1", timeout_s=3.0).run(body)
    assert no_damage(arena_dir)


def lose_live(me, owner, fragment, step):
    """Withdraw a live slot, as if it had never been there, and call for a mend."""
    live_slot(me, owner, fragment, step).invalidate()
    me.ckpt._engine.driver._idle.mender.agenda.call("the test took a slot away")
    me.ckpt._engine.driver.look()


def test_a_mend_finds_out_that_what_it_spreads_is_rotten(arena_dir):
    """No scrubbing: rank 0's own copy rots, and a fragment of it is to be made from that.

    The holder refuses the bytes by their digest; the owner looks, withdraws its copy, and the next
    mend grows it from the other fragments.
    """
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        if me.rank == 0:
            rot(me, 0, WHOLE, 1)
        together.wait()
        if me.rank == 1:
            lose_live(me, 0, 0, 1)
        assert me.events.wait_for(lambda: me.ckpt.status()["mended"] == 1)
        first, *_, last = me.events.of("mend")
        assert (first["outcome"], last["outcome"], last["protection"]) == ("failed", "done", 2)
        found = [(e["owner"], e["fragment"]) for e in me.events.of("scrub")]
        assert found == ([(0, WHOLE)] if me.rank == 0 else [])
        return places(me, 1) == wanted(me)

    options = {"scrub_bytes_per_s": 0.0, "timeout_s": 2.0}
    assert all(MendCluster(arena_dir, FOUR, "stripe:2+1", **options).run(body))
    assert no_damage(arena_dir)


def test_a_mend_finds_out_that_what_it_reads_is_rotten(arena_dir):
    """No scrubbing: owner 0's copy is gone, and of the fragments that it grows from one is rotten.

    Who served it looks, withdraws it, and the next mend reads the others.
    """
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        if me.rank == 1:
            rot(me, 0, 0, 1)
        together.wait()
        if me.rank == 0:
            lose_live(me, 0, WHOLE, 1)
        assert me.events.wait_for(lambda: me.ckpt.status()["mended"] == 1)
        assert [e["outcome"] for e in me.events.of("mend")] == ["failed", "done"]
        found = [(e["owner"], e["fragment"]) for e in me.events.of("scrub")]
        assert found == ([(0, 0)] if me.rank == 1 else [])
        return places(me, 1) == wanted(me)

    options = {"scrub_bytes_per_s": 0.0, "timeout_s": 2.0}
    assert all(MendCluster(arena_dir, FOUR, "stripe:2+1", **options).run(body))
    assert no_damage(arena_dir)


def test_a_rotten_own_copy_is_never_the_newest_good_one(arena_dir):
    """Of owner 0's step 2 only its own copy is left, and that rots: all ranks restore step 1."""
    Cluster(arena_dir, FOUR, "stripe:2+1").run(lambda me: me.commit(1, 2))
    for slot in slots(arena_dir, 2, 0):
        if slot.record.fragment in (0, 1):
            withdraw(slot)
    own_slot(arena_dir, 2, 0).flip(700)
    events = MendCluster(arena_dir, FOUR, "stripe:2+1").run(Member.restore)
    assert {event["step"] for event in events} == {1}
    assert all("passed over" in event["reason"] for event in events)


def test_a_save_is_not_held_up_by_scrubbing(arena_dir):
    """At a rate that never ends saves commit as ever, and what was read is not what they write."""

    def body(me):
        for step in range(1, 6):
            me.train(step)
            me.ckpt.save(step, when_busy="wait").wait("committed", COMMIT_S)
        assert me.ckpt.status()["slots_damaged"] == 0
        assert me.events.of("scrub") == []
        return [event["outcome"] for event in me.events.of("save")]

    cluster = MendCluster(arena_dir, ["a", "b"], "copies:1", scrub_bytes_per_s=1e12)
    assert cluster.run(body) == [["committed"] * 5] * 2
