"""Moments at which a background process stays, for the test to interrupt, stop or kill somebody."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

STAY_S = 60.0
"""A process that a test has forgotten goes on after this."""
_GATE = threading.Event()


def announce(event: str) -> None:
    """Tell the test that something was reached; the process puts its own function here."""
    raise NotImplementedError(event)


def stay(where: str, word: str) -> None:
    """At the first passage of a method, ``module.Class.method``, say ``word`` and wait there."""
    _at_first(where, lambda: stay_here(word))


def fail(where: str, text: str) -> None:
    """At the first passage of a method warn of ``text``, and raise it."""

    def raise_it() -> None:
        logging.getLogger("planaria").warning("before it fails: %s", text)
        raise RuntimeError(text)

    _at_first(where, raise_it)


def _at_first(where: str, act: Callable[[], None]) -> None:
    module, owner_name, name = where.rsplit(".", 2)
    owner = getattr(importlib.import_module(module), owner_name)
    inner, passed = getattr(owner, name), []

    def method(*args: Any, **more: Any) -> Any:
        if not passed:
            passed.append(name)
            act()
        return inner(*args, **more)

    setattr(owner, name, method)


def stay_here(word: str) -> None:
    """Say ``word`` and wait; asked of a process to come, it does so before it is ready."""
    announce(word)
    _GATE.wait(STAY_S)


def go_on() -> None:
    """Let all go on, and stay no more."""
    _GATE.set()
