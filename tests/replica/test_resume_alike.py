"""Never saved, saved at every step, saved and killed: three runs that are the same bit for bit."""

from __future__ import annotations

import pytest

from tests.replica.alike import ALWAYS_COMMITTED
from tests.replica.pool import JobFailed

pytestmark = pytest.mark.real

STEPS, KILLED_AT = 8, 6
NODES = "ab"


def begin(real, workers=None, seed=5, *, saves):
    """Build the training on two ranks and, if it is to be saved, a Checkpointer over it."""
    world = real.world(NODES, workers)
    world.each("build_alike", seed=seed)
    for rank, worker in enumerate(world.workers if saves else ()):
        worker.call("make_alike", node_id=NODES[rank], **real.options(redundancy="copies:1"))
    return world


def run(world, first, last=STEPS):
    """Go on to the last step on both ranks; the traces by rank and step."""
    return world.each("run_alike", first=first, last=last)


def differing(one, other):
    """Name what is not the same: rank, step counted from the end, trace."""
    return [
        f"rank {rank}, {step - len(other[rank])} from the end: {name}"
        for rank in range(len(NODES))
        for step, (left, right) in enumerate(zip(one[rank], other[rank], strict=True))
        for name in left
        if left[name] != right[name]
    ]


def test_three_runs_are_the_same(real):
    """FSDP2 on two gloo processes; the third run loses rank 1 to SIGKILL while its save is sent.

    Compared after every step: parameters, gradients, moments, schedule, random states, flags,
    which parameters are sharded, threads, modes and warning filters.
    """
    never = begin(real, saves=False)
    wanted = run(never, 1)
    never.each("leave")
    often = begin(real, never.workers, saves=True)
    assert differing(run(often, 1), wanted) == []
    often.leave()
    real.lose(*NODES)
    killed = begin(real, often.workers, saves=True)
    killed[1].start("run_alike", first=1, last=STEPS, kill_at=KILLED_AT)
    killed[0].start("run_alike", first=1, last=STEPS)
    killed[1].died()
    with pytest.raises(JobFailed):
        killed[0].result()
    # Its launcher ends the survivor too, in the middle of whatever it does.
    workers = [real.pool.replace(worker) for worker in killed.workers]
    again = begin(real, workers, seed=99, saves=True)
    (step,) = set(again.each("restore"))
    assert ALWAYS_COMMITTED <= step <= KILLED_AT
    found = run(again, step + 1)
    assert differing(found, [mine[step:] for mine in wanted]) == []
    again.leave()
