"""What was lost is made again while the job runs: after a restore, a lost rank, a failed save."""

from __future__ import annotations

import logging
import threading
from itertools import combinations

import pytest

import recovery.agenda
import replica.driver
import replica.idle
from recovery.layout import parse_redundancy
from recovery.manifest import WHOLE
from replica.errors import ArenaFull, StoreError
from replica.saver import Saver
from tests.replica.damage import copy_of, lose, renumbered, slots
from tests.replica.inprocess import COMMIT_S, DROP, Cluster, Member, all_of
from tests.replica.mend_tools import (
    MENDED_S,
    MendCluster,
    live_slot,
    mends,
    no_damage,
    places,
    protected,
    rot,
    strip,
    wanted,
)

FOUR = ["a", "b", "c", "d"]
PAIR = ["a", "b"]


def trained(arena_dir, nodes, redundancy, *steps, **options):
    """Run a job that commits these steps, then close it."""
    Cluster(arena_dir, nodes, redundancy, **options).run(lambda me: me.commit(*steps))


def report_of(rank, verb, what, by):
    """Whether a request is the report of rank ``by`` for a mend."""
    words = what.split("/")
    is_report = words[0] == "mend" and words[-2:] == ["report", str(by)]
    return rank == by and verb == "set" and is_report


LOSSES = [
    (FOUR, "stripe:2+1", ["b"], None),
    (FOUR, "stripe:2+1", ["a", "d"], None),
    (["a", "b", "c", "d", "e"], "stripe:3+1", ["c"], [3, 0, 200_000, 1, 64]),
    (PAIR, "copies:1", ["a"], None),
    (["a", "b", "c"], "stripe:1+1", ["b"], [0, 5000, 17]),
    (["a", "a", "b", "b"], "copies:1", ["a"], [100, 0, 70_000, 3]),
    (["a", "a", "b", "b", "c", "c"], "stripe:1+1", ["c"], None),
    (["a", "b", "c"], "copies:2", ["a", "b"], None),
]


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_restore_all_is_protected_again_without_a_save(arena_dir, loss, renumber):
    """Nodes are lost and restored; then the job mends, and any allowed loss more is survived.

    Sizes go with the rank, so that after a renumbering every owner's state is of its own size.
    """
    nodes, redundancy, lost, counts = loss
    trained(arena_dir, nodes, redundancy, 1, 2, counts=counts)
    lose(arena_dir, lost)
    fresh = renumbered(nodes, lost)
    after = fresh if renumber else [f"{n}-replacement" if n in lost else n for n in nodes]
    full = parse_redundancy(redundancy, len(set(nodes))).survivable_nodes

    def body(me):
        event = me.restore()
        assert event["step"] == 2
        assert event["protection"] < full
        assert protected(me)
        status = me.ckpt.status()
        assert (status["protection"], status["saves_committed"]) == (full, 0)
        assert status["mended"] == len(me.events.of("mend"))
        (told,) = me.events.of("mend")
        assert (told["outcome"], told["protection"], told["step"]) == ("done", full, 2)
        assert (told["why"], told["reason"], told["given_up_step"]) in [
            ("it was restored", "", None),
            ("another rank called for it", "", None),
        ]
        held = places(me, 2)
        assert len(held) == len(set(held))
        assert (me.rank, WHOLE) in held
        return len(held)

    held = MendCluster(arena_dir, after, redundancy, counts=counts).run(body)
    n = parse_redundancy(redundancy, len(set(nodes))).n
    assert sum(held) == len(nodes) * (1 + n)
    assert no_damage(arena_dir)
    for again in combinations(sorted(set(after)), full):
        with copy_of(arena_dir) as copy:
            lose(copy, again)
            more = [f"{node}-again" if node in again else node for node in after]
            events = Cluster(copy, more, redundancy, counts=counts).run(Member.restore)
            assert {event["step"] for event in events} == {2}


@pytest.mark.parametrize(("nodes", "redundancy"), [(["a"], "none"), (PAIR, "none")])
def test_without_redundancy_there_is_nothing_to_mend(arena_dir, nodes, redundancy):
    """No fragments, no mend: not one key of it is ever asked for."""
    asked = []

    def hook(rank, verb, what, value):
        if what.startswith("mend/"):
            asked.append((rank, verb, what))

    trained(arena_dir, nodes, redundancy, 1)
    cluster = MendCluster(arena_dir, nodes, redundancy, hook=hook, timeout_s=1.0)

    def body(me):
        me.restore()
        me.commit(2, 3)
        status = me.ckpt.status()
        assert (status["protected"], status["protection"]) == ("none", 0)
        assert me.events.of("mend") == []

    cluster.run(body)
    assert asked == []


def test_a_save_that_comes_during_a_mend_is_staged_at_once_and_commits(arena_dir):
    """The mend is held up by one rank: save() returns, and both end well once it goes on."""
    trained(arena_dir, FOUR, "stripe:2+1", 1)
    lose(arena_dir, ["c"])
    go = threading.Event()

    def hook(rank, verb, what, value):
        if report_of(rank, verb, what, by=2):
            assert go.wait(MENDED_S)

    cluster = MendCluster(arena_dir, ["a", "b", "n", "d"], "stripe:2+1", hook=hook)
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.restore()
        assert me.ckpt.status()["protected"] == "degraded"
        # All are in the mend before any of them begins a save.
        wait_mending(me)
        together.wait()
        me.train(2)
        ticket = me.ckpt.save(2)
        ticket.wait("staged", COMMIT_S)
        together.wait()
        assert not ticket.done
        go.set()
        ticket.wait("committed", COMMIT_S)
        assert [event["outcome"] for event in me.events.of("mend")] == ["done"]
        assert me.ckpt.status()["protected"] == "full"
        return places(me, 2) == wanted(me)

    assert all(cluster.run(body))
    assert no_damage(arena_dir)


def wait_mending(me):
    """Wait until this rank is in a mend."""
    driver = me.ckpt._engine.driver
    assert driver._changes.wait_for(lambda: bool(driver._mending), MENDED_S)


def test_what_is_staged_during_a_mend_is_not_overwritten_by_it(arena_dir):
    """An own copy rots, and while it is regrown into a free slot the next step is staged in one.

    The mend stands still at its plan until the step is staged: both then look for an own slot.
    """
    staged = threading.Event()

    def hook(rank, verb, what, value):
        if verb == "compare_set" and what.startswith("mend/") and what.endswith("/frozen"):
            assert staged.wait(MENDED_S)

    cluster = MendCluster(arena_dir, FOUR, "stripe:2+1", hook=hook)
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        if me.rank == 1:
            rot(me, 1, WHOLE, 1)
        wait_mending(me)
        together.wait()
        me.train(2)
        ticket = me.ckpt.save(2)
        together.wait()
        staged.set()
        ticket.wait("committed", COMMIT_S)
        assert mends(me)[0]["outcome"] == "done"
        return places(me, 2) == wanted(me)

    assert all(cluster.run(body))
    assert no_damage(arena_dir)
    events = Cluster(arena_dir, FOUR, "stripe:2+1").run(Member.restore)
    assert {event["step"] for event in events} == {2}


def test_a_rank_that_is_not_in_the_mend_ends_it_for_its_save(arena_dir):
    """Three ranks wait for the fourth's report, which has a save to do: given up at once, saved.

    Without that they would wait for half the deadline and then mend around a rank that lives.
    """
    blocked, submitted = threading.Event(), threading.Event()

    def hook(rank, verb, what, value):
        if rank == 3 and what == "mend/call" and blocked.is_set():
            assert submitted.wait(MENDED_S)

    cluster = MendCluster(arena_dir, FOUR, "stripe:2+1", hook=hook)
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        blocked.set()
        together.wait()
        if me.rank == 0:
            me.ckpt._engine.driver._idle.mender.agenda.call("the test wants one")
            me.ckpt._engine.driver.look()
        if me.rank != 3:
            wait_mending(me)
        together.wait()
        me.train(2)
        ticket = me.ckpt.save(2)
        together.wait()
        submitted.set()
        ticket.wait("committed", COMMIT_S)
        return me.events.of("mend")

    found = cluster.run(body)
    assert [[event["outcome"] for event in events] for events in found] == [["given up"]] * 3 + [[]]
    assert "rank 3 has a save to do" in found[0][0]["reason"]


def degraded_over_older(arena_dir):
    """Leave step 1 whole and step 2 in own copies only, on two nodes."""
    trained(arena_dir, PAIR, "copies:1", 1, 2)
    strip(arena_dir, 2, 2)


def test_a_better_protected_older_step_is_kept_until_the_restored_one_is_mended(arena_dir):
    """Step 2 survives no loss, step 1 one: no save until 2 does too, and 1 stays whole."""
    degraded_over_older(arena_dir)
    go = threading.Event()

    def hook(rank, verb, what, value):
        if report_of(rank, verb, what, by=1):
            assert go.wait(MENDED_S)

    cluster = MendCluster(arena_dir, PAIR, "copies:1", hook=hook)
    together = threading.Barrier(2, timeout=MENDED_S)

    def body(me):
        event = me.restore()
        assert (event["step"], event["protection"]) == (2, 0)
        wait_mending(me)
        together.wait()
        for step in (3, 4):
            ticket = me.ckpt.save(step)
            assert ticket.skipped
            assert ticket.reason.startswith("step 1 ")
            assert "is kept until the restored step is protected" in ticket.reason
        assert places(me, 1) == wanted(me)
        together.wait()
        inner = me.ckpt._engine.driver.wait_ready

        def wait_ready(timeout_s):
            go.set()
            return inner(timeout_s)

        me.ckpt._engine.driver.wait_ready = wait_ready
        me.train(5)
        ticket = me.ckpt.save(5, when_busy="wait")
        ticket.wait("committed", COMMIT_S)
        (told,) = me.events.of("mend")
        assert (told["outcome"], told["step"], told["protection"]) == ("done", 2, 1)
        status = me.ckpt.status()
        assert (status["committed_step"], status["saves_skipped"]) == (5, 2)
        return places(me, 2), places(me, 5)

    for rank, (older, newer) in enumerate(cluster.run(body)):
        assert older == newer == sorted([(rank, WHOLE), (1 - rank, 0)])
    assert no_damage(arena_dir)


def test_a_node_lost_before_the_mend_is_over_falls_back_to_the_kept_step(arena_dir):
    """The mend of step 2 never gets anywhere, saves are asked for, node a dies: step 1 is whole."""
    degraded_over_older(arena_dir)

    def hook(rank, verb, what, value):
        return DROP if report_of(rank, verb, what, by=1) else None

    cluster = MendCluster(arena_dir, PAIR, "copies:1", hook=hook)

    def body(me):
        me.restore()
        wait_mending(me)
        assert all(me.ckpt.save(step).skipped for step in range(3, 8))

    cluster.run(body)
    lose(arena_dir, ["a"])
    events = Cluster(arena_dir, ["n", "b"], "copies:1").run(Member.restore)
    assert {event["step"] for event in events} == {1}


def test_a_mend_that_cannot_be_done_is_told_and_does_not_stop_saves_for_ever(
    arena_dir, monkeypatch, caplog
):
    """Rank 1 has no room: after some attempts the older step is given up for saves, as an ERROR."""
    degraded_over_older(arena_dir)
    monkeypatch.setattr(recovery.agenda, "KEPT_ATTEMPTS", 2)
    inner = Saver._slot_for

    def no_room(self, work, offer, taken):
        if work.mends and self._job.rank == 1:
            raise ArenaFull("no room, says the test")
        return inner(self, work, offer, taken)

    monkeypatch.setattr(Saver, "_slot_for", no_room)
    cluster = MendCluster(arena_dir, PAIR, "copies:1", timeout_s=2.0)
    caplog.set_level(logging.ERROR, "planaria")

    def body(me):
        me.restore()
        first = mends(me)[0]
        assert (first["outcome"], first["protection"], first["given_up_step"]) == ("part", 0, None)
        assert "rank 1 refused fragment 0 of owner 0: no room, says the test" in first["reason"]
        assert me.ckpt.save(3).skipped
        second = mends(me, 2)[1]
        assert (second["outcome"], second["given_up_step"]) == ("part", 1)
        me.commit(4)
        assert me.ckpt.status()["protected"] == "full"

    cluster.run(body)
    errors = {record.getMessage() for record in caplog.records if record.levelno == logging.ERROR}
    assert len(errors) == 2  # each rank for its own memory
    assert all("could not be protected as well as the older step 1 in 2" in e for e in errors)
    assert no_damage(arena_dir)


def test_a_mend_that_failed_is_tried_again(arena_dir, monkeypatch):
    """A holder refuses once: the part that could be done is told, the next attempt ends it."""
    trained(arena_dir, FOUR, "stripe:2+1", 1)
    lose(arena_dir, ["d"])
    inner, refusals = Saver._slot_for, []

    def no_room(self, work, offer, taken):
        if work.mends and self._job.rank == 3 and not refusals:
            refusals.append(offer)
            raise ArenaFull("not now")
        return inner(self, work, offer, taken)

    monkeypatch.setattr(Saver, "_slot_for", no_room)

    def body(me):
        me.restore()
        assert protected(me)
        found = me.events.of("mend")
        assert [event["outcome"] for event in found] == ["part", "done"]
        assert found[0]["protection"] == 1
        assert found[1]["regrown_bytes"] == 0  # what was done stays done

    MendCluster(arena_dir, [*"abc", "n"], "stripe:2+1", timeout_s=2.0).run(body)


def test_survivors_of_a_lost_rank_mend_around_it_while_training_goes_on(arena_dir):
    """Five nodes, 2+1: rank 4 stops answering. The save aborts, and what it held is made again."""
    frozen, told = threading.Event(), threading.Event()

    def hook(rank, verb, what, value):
        if rank == 4 and frozen.is_set():
            assert told.wait(MENDED_S)
            raise StoreError("this rank is gone")

    nodes = [*"abcde"]
    cluster = MendCluster(arena_dir, nodes, "stripe:2+1", hook=hook, timeout_s=2.0)
    together, still = threading.Barrier(5, timeout=MENDED_S), threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        if me.rank == 4:
            frozen.set()
        together.wait()
        if me.rank == 4:
            told.wait(MENDED_S)
            return None
        me.train(2)
        ticket = me.ckpt.save(2)
        with pytest.raises(replica.SaveFailed, match="rank 4"):
            ticket.wait("committed", COMMIT_S)
        event = mends(me)[-1]
        assert event["outcome"] == "ranks lost"
        assert "rank 4 is lost" in event["reason"]
        status = me.ckpt.status()
        # Owner 4's copy is gone, its three fragments are not: one more may be lost.
        assert (status["protected"], status["protection"]) == ("degraded", 1)
        still.wait()
        found = places(me, 1)
        still.wait()
        told.set()
        return found

    found = cluster.outcomes(body)
    held = all_of(found[:4])
    for owner in range(4):
        fragments = [f for places in held for o, f in places if o == owner and f != WHOLE]
        assert sorted(fragments) == [0, 1, 2], f"owner {owner}"
    for gone in combinations("abcd", 1):
        with copy_of(arena_dir) as copy:
            lose(copy, [*gone, "e"])
            after = [f"{node}-again" if node in (*gone, "e") else node for node in nodes]
            events = Cluster(copy, after, "stripe:2+1").run(Member.restore)
            assert {event["step"] for event in events} == {1}


@pytest.mark.parametrize("how", ["restore", "close"])
def test_a_mend_gives_way_to_a_restore_and_to_the_end(arena_dir, monkeypatch, how):
    """One rank's report never comes: nobody waits for it when there is something better to do."""
    monkeypatch.setattr(replica.driver, "MEND_GRACE_S", 0.1)
    trained(arena_dir, FOUR, "stripe:2+1", 1)
    lose(arena_dir, ["b"])
    dropped = []

    def hook(rank, verb, what, value):
        if report_of(rank, verb, what, by=3) and not dropped:
            dropped.append(what)
            return DROP
        return None

    after = ["a", "n", "c", "d"]
    cluster = MendCluster(arena_dir, after, "stripe:2+1", hook=hook, timeout_s=MENDED_S * 4)
    found = []

    def body(me):
        me.restore()
        wait_mending(me)
        found.append(me.events)
        if how == "restore":
            assert me.restore()["step"] == 1
            assert protected(me)

    cluster.run(body)
    assert len(dropped) == 1
    for events in found:
        assert events.of("mend")[0]["outcome"] == "given up"
        assert events.of("mend")[0]["seconds"]["total"] < MENDED_S
    events = Cluster(arena_dir, after, "stripe:2+1").run(Member.restore)
    assert {event["step"] for event in events} == {1}


def test_what_a_mend_brought_beyond_the_usual_slots_is_given_back(arena_dir):
    """Renumbered ranks over kept arenas need slots more for a while; two commits later none."""
    nodes = ["a", "b", "c", "d", "e"]
    trained(arena_dir, nodes, "stripe:2+1", 1, 2)
    usual = Cluster(arena_dir, nodes, "stripe:2+1").run(usual_of)
    lose(arena_dir, ["a"])

    def body(me):
        me.restore()
        assert protected(me)
        most = len(me.job.arena.slots)
        me.commit(3, 4, 5)
        own = sum(slot.kind == "own" for slot in me.job.arena.slots.values())
        held = len(me.job.arena.slots) - own
        return most, own, held, 2 * len(me.job.layout.held_by(me.rank))

    found = MendCluster(arena_dir, renumbered(nodes, ["a"]), "stripe:2+1").run(body)
    for most, own, held, wanted_held in found:
        assert most >= own + held
        assert (own, held) == (2, wanted_held)
    assert sum(own + held for _, own, held, _ in found) == sum(usual)


def usual_of(me):
    """Return how many slots a rank has when nothing was ever mended."""
    me.restore()
    return len(me.job.arena.slots)


def test_another_redundancy_makes_no_second_kind_of_the_old_step(arena_dir):
    """Saved as stripe:2+1, run as copies:1: it stays as it is, and the next save is full."""
    trained(arena_dir, FOUR, "stripe:2+1", 1)
    lose(arena_dir, ["b"])

    def body(me):
        me.restore()
        # Three fragments and three whole copies: one loss more is survived, as copies:1 would.
        assert (me.ckpt.status()["protected"], me.ckpt.status()["protection"]) == ("full", 1)
        mender = me.ckpt._engine.driver._idle.mender
        assert (mender.agenda.due, mender.wanted()) == ("it was restored", "")
        kinds = {s.record.k for s in me.job.arena.slots.values() if s.record is not None}
        assert kinds <= {2}
        me.commit(2)
        assert not mender.foreign
        assert me.events.of("mend") == []
        assert me.ckpt.status()["protected"] == "full"

    MendCluster(arena_dir, ["a", "n", "c", "d"], "copies:1").run(body)
    assert no_damage(arena_dir)


def test_an_aborted_save_leaves_the_step_before_it_mended(arena_dir):
    """The bytes of save 2 never come: aborted, and what it has overwritten is none of step 1."""
    broken = threading.Event()

    def hook(rank, verb, what, value):
        if verb == "send" and rank == 2 and broken.is_set():
            broken.clear()
            raise ConnectionError("cut by the test")

    cluster = MendCluster(arena_dir, FOUR, "stripe:2+1", hook=hook, timeout_s=5.0)
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        broken.set()
        me.train(2)
        with pytest.raises(replica.SaveFailed):
            me.ckpt.save(2).wait("committed", COMMIT_S)
        event = mends(me)[-1]
        assert (event["step"], event["outcome"], event["protection"]) == (1, "done", 2)
        assert places(me, 1) == wanted(me)
        together.wait()
        me.commit(3)

    cluster.run(body)


def test_a_whole_shard_in_scratch_memory_finds_its_slot(arena_dir):
    """Renumbered ranks whose own slots are full restore through scratch memory, then keep it."""
    nodes = ["a", "b", "c", "d"]
    trained(arena_dir, nodes, "stripe:2+1", 1, 2)
    lose(arena_dir, ["a"])

    def body(me):
        me.restore()
        assert protected(me)
        assert live_slot(me, me.rank, WHOLE, 2) is not None
        return me.events.of("mend")[0]["regrown_bytes"]

    assert MendCluster(arena_dir, renumbered(nodes, ["a"]), "stripe:2+1").run(body) == [0] * 4
    whole = [slot for owner in range(4) for slot in slots(arena_dir, 2, owner, WHOLE)]
    assert len(whole) == 4
