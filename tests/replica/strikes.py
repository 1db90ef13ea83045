"""A real signal that strikes the main thread, as Ctrl-C does, at a moment of a test's choice."""

from __future__ import annotations

import signal
import threading


class Interrupted(BaseException):
    """What the handler of SIGUSR1 raises."""


def raise_interrupted(number, frame):
    """Be that handler."""
    raise Interrupted


def strike_at(monkeypatch, owner: type, name: str, *, after: bool = False) -> list[str]:
    """Have the signal strike at the first passage of a method; its name stands in the list then."""
    inner, struck = getattr(owner, name), []

    def method(*args, **more):
        if struck or threading.current_thread() is not threading.main_thread():
            return inner(*args, **more)
        struck.append(name)
        found = inner(*args, **more) if after else None
        signal.raise_signal(signal.SIGUSR1)
        return found

    monkeypatch.setattr(owner, name, method)
    return struck
