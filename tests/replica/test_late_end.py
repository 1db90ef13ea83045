"""A background thread that ends later than ``close`` could wait for gives the arena back itself."""

from __future__ import annotations

import threading

import pytest

from replica.arena import Arena
from replica.errors import ArenaBusy, SaveFailed
from tests.replica.inprocess import JOB, Cluster
from tests.replica.mend_tools import MENDED_S


class Cut:
    """A link to the store that is cut for the background thread until it is mended."""

    def __init__(self):
        self.is_cut, self.mended, self.stuck = (threading.Event() for _ in range(3))

    def __call__(self, *_request):
        """Hold a request of the background thread up, as a store does that falls silent."""
        if self.is_cut.is_set() and "driver" in threading.current_thread().name:
            self.stuck.set()
            assert self.mended.wait(MENDED_S)


def reopen(arena_dir, arena):
    """Open the arena again as the next process of the job does."""
    head = arena.head
    Arena.open(
        arena_dir,
        job=JOB,
        node_id=head.node_id,
        position=head.position,
        rank=head.rank,
        world=head.world,
        timeout_s=0.0,
    ).close()


def test_the_arena_is_given_back_by_who_ends_last(arena_dir):
    """Cut off from the store, close returns by its deadline and the arena stays locked.

    When the link is back the thread ends, and the arena can be opened in the same process.
    """
    cut = Cut()

    def body(me):
        me.commit(1)
        driver, arena = me.ckpt._engine.driver, me.job.arena
        cut.is_cut.set()
        me.train(2)
        ticket = me.ckpt.save(2, when_busy="wait")
        assert cut.stuck.wait(MENDED_S)
        me.ckpt.close()
        with pytest.raises(SaveFailed):
            ticket.wait("committed", 1.0)
        with pytest.raises(ArenaBusy, match="open in this process"):
            reopen(arena_dir, arena)
        cut.mended.set()
        driver._thread.join(MENDED_S)
        assert not driver._thread.is_alive()
        reopen(arena_dir, arena)

    Cluster(arena_dir, ["a"], "none", hook=cut, timeout_s=1.0).run(body)


@pytest.mark.parametrize("held", [False, True])
def test_no_arena_is_closed_under_a_receive(arena_dir, held):
    """A receive into a slot that has not returned keeps the arena, and no longer than that."""

    def body(me):
        me.commit(1)
        driver, arena = me.ckpt._engine.driver, me.job.arena
        slot = next(iter(arena.slots.values()))
        if held:
            slot.hold()
        me.ckpt.close()
        assert driver._thread.is_alive() is held
        if held:
            with pytest.raises(ArenaBusy, match="open in this process"):
                reopen(arena_dir, arena)
            slot.let_go()
            driver._thread.join(MENDED_S)
        reopen(arena_dir, arena)

    Cluster(arena_dir, ["a"], "none", timeout_s=1.0).run(body)
