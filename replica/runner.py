"""Carries out what a session asks for: store actions here, others by the caller's handlers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from recovery.actions import Action, Await, CompareSet, Decided, Got, Missing, Publish, StoreLost
from replica.clock import Clock
from replica.errors import StoreError
from replica.fault_points import reach_key
from replica.store import Store

T = TypeVar("T")
Handlers = Mapping[type, Callable[[Any], Any]]

POLL_FIRST_S = 0.002
POLL_MAX_S = 0.1
MOVING_BYTES_PER_S_MIN = 20e6
"""Lowest rate at which peers are trusted to move bytes before a deadline counts against them."""


class Runner:
    """Runs one session at a time in the calling thread.

    Each wait of a session ends at the session's deadline: ``timeout_s`` after its start, or after
    the start of that wait when ``per_wait``, in both cases lengthened for bytes that others may be
    moving.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock

    def run(
        self,
        session: Generator[Any, Any, T],
        handlers: Handlers,
        *,
        timeout_s: float,
        per_wait: bool = False,
        published: set[str] | None = None,
    ) -> T:
        """Drive ``session`` to its end; its outcome. Keys that it sets go into ``published``."""
        deadline_s = self._clock.now_s() + timeout_s
        answer: Any = None
        lost: StoreLost | None = None
        moved_s = 0.0
        while True:
            try:
                action = session.throw(lost) if lost else session.send(answer)
            except StopIteration as stop:
                outcome: T = stop.value
                return outcome
            lost = None
            if per_wait:
                deadline_s = self._clock.now_s() + timeout_s
                if isinstance(action, Await) and action.moving_bytes:
                    # Who moves has as long, and what it found must be heard after that. For as
                    # long as this rank has moved bytes, so have they.
                    deadline_s += max(0.0, timeout_s - moved_s)
            started_s = self._clock.now_s()
            try:
                answer = self._carry_out(action, handlers, deadline_s, published)
                if type(action) in handlers:
                    moved_s = self._clock.now_s() - started_s
            except StoreError as error:
                lost = StoreLost(str(error))

    def _carry_out(
        self,
        action: Action | object,
        handlers: Handlers,
        deadline_s: float,
        published: set[str] | None,
    ) -> Any:
        if isinstance(action, Publish):
            reach_key(action.key)
            self._note(action.key, published)
            return self._store.set(action.key, action.value)
        if isinstance(action, CompareSet):
            reach_key(action.key)
            return self._store.compare_set(action.key, action.value)
        if isinstance(action, Await):
            reach_key(next(iter(action.keys), ""))
            return self._wait(action, deadline_s + action.moving_bytes / MOVING_BYTES_PER_S_MIN)
        return handlers[type(action)](action)

    @staticmethod
    def _note(key: str, published: set[str] | None) -> None:
        if published is not None:
            published.add(key)

    def _wait(self, action: Await, deadline_s: float) -> Got | Missing | Decided:
        pause_s = POLL_FIRST_S
        while True:
            if self._store.check(action.keys):
                return Got(dict(zip(action.keys, self._store.get(action.keys), strict=True)))
            if action.watch is not None and self._store.check([action.watch]):
                return Decided(self._store.get([action.watch])[0])
            if action.look or self._clock.now_s() >= deadline_s:
                missing = tuple(key for key in action.keys if not self._store.check([key]))
                if missing:
                    return Missing(missing)
                continue
            self._clock.pause(pause_s)
            pause_s = min(pause_s * 1.5, POLL_MAX_S)
