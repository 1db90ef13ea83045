"""One step number, many attempts: parts of different attempts are never put together."""

from __future__ import annotations

import contextlib

import torch

from erasure.errors import PlanariaError
from replica.arena import read_arenas
from replica.errors import ConfigError, StoreError
from tests.replica.damage import lose
from tests.replica.inprocess import JOB, Cluster

FOUR = ["a", "b", "c", "d"]


def generations(arena_dir, step):
    """Return the ids of all generations of a step that lie in the arenas."""
    views = read_arenas(arena_dir, JOB)
    records = [slot.record for view in views for slot in view.slots.values() if slot.record]
    return {record.generation.id for record in records if record.generation.step == step}


def test_a_step_tried_by_four_and_then_by_two_is_not_mixed_for_four(arena_dir):
    """Four ranks try step 100 and two die, two ranks save step 100 anew, four come back.

    They are told that two saved it and are given nothing; with the two's arenas gone they have the
    whole step before. At no time does anybody hold parts of both attempts.
    """

    def dies(rank, verb, key, value):
        if rank in (2, 3) and verb == "set" and key.startswith("held/"):
            raise StoreError("this rank has died")

    def first(me):
        me.commit(99)
        dying.append(True)
        me.train(100)
        with contextlib.suppress(PlanariaError):
            me.ckpt.save(100).wait("committed", 20)

    def fault(*args):
        if dying:
            dies(*args)

    dying = []
    Cluster(arena_dir, FOUR, "copies:1", hook=fault, timeout_s=3.0).outcomes(first)
    tried = generations(arena_dir, 100)
    assert len(tried) == 1
    lose(arena_dir, ["a", "b"])

    def second(me):
        me.state["w"] = torch.full((50,), -1.0)
        me.ckpt.save(100).wait("committed", 20)

    # What the two others kept of the first attempt lies there still, on nodes that are away.
    Cluster(arena_dir, ["a", "b"], "copies:1").run(second)
    assert len(generations(arena_dir, 100)) == 2
    for error in Cluster(arena_dir, FOUR, "copies:1").outcomes(lambda me: me.ckpt.restore()):
        assert isinstance(error, ConfigError)
        assert "saved by 2 ranks" in str(error)
    lose(arena_dir, ["a", "b"])
    for found in Cluster(arena_dir, FOUR, "copies:1").run(lambda me: me.restore()["step"]):
        # Whatever it is, restore() has seen that every bit is of one attempt.
        assert found in (None, 99, 100)


def test_the_same_steps_in_three_lives_have_as_many_ids(arena_dir):
    """Steps 1 to 3 are saved in three lives, with a restore in between: no id comes twice."""
    seen = set()

    def life(me):
        me.commit(1, 2)
        assert me.restore()["step"] == 2
        me.commit(3)

    for number in range(3):
        Cluster(arena_dir, FOUR[:2], "copies:1").run(life)
        for step in (2, 3):
            (identity,) = generations(arena_dir, step)
            seen.add(identity)
        assert len(seen) == 2 * (number + 1)
        lose(arena_dir, FOUR[:2])
