"""Training that lost a node goes on bit for bit: FSDP2, AdamW, schedule, loader, random states."""

from __future__ import annotations

import pytest

from tests.replica.pool import results

pytestmark = pytest.mark.real

STEPS, LOST_AT = 6, 3


def test_a_resumed_run_is_the_uninterrupted_run(real):
    """Three ranks lose a node after step 3 and are renumbered: losses and states stay the same."""
    reference = real.world("abc")
    reference.each("build_training", seed=5)
    losses = reference.each("train_on", first=1, last=STEPS, save=False)
    digests = reference.each("training_digest")
    reference.each("leave")
    first = train(real, "abc", reference.workers, seed=5)
    assert first.each("restore") == [None] * 3
    assert first.each("train_on", first=1, last=LOST_AT, save=True) == cut(losses, 0, LOST_AT)
    committed = first.each("settle")
    first.leave()
    real.lose("b")
    again = train(real, "cad", reference.workers[1:] + reference.workers[:1], seed=99)
    (step,) = set(again.each("restore"))
    assert step == LOST_AT or committed == ["skipped"] * 3
    assert again.each("train_on", first=step + 1, last=STEPS, save=True) == cut(losses, step, STEPS)
    assert again.each("training_digest") == digests
    assert len(set(digests)) == 3


def cut(losses, first, last):
    """Return the losses of some steps, by rank."""
    return [mine[first:last] for mine in losses]


def train(real, nodes, workers, seed):
    """Join workers, build the training from its first values, and a Checkpointer over it."""
    world = real.world(nodes, workers)
    world.each("build_training", seed=seed)
    for node, worker in zip(nodes, workers, strict=True):
        worker.start("make_for_training", node_id=node, **real.options())
    results(workers)
    return world
