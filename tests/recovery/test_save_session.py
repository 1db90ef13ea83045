"""Save sessions of several ranks in a small world: whatever fails, one decision that all obey."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.actions import Await, CompareSet, Got, Missing, Publish
from recovery.commit import (
    Connect,
    Exchange,
    ExchangeResult,
    Prepared,
    SaveContext,
    SaveOutcome,
    Settle,
    decision_key,
    held_root,
    save_session,
)
from recovery.ledger import ABORTED, COMMITTED, HELD
from recovery.manifest import WHOLE
from recovery.offer import encode_offer
from recovery.tree import dump
from tests.recovery.rigs import SaveRig, generation_of, layout_of, sweep
from tests.recovery.world import Early, Returned, Silent, StoreDown, World

CONFIGS = [
    ("copies:1", (1, 1)),
    ("copies:2", (1, 1, 1)),
    ("stripe:1+1", (1, 1, 1)),
    ("copies:1", (2, 2)),
    ("stripe:2+1", (1, 1, 1, 1)),
    ("stripe:3+1", (1, 1, 1, 1, 1)),
    ("stripe:1+1", (2, 2, 2)),
]
configs = pytest.mark.parametrize(("redundancy", "nodes"), CONFIGS)


def run(rig, seed, *faults, store=None, one_deadline=True):
    """Run the save of every rank; check what must hold whatever the faults."""
    world = World(seed, rig.sessions(), faults=faults, store=store, one_deadline=one_deadline)
    results = world.run()
    check(rig, world, results)
    return world, results


def check(rig, world, results):
    """Check that all obey one decision, and that committed means held by everybody, everywhere."""
    assert [r for r in results.values() if not isinstance(r, Returned)] == []
    ended = {r.value.state for r in results.values()} - {HELD}
    decision = rig.decision(world.store)
    assert ended <= ({decision[0]} if decision else set())
    if decision and decision[0] == COMMITTED:
        for rank in rig.sessions():
            wanted = {(rank, WHOLE), *((f.owner, f.index) for f in rig.layout.held_by(rank))}
            assert rig.sealed[rank] == wanted
            assert f"held/{rig.generation.id}/0/{rank}" in world.store
            assert rank in rig.prepared


def states(results):
    """Return how the generation ended, by rank."""
    return {rank: result.value.state for rank, result in results.items()}


def named(reason):
    """Return every rank that a reason names."""
    lists = re.findall(r"\branks? (\d+(?:, \d+)*)", reason)
    return {int(number) for text in lists for number in text.split(", ")}


def places_in(redundancy, nodes, kind=None):
    """Return (rank, number) of every action, or those of one kind, when nothing fails."""
    world, _ = run(SaveRig(layout_of(redundancy, *nodes)), 0)
    return world.places(kind)


@configs
@pytest.mark.parametrize("one_deadline", [True, False])
def test_without_faults_every_rank_commits(redundancy, nodes, one_deadline):
    """Twenty orders of turns: every rank is HELD, the one decision is committed, all read it."""
    for seed in range(20):
        rig = SaveRig(layout_of(redundancy, *nodes))
        _, results = run(rig, seed, one_deadline=one_deadline)
        assert states(results) == dict.fromkeys(rig.sessions(), COMMITTED)
        assert all(result.value.held for result in results.values())


def test_a_world_of_one_without_redundancy_commits_alone():
    """Nobody to wait for: the session ends committed by itself."""
    rig = SaveRig(layout_of("none", 1))
    _, results = run(rig, 0)
    assert states(results) == {0: COMMITTED}


@sweep
def test_a_rank_silent_at_any_action_is_named_and_nothing_is_half_committed(
    redundancy, nodes, one_deadline
):
    """One rank stops before each of its actions: the others end alike, and an abort names it."""
    aborts = commits = 0
    for silent, at in places_in(redundancy, nodes):
        rig = SaveRig(layout_of(redundancy, *nodes))
        fault = Silent(silent, at)
        world, results = run(rig, at, fault, one_deadline=one_deadline)
        assert world.fired[fault] == 1
        word, reason = rig.decision(world.store)
        assert states(results) == dict.fromkeys(rig.sealed.keys() - {silent}, word)
        if word == ABORTED:
            aborts += 1
            assert silent in named(reason), (fault, reason)
        commits += word == COMMITTED
    assert aborts > 5
    assert commits > 0  # silent after HELD: the others do not need it any more


@configs
def test_a_refused_slot_aborts_and_is_named(redundancy, nodes):
    """A holder answers NO: neither it nor the owner moves a byte, all abort with its words."""
    layout = layout_of(redundancy, *nodes)
    fragment = layout.sent_by(0)[-1]
    for seed in range(10):
        rig = SaveRig(layout, refused={(fragment.holder, 0): "full: 5 of 9 bytes"})
        world, results = run(rig, seed)
        assert set(states(results).values()) == {ABORTED}
        assert "full: 5 of 9 bytes" in rig.decision(world.store)[1]
        assert rig.sending.isdisjoint({0, fragment.holder})


@configs
def test_a_wrong_digest_acknowledged_aborts_and_names_the_holder(redundancy, nodes):
    """A holder verified other bytes than the owner's: its acknowledgement does not count."""
    layout = layout_of(redundancy, *nodes)
    holder = layout.sent_by(0)[0].holder
    for seed in range(10):
        rig = SaveRig(layout, misread=[(holder, 0)])
        world, results = run(rig, seed)
        assert set(states(results).values()) == {ABORTED}
        assert f"rank {holder} acknowledged another" in rig.decision(world.store)[1]


@configs
def test_held_from_another_incarnation_of_an_arena_does_not_count(redundancy, nodes):
    """Each rank's arena in turn is a new one: nothing is committed (P4)."""
    layout = layout_of(redundancy, *nodes)
    for rank in range(layout.topology.world):
        rig = SaveRig(layout, incarnations={rank: "f" * 32})
        world, results = run(rig, rank)
        assert set(states(results).values()) == {ABORTED}
        assert "not the one agreed at start-up" in rig.decision(world.store)[1]


@sweep
@pytest.mark.parametrize(("applied", "count"), [(True, 1), (False, 10**6)])
def test_a_rank_that_loses_the_store_is_undecided_and_resolves_like_the_others(
    redundancy, nodes, one_deadline, applied, count
):
    """The store fails one rank at each of its actions, answer lost or request lost (P1)."""
    for rank, at in places_in(redundancy, nodes):
        rig = SaveRig(layout_of(redundancy, *nodes))
        fault = StoreDown(rank, at, applied, count)
        world, results = run(rig, at, fault, one_deadline=one_deadline)
        if world.fired[fault] == 0:  # an action between two nodes, and the last one
            continue
        assert states(results)[rank] == HELD
        after, results = resolved(rig, world, rank)
        assert {r.value.state for r in results.values()} == {rig.decision(after.store)[0]}


def resolved(rig, world, *undecided):
    """Resolve the undecided ranks over the store as it is; all results together."""
    after = World(0, rig.resolves(undecided), store=world.store)
    results = {**world.results, **after.run()}
    check(rig, after, results)
    return after, results


@sweep
def test_a_rank_that_loses_the_store_while_it_aborts_is_undecided_too(
    redundancy, nodes, one_deadline
):
    """The deadline passes at each wait and the store with it: no exception, and resolve works."""
    seen = 0
    for seed, (rank, at) in product(range(3), places_in(redundancy, nodes, Await)):
        rig = SaveRig(layout_of(redundancy, *nodes))
        early, down = Early(rank, at), StoreDown(rank, at + 1)
        world, results = run(rig, seed, early, down, one_deadline=one_deadline)
        if not (world.fired[early] and world.fired[down]):
            continue
        seen += 1
        assert states(results)[rank] == HELD
        _, results = resolved(rig, world, rank)
        assert len(set(states(results).values())) == 1
    assert seen > layout_of(redundancy, *nodes).topology.world


@sweep
def test_a_clock_that_runs_ahead_at_any_wait_splits_nobody(redundancy, nodes, one_deadline):
    """Each wait of each rank ends early once: committed or aborted, but the same for all."""
    fired = 0
    for seed, (rank, at) in product(range(3), places_in(redundancy, nodes, Await)):
        rig = SaveRig(layout_of(redundancy, *nodes))
        fault = Early(rank, at)
        world, results = run(rig, seed, fault, one_deadline=one_deadline)
        fired += world.fired[fault]
        assert len(set(states(results).values())) == 1
    assert fired > layout_of(redundancy, *nodes).topology.world


@st.composite
def faults_of_three(draw):
    """Draw up to five faults over the ranks of three nodes."""
    rank, at = st.integers(0, 2), st.integers(0, 16)
    kind = st.one_of(
        st.builds(Silent, rank, at),
        st.builds(Early, rank, at),
        st.builds(StoreDown, rank, at, st.booleans(), st.integers(1, 3)),
    )
    return tuple(draw(st.lists(kind, max_size=5)))


@given(
    faults=faults_of_three(),
    seed=st.integers(0, 1000),
    one_deadline=st.booleans(),
    redundancy=st.sampled_from(["copies:1", "copies:2", "stripe:1+1"]),
)
def test_any_faults_together_leave_one_decision(faults, seed, one_deadline, redundancy):
    """Random faults at random ranks: one decision, obeyed by all who speak, also after resolve."""
    rig = SaveRig(layout_of(redundancy, 1, 1, 1))
    world, results = run(rig, seed, *faults, one_deadline=one_deadline)
    undecided = [rank for rank, state in states(results).items() if state == HELD]
    _, results = resolved(rig, world, *undecided)
    assert len(set(states(results).values())) <= 1


def test_a_late_rank_that_aborts_a_committed_generation_obeys_the_commit():
    """The sequence of P1 by hand: HELD, no decision at the deadline, abort, and the key answers."""
    layout = layout_of("copies:1", 1, 1)
    generation = generation_of(2)
    context = SaveContext(
        rank=1,
        layout=layout,
        generation=generation,
        base=None,
        shard_bytes=9,
        incarnation="b" * 32,
        held_root=held_root(["a" * 32, "b" * 32]),
    )
    session, sent = save_session(context), layout.sent_by(1)
    assert session.send(None).key == f"offer/{generation.id}/1"
    offers = session.send(None)
    offer = dump({**json_of(SaveRig(layout), 0), "base": ""})
    assert session.send(got(offers, offer)) == Connect((0,))
    settle = session.send({})
    assert isinstance(settle, Settle)
    ready = session.send({offer.fragment: "" for offer in settle.offers})
    assert ready == Publish(f"ready/{generation.id}/0/0", b"")
    assert session.send(got(session.send(None), b"")) == Exchange(sent)
    mine = b"d" * 16
    ack = session.send(ExchangeResult(mine, {layout.held_by(1)[0]: b"e" * 16}))
    assert ack == Publish(f"ack/{generation.id}/0/0", b"e".hex().encode() * 16)
    assert session.send(got(session.send(None), mine.hex().encode())) == Prepared()
    held = session.send(None)
    assert held == Publish(f"held/{generation.id}/0/1", b"b" * 32)
    waiting = session.send(None)
    assert waiting == Await((decision_key(generation),), "the decision")
    action = session.send(Missing(waiting.keys))
    while isinstance(action, Await):  # whom to name: a look, no wait
        assert action.look
        action = session.send(Missing(action.keys))
    assert isinstance(action, CompareSet)
    assert action.value.startswith(b"aborted:rank 1: no decision")
    with pytest.raises(StopIteration) as end:
        session.send(b"committed")
    assert end.value.value == SaveOutcome(COMMITTED, "", held=True)


def got(action, value):
    """Return the answer that every awaited key has ``value``."""
    assert isinstance(action, Await), action
    return Got(dict.fromkeys(action.keys, value))


def json_of(rig, rank):
    """Return the offer that a rank publishes, as plain values."""
    code = rig.layout.redundancy.code
    return json.loads(encode_offer(code, rig.sizes[rank], rig.base))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "shard of None bytes"),
        ({"shard_bytes": -1}, "shard of -1 bytes"),
        ({"shard_bytes": True}, "shard of True bytes"),
        ({"shard_bytes": 1 << 60}, "bytes"),
        ({"k": 7}, "('k', 7)"),
        ({"base": "0" * 32}, "base"),
        ({"format": 9}, "('format', 9)"),
        ({"algorithm": "crc"}, "crc"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
    ],
)
def test_an_offer_that_is_not_valid_aborts_and_names_its_rank(change, words):
    """Rank 1 offers other code, base, format or plain garbage: rank 0 aborts, naming it."""
    rig = SaveRig(layout_of("copies:1", 1, 1))
    raw = change if isinstance(change, bytes) else dump({**json_of(rig, 1), **change})

    def rogue():
        yield Publish("wire/up/1/0", b"")
        yield Publish(f"offer/{rig.generation.id}/1", raw)

    sessions = {**rig.sessions(), 1: rogue()}
    world = World(0, sessions)
    results = world.run()
    assert results[0].value.state == ABORTED
    reason = rig.decision(world.store)[1]
    assert "rank 1" in reason
    assert words in reason
