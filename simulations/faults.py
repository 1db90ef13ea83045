"""When faults come, and which of them counted. What each kind does is in ``afflictions``.

A fault is explicit data (``config.Fault``), drawn from a seed or written in a scenario, and comes
never before the one that stands before it. So a list of faults can be replayed and shortened. A
fault counts as a failure only if it removed or changed bytes, a message or a process that a live
generation or session used: some do so at once, of others that is only seen later (``effect``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulations.afflictions import AFFLICTIONS
from simulations.config import Fault
from simulations.tasks import Task

if TYPE_CHECKING:
    from simulations.memory import Node
    from simulations.process import Process
    from simulations.world import World

EXPIRES_S = 30.0
"""After so long without its trigger a fault is given up."""
SESSIONS = frozenset({"open", "restore", "stage", "save", "mend"})
DISTURBANCES = frozenset({"delay", "slow", "renumber"})
"""These never count as failures."""


@dataclass
class Fired:
    """A fault that came. ``counted``: it mattered to somebody."""

    fault: Fault
    time_s: float
    nodes: tuple[str, ...] = ()
    counted: bool = False
    spared: bool = False


class Faults:
    """Goes through the list of faults. ``armed``: one waits for a thread's action."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.fired: list[Fired] = []
        self.expired = 0
        self.armed = False
        self.over = False
        self.trigger: Process | None = None
        """The process whose action let the present fault come."""
        self._index = -1
        self._seen = 0

    def begin(self) -> None:
        """Wait for the first fault."""
        self._next()

    @property
    def failures(self) -> int:
        """How many counted."""
        return sum(fired.counted for fired in self.fired)

    def saw(self, task: Task, action: Any) -> None:
        """A thread is about to act: is that what the present fault waits for?"""
        from simulations.world import label_of  # noqa: PLC0415 - both ends of one wire

        fault = self._world.config.faults[self._index]
        phase, _, word = fault.on.partition(".")
        process = task.process
        if phase not in ("*", task.phase) or fault.by_rank not in (None, process.rank):
            return
        if word not in ("*", label_of(task, action)):
            return
        if process.group is not self._world.launcher.group:
            return
        self._seen += 1
        if self._seen >= fault.nth:
            self.armed = False
            self.trigger = process
            self._world.schedule(fault.after_s, None, self._fire, self._index)

    def effect(self, kind: str, *nodes: str) -> None:
        """What a fault prepared has come about: the newest one of that kind and place counts."""
        kinds = _CAUSES.get(kind, (kind,))
        for fired in reversed(self.fired):
            if fired.fault.kind not in kinds or fired.spared:
                continue
            if fired.nodes and nodes and not set(nodes) & set(fired.nodes):
                continue
            if kind not in DISTURBANCES:
                fired.counted = True
            return

    def in_session(self, process: Process) -> bool:
        """Whether a thread of the process is in the middle of one."""
        return any(task.phase in SESSIONS for task in process.tasks)

    def holds_live(self, node: Node) -> bool:
        """Whether a node has bytes of a generation that matters."""
        return any(
            slot.record is not None and self._world.checker.is_live(slot.record.generation)
            for arena in node.arenas.values()
            for slot in arena.slots.values()
        )

    def _next(self) -> None:
        self._index += 1
        self._seen = 0
        faults = self._world.config.faults
        if self._index >= len(faults):
            self.over = True
            return
        fault = faults[self._index]
        if fault.on:
            self.armed = True
            patience_s = fault.by_s or EXPIRES_S
            self._world.schedule(patience_s, None, self._expire, self._index)
        else:
            at_s = fault.at_s if fault.at_s is not None else self._world.now_s + fault.after_s
            delay_s = max(0.0, at_s - self._world.now_s)
            self._world.schedule(delay_s, None, self._fire, self._index)

    def _expire(self, index: int) -> None:
        if index == self._index and self.armed:
            self.armed = False
            if self._world.config.faults[index].by_s:
                self._fire(index)
            else:
                self.expired += 1
                self._next()

    def _fire(self, index: int) -> None:
        fault = self._world.config.faults[index]
        fired = Fired(fault, self._world.now_s)
        self.fired.append(fired)
        AFFLICTIONS[fault.kind](self._world, fired)
        self._world.tell(f"{'spared' if fired.spared else 'FAULT'} {fault} by {self.trigger}")
        self._world.checker.counts[f"drawn {fault.kind}"] += not fired.spared
        self.trigger = None
        self._next()


_CAUSES = {
    "store": ("store-cut", "store-loss", "partition", "freeze"),
    "cut": ("cut", "partition"),
}
