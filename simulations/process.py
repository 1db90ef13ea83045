"""A simulated process: who it is, what it knows, its threads, and how it ends."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from recovery.actions import StoreLost
from recovery.commit import KeyLog
from recovery.layout import Layout
from recovery.ledger import Ledger
from recovery.session import RestoreAborted, RestoreHalfDone
from recovery.tree import GatherFailed
from simulations.links import Links
from simulations.memory import Arena, ArenaFull, Node
from simulations.tasks import Meet, OpenFailed, PeerLost, Steps, StoreDown, Task, Until

if TYPE_CHECKING:
    from simulations.world import World


EXPECTED = (
    OpenFailed,
    PeerLost,
    StoreDown,
    ArenaFull,
    RestoreAborted,
    RestoreHalfDone,
    GatherFailed,
    StoreLost,
)
"""With these a script ends, and its launcher starts all anew. Anything else is a defect."""


class Group:
    """The processes of one incarnation, and their collectives."""

    def __init__(self, world: World, number: int, size: int) -> None:
        self._world, self.number, self.size = world, number, size
        self.by_rank: dict[int, Process] = {}
        self.store_life = 0
        self.store_host: Process | None = None
        """The process that the store's server lives in; None: it is a process of its own."""
        self._meetings: dict[str, dict[int, tuple[Task, int, Any]]] = {}

    def arrive(self, task: Task, action: Meet) -> None:
        """Wait for all ranks."""
        here = self._meetings.setdefault(action.name, {})
        here[task.process.rank] = (task, task.token, action.value)
        error = PeerLost(f"the ranks could not agree on {action.name}")
        process = task.process
        self._world.schedule(action.timeout_s, process, task.fail, (task.token, error))
        if len(here) == self.size:
            self._complete(action.name)

    def _complete(self, name: str) -> None:
        here = self._meetings[name]
        if any(process.node.partitioned for process in self.by_rank.values()):
            self._world.schedule(0.3, None, self._complete, name)
            return
        del self._meetings[name]
        values = [here[rank][2] for rank in range(self.size)]
        for task, token, _ in here.values():
            delay_s = self._world.latency_s(task.process)
            self._world.schedule(delay_s, task.process, task.answer, (token, values))


class Process:
    """One rank's process. Its fields mirror what ``replica``'s job, driver and face keep."""

    def __init__(self, world: World, group: Group, *, node: Node, rank: int, position: int) -> None:
        self.world, self.group, self.node = world, group, node
        self.rank, self.position = rank, position
        self.alive = True
        self.orphan = self.stubborn = False
        """Without an agent; and one that cannot be ended."""
        self.thaw_s = 0.0
        self.held_back = self.was_kept = False
        """An event had to wait while it was frozen; it was frozen, slowed or cut off at all."""
        self.jumped_until_s = -1.0
        self._clock_ahead_s = 0.0
        self.tasks: list[Task] = []
        self.conditions: list[tuple[Task, int, Until]] = []
        self.prefix = f"boot-{group.number}"
        self.layout: Layout
        self.arena: Arena
        self.epoch = 0
        self.nonce = ""
        self.held_root = b""
        self.ledger = Ledger()
        self.links = Links(self)
        self.keys = KeyLog()
        self.broken = ""
        self.mend_name = ""
        self.step = 0
        self.state = b""

    @property
    def name(self) -> str:
        return f"{self.group.number}.{self.rank}@{self.node.name}"

    def __repr__(self) -> str:
        return self.name

    def clock_s(self) -> float:
        """The process's own clock."""
        return self.world.now_s + self._clock_ahead_s

    def start(self, generator: Steps, phase: str) -> Task:
        """Begin a thread."""
        task = Task(self, generator, phase)
        self.tasks.append(task)
        self.world.schedule(0.0, self, lambda _: task.start())
        return task

    def notify(self, _: Any = None) -> None:
        """Something in the process has changed: look at every condition."""
        if not self.conditions:
            return
        kept = []
        for task, token, until in self.conditions:
            if task.over or task.token != token:
                continue
            if until.condition():
                self.world.schedule(0.0, self, task.answer, (token, True))
            else:
                kept.append((task, token, until))
        self.conditions = kept

    def deadline_passed(self, waited: tuple[Task, int, Until]) -> None:
        """The time of an ``Until`` is over."""
        task, token, until = waited
        if not task.over and task.token == token:
            self.timed_out()
            task.answer((token, until.condition()))

    def timed_out(self) -> None:
        """A wait has ended by its deadline: early, if the clock has just jumped."""
        if self.world.now_s <= self.jumped_until_s:
            self.world.faults.effect("clock-jump", self.node.name)

    def jump(self, seconds: float) -> None:
        """The clock runs ahead: what was to end by then ends now."""
        self._clock_ahead_s += seconds
        self.jumped_until_s = self.world.now_s + seconds
        for waited in self.conditions:
            deadline_s = waited[2].deadline_s
            if deadline_s is not None and deadline_s <= self.clock_s():
                self.world.schedule(0.0, self, self.deadline_passed, waited)
        for task in self.tasks:
            self.world.store.look_again(task)

    def change(self, ledger: Ledger) -> None:
        """Replace the ledger."""
        self.ledger = ledger
        self.notify()

    def die(self) -> None:
        """End at once. What it has in memory of its own is gone; its arena stays."""
        if not self.alive:
            return
        self.alive = False
        self.tasks.clear()
        self.conditions.clear()
        self.world.network.ended(self, self.links.channels())
        if self.group.store_host is self:
            self.world.store.outage_began()

    def task_returned(self, task: Task) -> None:
        """A thread has come to its end."""
        self.tasks = [one for one in self.tasks if one is not task]

    def task_raised(self, task: Task, error: Exception) -> None:
        """A thread has failed, and with it the process."""
        self.tasks = [one for one in self.tasks if one is not task]
        if not isinstance(error, EXPECTED):
            text = "".join(traceback.format_exception(error)[-3:])
            self.world.checker.violation("crash", f"{self.name}, {task.phase}: {text}")
        self.world.checker.promises.ended(self, error)
        self.exit(f"{type(error).__name__}: {error}")

    def exit(self, why: str) -> None:
        """The script ends with an error; its agent sees it."""
        self.world.tell(f"{self.name} ends: {why}")
        if self.alive:
            self.die()
            self.world.launcher.process_ended(self, why)
