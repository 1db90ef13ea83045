"""How long a session waits: the deadlines that the runner gives, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from recovery.actions import Await, Missing
from replica.runner import MOVING_BYTES_PER_S_MIN, Runner
from replica.store import MemoryStore

TIMEOUT_S = 10.0


class FakeClock:
    """A clock that only pauses and the test's own handlers move on."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def pause(self, seconds: float) -> None:
        self.time_s += seconds

    def nudge(self) -> None:
        pass


@dataclass(frozen=True)
class Work:
    """Something that a driver does and that takes this long."""

    seconds: float


def waited_until_s(*actions, per_wait):
    """Run a session of these actions; when each had ended, on a clock that began at 0."""
    clock, ends_s = FakeClock(), []

    def session():
        for action in actions:
            answer = yield action
            assert isinstance(answer, Missing) == isinstance(action, Await)
            ends_s.append(clock.time_s)

    handlers = {Work: lambda work: clock.pause(work.seconds)}
    runner = Runner(MemoryStore(), clock)
    runner.run(session(), handlers, timeout_s=TIMEOUT_S, per_wait=per_wait)
    return [pytest.approx(end_s, abs=0.2) for end_s in ends_s]


def test_one_deadline_for_all_waits_of_a_save():
    """Work of 4 s, then two waits: both end at the one deadline, bytes add their time to theirs."""
    moving = Await(("a",), "a", moving_bytes=int(3 * MOVING_BYTES_PER_S_MIN))
    ends_s = waited_until_s(Work(4.0), Await(("b",), "b"), moving, per_wait=False)
    assert ends_s == [4.0, TIMEOUT_S, TIMEOUT_S + 3.0]


def test_a_deadline_for_each_wait_of_a_restore():
    """Each wait has the whole timeout, after whatever came before it."""
    ends_s = waited_until_s(Work(4.0), Await(("a",), "a"), Await(("b",), "b"), per_wait=True)
    assert ends_s == [4.0, 4.0 + TIMEOUT_S, 4.0 + 2 * TIMEOUT_S]


@pytest.mark.parametrize("moved_s", [0.0, 4.0, 10.0, 13.0])
def test_who_may_still_be_moving_is_waited_for(moved_s):
    """All begin to move at once and may take the timeout and the bytes' time; then as long again.

    So the wait ends at the same instant for those that had nothing to move and those that were
    kept by a silent peer, and nobody waits three timeouts.
    """
    wait = Await(("a",), "a", moving_bytes=int(3 * MOVING_BYTES_PER_S_MIN))
    _, end_s = waited_until_s(Work(moved_s), wait, per_wait=True)
    assert end_s == max(TIMEOUT_S, moved_s) + TIMEOUT_S + 3.0
