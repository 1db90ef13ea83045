"""The fake store: one dictionary for each incarnation's prefix, requests that take time or fail.

A request takes effect and is answered by one event. While the store cannot be reached from the
asking process, a request that was on its way may be carried out all the same, and is answered by an
error once the client's patience is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recovery.actions import CompareSet, Decided, Got, Missing, Publish
from simulations.tasks import Delete, JobKey, Present, StoreDown, Task, WaitKeys

if TYPE_CHECKING:
    from simulations.process import Process
    from simulations.world import World

PATIENCE_S = 2.0
"""How long a client waits for an answer."""
POLL_S = 0.05
LOST_ANSWER = 0.4
"""How likely a request that met the outage was carried out, and only its answer was lost."""


class Space:
    """The keys under one prefix, and who waits for which."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.watchers: dict[str, list[_Wait]] = {}
        self.subscribers: dict[str, list[tuple[Process, list[bytes]]]] = {}


class _Wait:
    """One waiting task."""

    __slots__ = ("action", "deadline_s", "left", "process", "task", "token")

    def __init__(self, task: Task, asked: WaitKeys) -> None:
        self.task, self.token, self.process = task, task.token, task.process
        self.action, self.deadline_s = asked.action, asked.deadline_s
        self.left: set[str] = set()

    @property
    def stale(self) -> bool:
        return self.task.over or self.task.token != self.token


class Store:
    """Reached by every process through ``reachable``, if it ``lives`` in what that one knows.

    ``down``: the server does not answer anybody. A new server knows nothing, and clients of the
    old one do not find it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.spaces: dict[str, Space] = {}
        self.job_keys: dict[str, bytes] = {}
        self.life = 1
        self.down = False
        self.failed_requests = 0

    def space(self, process: Process) -> Space:
        """The keys of the process's incarnation."""
        prefix = process.prefix
        found = self.spaces.get(prefix)
        if found is None:
            found = self.spaces[prefix] = Space()
            for old in list(self.spaces)[:-3]:
                del self.spaces[old]
        return found

    def reachable(self, process: Process) -> bool:
        """Whether a request of the process is answered now."""
        if self.down or process.node.store_cut or process.node.partitioned:
            return False
        if process.group.store_life != self.life:
            return False
        host = process.group.store_host
        if host is None or host is process:
            return True
        if not host.alive or host.thaw_s > self._world.now_s:
            return False
        return not host.node.partitioned and not self._world.network.cut(host.node, process.node)

    def wipe(self) -> None:
        """From now on the server is a new one."""
        self.life += 1
        self.spaces.clear()
        self.job_keys.clear()

    def outage_began(self) -> None:
        """Whoever waits polls, and so finds out that nobody answers."""
        for process in self._world.launcher.living():
            for task in process.tasks:
                if isinstance(task.waiting, _Wait) and not self.reachable(process):
                    self._world.schedule(POLL_S, process, self._look, task.waiting)

    def ask(self, task: Task, action: Any) -> None:
        """Begin a request."""
        delay_s = self._world.latency_s(task.process)
        self._world.schedule(delay_s, task.process, self._arrive, (task, task.token, action))

    def wait(self, task: Task, asked: WaitKeys) -> None:
        """Begin to wait for keys."""
        wait = _Wait(task, asked)
        task.waiting = wait
        self._world.schedule(self._world.latency_s(task.process), task.process, self._look, wait)

    def look_again(self, task: Task) -> None:
        """The task's clock has jumped."""
        if isinstance(task.waiting, _Wait):
            self._world.schedule(0.0, task.process, self._look, task.waiting)

    def subscribe(self, process: Process, key: str) -> list[bytes]:
        """A list that the value of ``key`` is put into once it is set; the process is notified."""
        box: list[bytes] = []
        space = self.space(process)
        if key in space.data:
            box.append(space.data[key])
        else:
            space.subscribers.setdefault(key, []).append((process, box))
        return box

    def _arrive(self, request: tuple[Task, int, Any]) -> None:
        task, _, action = request
        if self._settled(request):
            return
        host = task.process.group.store_host
        alive = not self.down and (host is None or host.alive)
        if (
            alive
            and task.process.group.store_life == self.life
            and self._world.random.random() < LOST_ANSWER
        ):
            self._do(task.process, action)
        self._world.schedule(PATIENCE_S, task.process, self._give_up, request)

    def _settled(self, request: tuple[Task, int, Any]) -> bool:
        """Whether nobody waits for it any more, or it can be answered and is."""
        task, token, action = request
        if task.over or task.token != token:
            return True
        if not self.reachable(task.process):
            return False
        task.answer((token, self._do(task.process, action)))
        return True

    def _give_up(self, request: tuple[Task, int, Any]) -> None:
        task, token, action = request
        if self._settled(request):
            return
        self.failed_requests += 1
        self._world.faults.effect("store", task.process.node.name)
        task.fail((token, StoreDown(f"no answer to {action!r:.80}")))

    def _do(self, process: Process, action: Any) -> Any:
        if isinstance(action, JobKey):
            if action.value is not None:
                self.job_keys[action.key] = action.value
            return self.job_keys.get(action.key, b"")
        space = self.space(process)
        if isinstance(action, Publish):
            if action.key.endswith("/frozen"):
                self._world.checker.froze(process, action.key)
            self._set(space, action.key, action.value)
            return None
        if isinstance(action, CompareSet):
            if action.key not in space.data:
                self._world.checker.first_set(process, action.key, action.value)
                self._set(space, action.key, action.value)
            return space.data[action.key]
        if isinstance(action, Present):
            return {key for key in action.keys if key in space.data}
        if not isinstance(action, Delete):
            raise TypeError(f"the store cannot do {action!r}")
        for key in action.keys:
            space.data.pop(key, None)
        return None

    def _set(self, space: Space, key: str, value: bytes) -> None:
        space.data[key] = value
        for wait in space.watchers.pop(key, ()):
            if wait.stale:
                continue
            wait.left.discard(key)
            if not wait.left or key == wait.action.watch:
                delay_s = self._world.latency_s(wait.process)
                self._world.schedule(delay_s, wait.process, self._look, wait)
        for process, box in space.subscribers.pop(key, ()):
            box.append(value)
            self._world.schedule(POLL_S, process, process.notify)

    def _look(self, wait: _Wait) -> None:
        if wait.stale:
            return
        if not self.reachable(wait.process):
            self._world.schedule(PATIENCE_S, wait.process, self._despair, wait)
            return
        action, data = wait.action, self.space(wait.process).data
        missing = [key for key in action.keys if key not in data]
        if not missing:
            wait.task.answer((wait.token, Got({key: data[key] for key in action.keys})))
        elif action.watch is not None and action.watch in data:
            wait.task.answer((wait.token, Decided(data[action.watch])))
        elif action.look or wait.process.clock_s() >= wait.deadline_s - 1e-9:
            if not action.look:
                wait.process.timed_out()
            wait.task.answer((wait.token, Missing(tuple(missing))))
        else:
            self._register(wait, missing)

    def _despair(self, wait: _Wait) -> None:
        if wait.stale:
            return
        if self.reachable(wait.process):
            self._look(wait)
            return
        self.failed_requests += 1
        self._world.faults.effect("store", wait.process.node.name)
        wait.task.fail((wait.token, StoreDown(f"no answer about {wait.action.keys[0]}")))

    def _register(self, wait: _Wait, missing: list[str]) -> None:
        watchers = self.space(wait.process).watchers
        first = not wait.left
        wait.left = set(missing)
        for key in (*missing, *([wait.action.watch] if wait.action.watch else [])):
            some = watchers.setdefault(key, [])
            if wait not in some:
                some.append(wait)
        if first:
            left_s = wait.deadline_s - wait.process.clock_s()
            self._world.schedule(max(0.0, left_s), wait.process, self._look, wait)
