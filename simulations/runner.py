"""Carries out what a session asks for, as ``replica.runner`` does: each wait ends at a deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recovery.actions import Await, CompareSet, Publish, StoreLost
from simulations.tasks import Steps, StoreDown, WaitKeys

if TYPE_CHECKING:
    from simulations.process import Process

Edges = Mapping[type, Callable[[Any], Steps]]

MOVING_BYTES_PER_S_MIN = 2_000.0
"""Lowest rate at which peers are trusted to move bytes."""


def moving_timeout_s(process: Process, nbytes: int) -> float:
    """Deadline of what moves at most ``nbytes``."""
    return process.world.config.timeout_s + nbytes / MOVING_BYTES_PER_S_MIN


def run_session(
    process: Process,
    session: Any,
    edges: Edges,
    *,
    timeout_s: float,
    per_wait: bool = False,
    published: set[str] | None = None,
) -> Steps:
    """Drive ``session`` to its end; its outcome. Keys that it sets go into ``published``."""
    deadline_s = process.clock_s() + timeout_s
    answer: Any = None
    lost: StoreLost | None = None
    while True:
        try:
            action = session.throw(lost) if lost else session.send(answer)
        except StopIteration as stop:
            return stop.value
        lost = None
        if per_wait:
            deadline_s = process.clock_s() + timeout_s
        try:
            if isinstance(action, Await):
                ends_s = deadline_s + action.moving_bytes / MOVING_BYTES_PER_S_MIN
                answer = yield WaitKeys(action, ends_s)
            elif isinstance(action, Publish):
                if published is not None:
                    published.add(action.key)
                answer = yield action
            elif isinstance(action, CompareSet):
                answer = yield action
            else:
                answer = yield from edges[type(action)](action)
        except StoreDown as error:
            lost = StoreLost(str(error))
