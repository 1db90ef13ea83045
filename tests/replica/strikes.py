"""A real signal that strikes the main thread, as Ctrl-C does, at a moment of a test's choice."""

from __future__ import annotations

import signal
import threading
from functools import partial


class Interrupted(BaseException):
    """What the handler of SIGUSR1 raises."""


def raise_interrupted(number, frame):
    """Be that handler."""
    raise Interrupted


SIGNAL = partial(signal.raise_signal, signal.SIGUSR1)


def strike_at(monkeypatch, owner: type, name: str, *, after: bool = False, act=SIGNAL) -> list[str]:
    """Have the signal strike at the first passage of a method; its name stands in the list then.

    ``act``: what is done instead, as by the handler of a signal.
    """
    inner, struck = getattr(owner, name), []

    def method(*args, **more):
        if struck or threading.current_thread() is not threading.main_thread():
            return inner(*args, **more)
        struck.append(name)
        if not after:
            act()
        found = inner(*args, **more)
        if after:
            act()
        return found

    monkeypatch.setattr(owner, name, method)
    return struck
