"""Each start of a job has an epoch above all that anybody knows, and a nonce of its own (P12)."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.manifest import Generation
from replica.arena import Arena, read_arenas
from tests.replica.damage import lose, own_slot, slots
from tests.replica.inprocess import JOB, Cluster

THREE = ["a", "b", "c"]


def start(me):
    """Open the job on one rank; what it was agreed to be."""
    me.ckpt.start()
    return me.job.epoch, me.job.nonce


def started(arena_dir, nodes=THREE, stored=None):
    """Start a job and end it; (epoch, nonce), on which all ranks agree."""
    cluster = Cluster(arena_dir, nodes, "copies:1")
    if stored is not None:
        cluster.groups[0].store(None, 1.0).clone(JOB).set("epoch", stored)
    (agreed,) = set(cluster.run(start))
    left = cluster.groups[0].store(None, 1.0).clone(JOB).get(["epoch"])
    assert left == [str(agreed[0]).encode()]
    heads = {(view.head.epoch, view.head.nonce) for view in read_arenas(arena_dir, JOB)}
    assert heads == {agreed}
    return agreed


def trained(arena_dir, *steps):
    """Commit steps on three nodes."""
    Cluster(arena_dir, THREE, "copies:1").run(lambda me: me.commit(*steps))


def change_head(arena_dir, node, position=0, **changes):
    """Write other values into the head of a node's arena."""
    who = {"job": JOB, "node_id": node, "position": position, "rank": 0, "world": 1}
    arena = Arena.open(arena_dir, **who, timeout_s=5.0)
    arena.update_head(**changes)
    arena.close()


def test_every_start_counts_one_up_with_another_nonce(arena_dir):
    """Four starts: epochs 1 to 4 and four nonces, the same on all ranks, in all arenas."""
    agreed = [started(arena_dir) for _ in range(4)]
    assert [epoch for epoch, _ in agreed] == [1, 2, 3, 4]
    assert len({nonce for _, nonce in agreed}) == 4


@pytest.mark.parametrize("node", THREE)
def test_the_largest_head_of_any_rank_counts(arena_dir, node):
    """One arena was in an epoch that the others never saw: the next is above it, for all."""
    started(arena_dir)
    change_head(arena_dir, node, epoch=41)
    assert started(arena_dir)[0] == 42


@pytest.mark.parametrize("field", ["birth", "fence"])
def test_the_largest_record_of_any_slot_counts(arena_dir, field):
    """Heads are lost, and one slot tells of an epoch: its generation's, or that of its writing."""
    trained(arena_dir, 1, 2)
    slot = own_slot(arena_dir, 2, 1)
    record = slot.record
    if field == "birth":
        generation = Generation(60, record.generation.step, record.generation.id)
        slot.rewrite(replace(record, generation=generation))
    else:
        slot.rewrite(replace(record, fence_epoch=60))
    for path in Path(arena_dir).glob("planaria-*/*/*/*/head"):
        path.unlink()
    assert started(arena_dir)[0] == 61


def test_what_the_store_remembers_counts(arena_dir):
    """All arenas are gone and the store outlived the job: the epoch goes on from there."""
    assert started(arena_dir, stored=b"70")[0] == 71


def test_a_lost_arena_never_leads_back(arena_dir):
    """The one node that knew the newest epoch best is lost; the others are still above it."""
    for _ in range(3):
        started(arena_dir)
    lose(arena_dir, ["a"])
    assert started(arena_dir)[0] == 4
    lose(arena_dir, ["a", "b"])
    assert started(arena_dir, ["c", "d", "e"])[0] == 5


def test_arenas_of_ranks_that_are_no_more_count_too(arena_dir):
    """A node had three ranks and has one: what its other arenas know of epochs is still known."""
    Cluster(arena_dir, ["a", "a", "a", "b"], "copies:1").run(start)
    change_head(arena_dir, "a", position=2, epoch=9)
    epochs = {epoch for epoch, _ in Cluster(arena_dir, ["a", "b"], "copies:1").run(start)}
    assert epochs == {10}


def test_epoch_and_nonce_stand_in_every_arena_before_the_first_admission(arena_dir):
    """Looked at when the first rank asks whether step 1 is saved: all heads have them by then."""
    seen, lock = [], threading.Lock()

    def hook(rank, verb, key, value):
        if verb == "compare_set" and key.startswith("admit/"):
            with lock:
                seen.append({(v.head.epoch, v.head.nonce) for v in read_arenas(arena_dir, JOB)})

    cluster = Cluster(arena_dir, THREE, "copies:1", hook=hook)

    def save(me):
        me.commit(1)
        return me.job.epoch, me.job.nonce

    (agreed,) = set(cluster.run(save))
    assert seen
    assert all(heads == {agreed} for heads in seen)


def test_a_generation_keeps_the_epoch_of_its_birth(arena_dir):
    """Step 2 of epoch 1 is restored in epoch 2 and stays of epoch 1; step 3 is of epoch 2."""
    trained(arena_dir, 1, 2)

    def go_on(me):
        assert me.restore()["step"] == 2
        mine = me.job.arena.head.restored
        me.commit(3)
        return mine and mine.epoch

    assert set(Cluster(arena_dir, THREE, "copies:1").run(go_on)) <= {None, 1}
    births = {
        (slot.record.generation.step, slot.record.generation.epoch)
        for step in (2, 3)
        for owner in range(3)
        for slot in slots(arena_dir, step, owner)
    }
    assert births == {(2, 1), (3, 2)}
    fences = {slot.record.fence_epoch for owner in range(3) for slot in slots(arena_dir, 3, owner)}
    assert fences == {2}


@pytest.mark.parametrize("raw", [b"", b"-1", b"x", b"9" * 19, b"1e3", b"\xff"])
def test_a_store_that_remembers_nonsense_is_refused_by_all(arena_dir, raw):
    """The store's epoch is no number: StoreError on every rank, naming job and value."""
    cluster = Cluster(arena_dir, THREE, "copies:1", timeout_s=5.0)
    cluster.groups[0].store(None, 1.0).clone(JOB).set("epoch", raw)
    errors = {(type(e).__name__, str(e)) for e in cluster.outcomes(start)}
    ((kind, words),) = errors
    assert kind == "StoreError"
    assert "rank 0: the store's epoch of job 'job'" in words
