"""A lock, and the waiting for what changes under it, which Ctrl-C may break off at any moment.

``threading.Condition`` gives its lock up, waits and takes it again in Python code. An interrupt in
between leaves the block without the lock that it is to release: RuntimeError comes out in its
place. One that comes while a Condition is entered leaves it locked for ever. Here the lock is
entered by itself, in C, and nobody waits inside of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

NOTICE_S = 1.0
"""Ctrl-C that comes just before a thread falls asleep is noticed only when it wakes: so much later.
"""


class Changes:
    """``lock`` guards what may change; ``tell``, under it, after every change."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiters: list[threading.Lock] = []

    def tell(self) -> None:
        """Have everybody who waits look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()

    def wait_for(self, look: Callable[[], T], timeout_s: float) -> T:
        """What ``look`` says, asked under the lock, once that is true; at the deadline whatever.

        Not to be called under the lock.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            waiter = threading.Lock()
            waiter.acquire()
            with self.lock:
                found = look()
                left_s = deadline_s - time.monotonic()
                if found or left_s <= 0:
                    return found
                self._waiters.append(waiter)
            # Whoever is not told in time is told later, and nobody minds.
            waiter.acquire(timeout=min(left_s, NOTICE_S))
