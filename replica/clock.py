"""Time, as the drivers see it: one small protocol, so that a simulation can bring its own."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and a pause that another thread can cut short."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def pause(self, seconds: float) -> None:
        """Let time pass, at most this much."""
        ...

    def nudge(self) -> None:
        """End the pause that is under way, or else the next one, at once."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. One thread pauses on it; any thread may nudge."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def now_s(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait for a nudge, at most this long."""
        if self._event.wait(seconds):
            self._event.clear()

    def nudge(self) -> None:
        """Wake whoever pauses."""
        self._event.set()
