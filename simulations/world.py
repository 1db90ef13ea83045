"""The seeded heap of events and the virtual clock, and who carries out what a task asks for."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from recovery.actions import Await, CompareSet, Publish
from simulations.checkers import Checker
from simulations.config import Config
from simulations.faults import Faults
from simulations.launcher import Launcher
from simulations.memory import Node
from simulations.network import Network
from simulations.process import Process
from simulations.store import Store
from simulations.tasks import Delete, JobKey, Join, Meet, Present, Sleep, Task, Until, WaitKeys

EVENTS_MAX = 2_000_000
LATENCY_S = 0.0005
JITTER_S = 0.003

Event = tuple[float, int, Process | None, Callable[[Any], None], Any]


class World:
    """Everything of one run. ``owner`` of an event: it waits while that process is frozen."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.random = random.Random(config.seed)
        self.now_s = 0.0
        self.events = 0
        self.paused = False
        """No step is saved now."""
        self.story: list[str] | None = None
        """What happened, in words, for who looks into a run; None: nobody does."""
        self._heap: list[Event] = []
        self._sequence = 0
        self.checker = Checker(self)
        self.store = Store(self)
        self.network = Network(self)
        self.launcher = Launcher(self)
        self.faults = Faults(self)
        self._actions: dict[type, Callable[[Task, Any], None]] = {
            Publish: self.store.ask,
            CompareSet: self.store.ask,
            Present: self.store.ask,
            Delete: self.store.ask,
            JobKey: self.store.ask,
            WaitKeys: self.store.wait,
            Sleep: self._sleep,
            Until: self._until,
            Meet: self._meet,
            Join: self.network.join,
        }

    def schedule(
        self, delay_s: float, owner: Process | None, call: Callable[[Any], None], value: Any = None
    ) -> None:
        """Call ``call(value)`` later, unless ``owner`` is dead by then."""
        self._sequence += 1
        heappush(self._heap, (self.now_s + delay_s, self._sequence, owner, call, value))

    def latency_s(self, process: Process | None = None) -> float:
        """How long a small message takes now."""
        slow = process.node.slow if process is not None else 1.0
        return (LATENCY_S + self.random.random() * JITTER_S) * slow

    def run(self, until: Callable[[], bool]) -> bool:
        """Run until ``until`` holds; False when there is no more to do or too much was done."""
        heap = self._heap
        while not until():
            if not heap or self.events > EVENTS_MAX:
                return False
            time_s, number, owner, call, value = heappop(heap)
            if owner is not None:
                if not owner.alive:
                    continue
                if owner.thaw_s > time_s:
                    owner.held_back = True
                    heappush(heap, (owner.thaw_s, number, owner, call, value))
                    continue
            self.now_s = time_s
            self.events += 1
            call(value)
        return True

    def tell(self, text: str) -> None:
        """Add to the story."""
        if self.story is not None:
            self.story.append(f"{self.now_s:9.4f} {text}")

    def everywhere(self) -> list[Node]:
        """All hosts that live, in the job or not."""
        return [node for node in (*self.launcher.nodes, *self.launcher.spares) if node.alive]

    def carry_out(self, task: Task, action: Any) -> None:
        """Begin what ``task`` asks for; it is resumed by a later event."""
        if self.faults.armed:
            self.faults.saw(task, action)
        self._actions[type(action)](task, action)

    def _sleep(self, task: Task, action: Sleep) -> None:
        delay_s = action.seconds * task.process.node.slow
        self.schedule(delay_s, task.process, task.answer, (task.token, None))

    def _until(self, task: Task, action: Until) -> None:
        process = task.process
        if action.condition():
            self.schedule(0.0, process, task.answer, (task.token, True))
            return
        process.conditions.append((task, task.token, action))
        if action.deadline_s is not None:
            self.schedule(
                max(0.0, action.deadline_s - process.clock_s()),
                process,
                process.deadline_passed,
                (task, task.token, action),
            )

    def _meet(self, task: Task, action: Meet) -> None:
        task.process.group.arrive(task, action)


def label_of(task: Task, action: Any) -> str:
    """The second half of a trigger: what the task is about to do, in a word."""
    if isinstance(action, Publish):
        return _head(action.key)
    if isinstance(action, CompareSet):
        return "set-" + _head(action.key)
    if isinstance(action, WaitKeys):
        keys: Await = action.action
        return "await-" + _head(keys.keys[0] if keys.keys else "nothing")
    if isinstance(action, Meet):
        return action.name.split("/")[0]
    return task.word or type(action).__name__.lower()


def _head(key: str) -> str:
    words = key.split("/")
    if words[0] in ("restore", "mend"):
        return next((w for w in words[1:] if not w.replace(".", "").isdecimal()), words[0])
    return words[0]
