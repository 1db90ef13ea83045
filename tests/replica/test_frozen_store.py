"""A store that answers nothing any more: what the training thread asks of it ends by a deadline."""

from __future__ import annotations

import threading
import time

import pytest

from erasure.errors import PlanariaError
from replica.errors import StoreError
from tests.replica.damage import lose
from tests.replica.inprocess import Cluster

TIMEOUT_S = 1.0


class Frozen:
    """A hook: rank 0's requests for keys that start so wait until ``thaw``."""

    def __init__(self, start: str) -> None:
        self.start, self._over = start, threading.Event()

    def __call__(self, rank, verb, key, _):
        """Let it pass, or wait."""
        if rank == 0 and verb in ("check", "set", "get") and key.startswith(self.start):
            self._over.wait(40)

    def thaw(self):
        """All requests get their answers."""
        self._over.set()


@pytest.fixture
def frozen():
    """Make hooks that are thawed with the test."""
    made = []

    def make(start):
        made.append(Frozen(start))
        return made[-1]

    yield make
    for one in made:
        one.thaw()


def test_a_store_that_is_frozen_at_the_start_is_an_error_on_all_ranks(arena_dir, frozen):
    """Rank 0's question for the epoch gets no answer: start() raises on both, by the deadline."""
    cluster = Cluster(arena_dir, ["a", "b"], "copies:1", hook=frozen("epoch"), timeout_s=TIMEOUT_S)
    started = time.monotonic()
    for error in cluster.outcomes(lambda me: me.ckpt.start(), deadline_s=15):
        assert isinstance(error, PlanariaError)
        assert "store did not answer" in str(error)
    assert time.monotonic() - started < 5 * TIMEOUT_S


def test_a_store_that_freezes_before_ranks_connect_ends_a_restore(arena_dir, frozen):
    """Rank 0's words about its pair get no answer: restore() raises on both, by the deadline."""
    Cluster(arena_dir, ["a", "b"], "copies:1").run(lambda me: me.commit(1))
    lose(arena_dir, ["a"])
    nodes, hook = ["new", "b"], frozen("pair/")
    cluster = Cluster(arena_dir, nodes, "copies:1", hook=hook, timeout_s=TIMEOUT_S)
    started = time.monotonic()
    for error in cluster.outcomes(lambda me: me.ckpt.restore(), deadline_s=15):
        assert isinstance(error, PlanariaError)
    assert time.monotonic() - started < 8 * TIMEOUT_S


def test_a_ticket_is_not_waited_for_for_ever(arena_dir):
    """The store is gone for good once a save is held: wait() without a limit ends all the same."""

    def gone(_, verb, key, __):
        if verb == "compare_set" and key.startswith("decision/"):
            raise StoreError("gone, says the test")

    def body(me):
        with pytest.raises(TimeoutError, match="step 1 is held"):
            me.ckpt.save(1).wait()
        return True

    cluster = Cluster(arena_dir, ["a"], "none", hook=gone, timeout_s=TIMEOUT_S)
    assert cluster.run(body, deadline_s=15) == [True]
