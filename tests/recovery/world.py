"""A small deterministic world for sessions: one dict as the store, seeded turns, virtual time.

Each rank's session is asked for its next action in turns drawn from a seed. Time is virtual: a
deadline passes only when nobody can go on. Faults are scripted by rank and action number, and
counted, so that a test can say that what it wanted to happen did happen.

What a driver would do for an action of its own (move bytes, load) is a generator too, given as an
edge; it talks over keys that begin with ``wire/``, which stand for the network between two nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from recovery.actions import Await, CompareSet, Decided, Got, Missing, Publish, StoreLost

STEPS_MAX = 100_000


@dataclass(frozen=True)
class Silent:
    """Before its action number ``at`` the rank stops for ever: killed, or frozen."""

    rank: int
    at: int


@dataclass(frozen=True)
class StoreDown:
    """The store does not answer the rank from its action ``at`` on, ``count`` times.

    With ``applied`` what it asked for is done all the same and only the answer is lost.
    """

    rank: int
    at: int
    applied: bool = False
    count: int = STEPS_MAX


@dataclass(frozen=True)
class Early:
    """The deadline of the rank's action ``at``, a wait, passes at once: its clock runs ahead."""

    rank: int
    at: int


@dataclass(frozen=True)
class Returned:
    """How a session ended."""

    value: object


@dataclass(frozen=True)
class Raised:
    """How a session failed."""

    error: Exception


def with_edges(session, edges):
    """Yield the store actions of ``session`` and of the edges that carry out its other actions."""
    answer, lost = None, None
    while True:
        try:
            action = session.throw(lost) if lost else session.send(answer)
        except StopIteration as stop:
            return stop.value
        answer, lost = None, None
        try:
            if type(action) in edges:
                answer = yield from edges[type(action)](action)
            else:
                answer = yield action
        except StoreLost as error:
            lost = error


class World:
    """Runs one session per rank to the end. ``store`` may be shared with an earlier world.

    ``one_deadline``: when nobody can go on, every deadline has passed for good (a deadline per
    session); otherwise one rank's wait ends and the others get their turn (a deadline per wait).
    """

    def __init__(self, seed, sessions, *, faults=(), store=None, one_deadline=True):
        self.random = random.Random(seed)
        self.sessions = dict(sessions)
        self.faults = {(type(f), f.rank): f for f in faults}
        self.store = {} if store is None else store
        self.one_deadline = one_deadline
        self.results = {}
        self.fired = Counter()
        self.count = Counter()
        self.trace = []
        self._over = False
        self._pending = {}

    def run(self):
        """Return how each session ended; a silent rank has no entry."""
        for rank in sorted(self.sessions):
            self._ask(rank, lambda session: session.send(None))
        for _ in range(STEPS_MAX):
            if not self._pending:
                return self.results
            live = sorted(self._pending)
            first = int(self.random.random() * len(live))
            live = live[first:] + live[:first]
            able = next((rank for rank in live if self._can_go(rank)), None)
            if able is not None:
                self._turn(able)
            elif self.one_deadline:
                self._over = True
            else:
                self._answer(live[0], self._missing(self._pending[live[0]]))
        raise AssertionError(f"no end after {STEPS_MAX} turns; waiting: {self._pending}")

    def places(self, kind=None):
        """Return (rank, number) of every action that was taken, or of those of one kind."""
        number, found = Counter(), []
        for rank, action, _ in self.trace:
            if kind is None or isinstance(action, kind):
                found.append((rank, number[rank]))
            number[rank] += 1
        return sorted(found)

    def _fault(self, kind, rank):
        fault = self.faults.get((kind, rank))
        return fault if fault is not None and self.count[rank] >= fault.at else None

    def _is_early(self, rank):
        fault = self._fault(Early, rank)
        return fault is not None and self.count[rank] == fault.at

    def _can_go(self, rank):
        action = self._pending[rank]
        if not isinstance(action, Await) or self._over or action.look or self._is_early(rank):
            return True
        if self._is_down(rank, action):
            return True
        return all(key in self.store for key in action.keys) or action.watch in self.store

    def _is_down(self, rank, action):
        fault = self._fault(StoreDown, rank)
        if fault is None or self.fired[fault] >= fault.count:
            return False
        keys = action.keys if isinstance(action, Await) else (action.key,)
        return not all(key.startswith("wire/") for key in keys)

    def _turn(self, rank):
        action = self._pending[rank]
        if self._fault(Silent, rank):
            self.fired[self._fault(Silent, rank)] += 1
            del self._pending[rank]
        elif self._is_down(rank, action):
            fault = self._fault(StoreDown, rank)
            if fault.applied:
                self._do(rank, action)
            self.fired[fault] += 1
            self._ask(rank, lambda session: session.throw(StoreLost("no answer")))
        else:
            self._answer(rank, self._do(rank, action))

    def _do(self, rank, action):
        if isinstance(action, Publish):
            self.store[action.key] = action.value
            return None
        if isinstance(action, CompareSet):
            return self.store.setdefault(action.key, action.value)
        assert isinstance(action, Await), action
        if all(key in self.store for key in action.keys):
            return Got({key: self.store[key] for key in action.keys})
        if action.watch in self.store:
            return Decided(self.store[action.watch])
        if self._is_early(rank):
            self.fired[self._fault(Early, rank)] += 1
        return self._missing(action)

    def _missing(self, action):
        return Missing(tuple(key for key in action.keys if key not in self.store))

    def _answer(self, rank, answer):
        self.trace.append((rank, self._pending[rank], answer))
        self._ask(rank, lambda session: session.send(answer))

    def _ask(self, rank, resume):
        if rank in self._pending:
            self.count[rank] += 1
        self._pending.pop(rank, None)
        try:
            self._pending[rank] = resume(self.sessions[rank])
        except StopIteration as stop:
            self.results[rank] = Returned(stop.value)
        except Exception as error:  # noqa: BLE001 - how a session fails is what tests look at
            self.results[rank] = Raised(error)
