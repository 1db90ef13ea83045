"""Faults of the way and of one rank alone in a restore: all end together, no step is given up."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from recovery.session import RestoreAborted
from replica import fetch, opening
from replica.arena import OWN
from replica.errors import ConfigError, PeerError, SaveFailed, StateError, StoreError
from tests.replica.damage import lose
from tests.replica.inprocess import Cluster

TWO = ["a", "b"]


@pytest.fixture
def trained(arena_dir):
    """Return arenas of two nodes that hold steps 1 and 2, both committed."""
    Cluster(arena_dir, TWO, "copies:1").run(lambda me: me.commit(1, 2))
    return arena_dir


class FailingSends:
    """A hook: the first ``count`` bulk buffers that rank 1 sends do not leave."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, rank, verb, *_):
        """Let it pass, or fail."""
        if (rank, verb) == (1, "send") and self.left > 0:
            self.left -= 1
            raise PeerError("a fault of the network made by the test")


def test_a_fault_of_the_way_costs_no_step(trained):
    """The only source of owner 0 cannot send at first: it is asked again, and step 2 comes back."""
    lose(trained, ["a"])
    events = Cluster(trained, ["new", "b"], "copies:1", hook=FailingSends(1), timeout_s=4.0).run(
        lambda me: me.restore()
    )
    assert {event["step"] for event in events} == {2}


def test_a_way_that_stays_closed_is_no_reason_to_start_over(trained):
    """The only source never gets through: RestoreAborted everywhere, and not step 1 or none."""
    lose(trained, ["a"])
    cluster = Cluster(trained, ["new", "b"], "copies:1", hook=FailingSends(99), timeout_s=4.0)
    for error in cluster.outcomes(lambda me: me.restore()):
        assert isinstance(error, RestoreAborted)
        assert "step 2" in str(error)


class Moody(torch.nn.Linear):
    """A module that can be told to fail when it is asked for its state."""

    trouble = False

    def state_dict(self, *args, **kwargs):
        """Give the state, or trouble."""
        if self.trouble:
            raise KeyError("trouble made by the test")
        return super().state_dict(*args, **kwargs)


def test_what_a_users_object_raises_before_the_vote_all_ranks_hear_at_once(arena_dir):
    """Rank 1's module raises while the shard is compared with it: RestoreAborted names the rank."""

    def train(me):
        me.state["m"] = Moody(2, 2)
        me.commit(1)

    def restore(me):
        me.state["m"] = Moody(2, 2)
        me.ckpt.start()
        me.state["m"].trouble = me.rank == 1
        return me.ckpt.restore()

    Cluster(arena_dir, TWO, "copies:1").run(train)
    for error in Cluster(arena_dir, TWO, "copies:1").outcomes(restore):
        assert isinstance(error, RestoreAborted | StateError)
        assert "rank 1" in str(error)
        assert "trouble" in str(error)


def test_memory_that_cannot_be_had_on_one_rank_is_told_to_all(trained, monkeypatch):
    """Rank 0 has no scratch memory for its shard: both end at once, and the next try restores."""
    lose(trained, ["a"])
    real = fetch.Fetcher._target

    def target(self, mine):
        if mine.owner == 0:
            raise MemoryError("no memory, says the test")
        return real(self, mine)

    monkeypatch.setattr(fetch.Fetcher, "_target", target)

    def restore(me):
        with pytest.raises(RestoreAborted, match="rank 0: MemoryError: no memory"):
            me.ckpt.restore()
        meet.wait(20)
        monkeypatch.setattr(fetch.Fetcher, "_target", real)
        return me.restore()["step"]

    meet = threading.Barrier(2)
    assert Cluster(trained, ["new", "b"], "copies:1").run(restore) == [2, 2]


def test_a_network_interface_that_one_node_lacks_is_refused_by_all(arena_dir):
    """Rank 1 cannot make its transport: start() raises ConfigError on both, naming it."""
    cluster = Cluster(arena_dir, TWO, "copies:1", hook=lambda *_: None)

    def refuse(_):
        raise ConfigError("network interface ib7: no such device")

    cluster.groups[1].transport = refuse
    for error in cluster.outcomes(lambda me: me.ckpt.start()):
        assert isinstance(error, ConfigError)
        assert "rank 1: network interface ib7" in str(error)


def test_a_step_saved_again_after_a_restore_is_another_generation(arena_dir):
    """Rank 1 missed step 1's admission and is one behind: after a restore step 1 commits anew."""
    missed = threading.Event()

    def hook(rank, verb, key, value):
        if (rank, verb, key) == (1, "compare_set", "admit/0/1") and not missed.is_set():
            missed.set()
            raise StoreError("a fault made by the test")
        if (rank, verb, key) == (0, "compare_set", "admit/2/1"):
            assert second.wait(20)

    def body(me):
        ticket = me.ckpt.save(1)
        assert ticket.skipped == (me.rank == 1)
        if me.rank == 0:
            with pytest.raises(SaveFailed):
                ticket.wait("committed", 20)
        meet.wait(20)
        me.restore()
        ticket = me.ckpt.save(1)
        second.set()
        ticket.wait("committed", 20)

    second, meet = threading.Event(), threading.Barrier(2)
    Cluster(arena_dir, TWO, "copies:1", hook=hook, timeout_s=1.0).run(body)


def test_a_restored_step_is_not_saved_over_itself(trained):
    """In one process: step 2 is restored, then saved again: skipped, lower ones are refused."""

    def body(me):
        me.restore()
        me.commit(3, 4)
        assert me.restore()["step"] == 4
        assert me.ckpt.save(4).skipped
        with pytest.raises(ConfigError, match="step 3 comes after step 4"):
            me.ckpt.save(3)
        me.commit(5)

    Cluster(trained, TWO, "copies:1").run(body)


def test_what_failed_to_load_twice_is_not_tried_again_after_a_step_back(trained):
    """Step 2 failed twice, step 1 was restored and the job ended: the next start takes 1 too."""

    def fail_twice(me):
        me.ckpt.start()
        (newest,) = {s.record.generation for s in me.job.arena.slots.values() if s.record} - {
            min(s.record.generation for s in me.job.arena.slots.values() if s.record)
        }
        me.job.arena.update_head(attempts=((newest.id, "0" * 32, 2),))
        return me.restore()["step"]

    assert Cluster(trained, TWO, "copies:1").run(fail_twice) == [1, 1]
    assert Cluster(trained, TWO, "copies:1").run(lambda me: me.restore()["step"]) == [1, 1]


def test_arenas_beyond_the_ranks_that_a_node_has_now_are_read_too(arena_dir):
    """Node a had three ranks and has one, b one and now three: every rank gets its own, twice."""
    Cluster(arena_dir, ["a", "a", "a", "b"], "copies:1").run(lambda me: me.commit(1, 2))
    lose(arena_dir, ["b"])

    def go_on(me):
        assert me.restore()["step"] == 2
        me.commit(3)

    Cluster(arena_dir, ["a", "c", "c", "c"], "copies:1").run(lambda me: me.restore())
    Cluster(arena_dir, ["a", "c", "c", "c"], "copies:1").run(go_on)
    lose(arena_dir, ["c"])
    nodes = ["a", "a", "d", "d"]
    events = Cluster(arena_dir, nodes, "copies:1").run(lambda me: me.restore())
    assert {event["step"] for event in events} == {3}


def test_a_restore_in_a_running_process_lowers_the_protection_that_is_told(trained):
    """Rank 0's own copy of step 3 is bad and step 3 comes from b: one more node and it is lost."""

    def body(me):
        me.commit(3)
        assert me.ckpt.status()["protection"] == 1
        if me.rank == 0:
            for slot in me.job.arena.slots.values():
                if slot.kind == OWN and slot.record and slot.record.generation.step == 3:
                    slot.data[300] ^= 1
        assert me.restore()["step"] == 3
        (event,) = [e for e in me.events if e["event"] == "restore"]
        assert event["protection"] == 0
        me.commit(4)
        assert me.ckpt.status()["protection"] == 1

    Cluster(trained, TWO, "copies:1").run(body)


def test_one_node_id_on_two_machines_is_refused_by_all(arena_dir, monkeypatch):
    """Both ranks say node a and see different memories: what one keeps the other cannot read."""
    count, real = itertools.count(7), opening.memory_facts

    def facts(directory):
        return replace(real(directory), boot_id=f"machine {next(count)}")

    monkeypatch.setattr(opening, "memory_facts", facts)
    for error in Cluster(arena_dir, ["a", "a"], "none").outcomes(lambda me: me.ckpt.start()):
        assert isinstance(error, ConfigError)
        assert "node id 'a'" in str(error)
