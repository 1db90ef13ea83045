"""Tasks: generators that live on the heap of events, and what they may ask for.

A simulated process is a small tree of generators. A thread of it yields an action and is resumed
with the answer by an event of its own, so that a death, a freeze or another process's message can
come between any two actions. Nothing here may use ``finally`` for effects: a killed process's
generators are dropped, and a dead process has no effects.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recovery.actions import Await

if TYPE_CHECKING:
    from simulations.process import Process

Steps = Generator[Any, Any, Any]


class StoreDown(Exception):
    """A request to the store had no answer in time; it may have been carried out all the same."""


class PeerLost(Exception):
    """A collective or a connection did not come about in time."""


class OpenFailed(Exception):
    """Opening failed on some rank, and so on all."""


@dataclass(frozen=True)
class Sleep:
    """Go on after ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class Until:
    """Go on when ``condition`` holds (True) or the process's clock shows ``deadline_s`` (False).

    Conditions are looked at whenever the process is notified of a change in it.
    """

    condition: Callable[[], bool]
    deadline_s: float | None = None


@dataclass(frozen=True)
class WaitKeys:
    """A session's ``Await`` with the time, by the process's clock, at which it ends."""

    action: Await
    deadline_s: float


@dataclass(frozen=True)
class Present:
    """Which of ``keys`` are set. Answer: a set of keys."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Delete:
    """Remove ``keys``."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class JobKey:
    """Read (``value`` None) or set the job's own key, which no nonce stands before."""

    key: str
    value: bytes | None = None


@dataclass(frozen=True)
class Meet:
    """One small exchange of all ranks. Answer: everybody's value by rank. Raises PeerLost."""

    name: str
    value: Any
    timeout_s: float


@dataclass(frozen=True)
class Join:
    """Make the channel ``name`` with rank ``peer``. Answer: the channel. Raises PeerLost."""

    name: str
    peer: int
    timeout_s: float


class Task:
    """One thread of a simulated process."""

    __slots__ = ("generator", "over", "phase", "process", "token", "waiting", "word")

    def __init__(self, process: Process, generator: Steps, phase: str) -> None:
        self.process = process
        self.generator = generator
        self.phase = phase
        """What it is doing, in a word: the first half of a fault's trigger."""
        self.word = ""
        self.token = 0
        self.over = False
        self.waiting: Any = None
        """The wait that it is in, where something outside has to find it."""

    def start(self) -> None:
        """Run to the first action."""
        self._advance(self.generator.send, None)

    def answer(self, turn: tuple[int, Any]) -> None:
        """Resume with ``turn``'s value, unless the task has moved on since that was scheduled."""
        token, value = turn
        if token == self.token and not self.over:
            self._advance(self.generator.send, value)

    def fail(self, turn: tuple[int, Exception]) -> None:
        """Resume by raising ``turn``'s error."""
        token, error = turn
        if token == self.token and not self.over:
            self._advance(self.generator.throw, error)

    def _advance(self, step: Callable[[Any], Any], value: Any) -> None:
        process = self.process
        self.token += 1
        self.waiting = None
        try:
            action = step(value)
        except StopIteration:
            self.over = True
            process.task_returned(self)
        except Exception as error:  # noqa: BLE001 - how a thread fails is the process's affair
            self.over = True
            process.task_raised(self, error)
        else:
            if process.alive:
                process.world.carry_out(self, action)
