"""Ending processes: whole trees at once, and all that a run has started.

Every process of a run carries ``RUN_VARIABLE`` in its environment, which its children inherit. So
what a run started can be found even when its parents are dead: a torchrun worker runs in a session
of its own and outlives an agent that is killed alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

import psutil

RUN_VARIABLE = "PLANARIA_DEMO_RUN"
NODE_VARIABLE = "PLANARIA_NODE_ID"
END_TIMEOUT_S = 20.0


def kill_trees(roots: Sequence[int]) -> tuple[float, list[int]]:
    """SIGKILL every process of the trees under ``roots``, roots first.

    The trees are listed before the first signal and the signals follow each other within
    microseconds, roots first, so that no agent sees a worker die.

    Returns:
        The instant just before the first signal (``time.monotonic``), and the process ids.
    """
    trees = [_tree(root) for root in roots]
    doomed = [tree[0] for tree in trees if tree] + [child for tree in trees for child in tree[1:]]
    at_s = time.monotonic()
    _kill(doomed)
    return at_s, [process.pid for process in doomed]


def processes_of(run_id: str, *, node: str | None = None) -> list[psutil.Process]:
    """Return the living processes of a run, or of one node of it, except the caller."""
    own = psutil.Process().pid
    return [
        process
        for process in psutil.process_iter()
        if process.pid != own and _belongs(process, run_id, node)
    ]


def sweep(run_id: str, *, node: str | None = None) -> None:
    """SIGKILL all processes of a run, or of one node of it, until none lives.

    Raises:
        TimeoutError: some live on after 20 s; names them.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while alive := processes_of(run_id, node=node):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still alive after SIGKILL: {[process.pid for process in alive]}")
        _kill(alive)
        psutil.wait_procs(alive, timeout=1.0)


def _tree(root: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(root)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _belongs(process: psutil.Process, run_id: str, node: str | None) -> bool:
    try:
        environment = process.environ()
        zombie = process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        # Ended meanwhile, or another user's.
        return False
    return (
        not zombie
        and environment.get(RUN_VARIABLE) == run_id
        and (node is None or environment.get(NODE_VARIABLE) == node)
    )
