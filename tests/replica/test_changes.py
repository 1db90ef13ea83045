"""Waiting that may be broken off at any moment, and leaves its lock free."""

from __future__ import annotations

import contextlib
import sys
import threading
from itertools import count

import pytest

from replica.changes import Changes

SHORT_S = 0.005
LONG_S = 60.0


class Struck(BaseException):
    """As raised by a signal's handler."""


def struck_at(number, work):
    """Do ``work``; Struck at the n-th moment at which Python may run a signal's handler.

    Those are the beginnings of functions in Python and the returns of those in C.
    """
    seen = count(1)

    def profile(frame, event, arg):
        if event in ("call", "c_return") and next(seen) == number:
            sys.setprofile(None)
            raise Struck

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return work()
    finally:
        sys.setprofile(before)


def is_free(lock):
    """Return whether another thread gets the lock."""
    found = []

    def try_it():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]


def test_an_interrupt_at_every_moment():
    """What comes out is the interrupt, and the next who waits is told."""
    for number in count(1):
        changes = Changes()
        try:
            struck_at(number, lambda changes=changes: changes.wait_for(lambda: False, SHORT_S))
        except Struck:
            assert is_free(changes.lock)
            check_told(changes)
        else:
            break
    assert number > 5


def check_told(changes):
    """Somebody waits and is told."""
    over = []
    waiting = threading.Event()

    def look():
        waiting.set()
        return bool(over)

    found = []
    thread = threading.Thread(target=lambda: found.append(changes.wait_for(look, LONG_S)))
    thread.start()
    assert waiting.wait(LONG_S)
    with changes.lock:
        over.append(1)
        changes.tell()
    thread.join(LONG_S)
    assert found == [True]


def test_a_condition_would_not_do():
    """The moments are those that matter: with ``threading.Condition`` one of them goes wrong."""
    lock = threading.RLock()
    condition = threading.Condition(lock)

    def wait():
        with lock:
            condition.wait_for(lambda: False, SHORT_S)

    def wait_and_be_struck():
        for number in range(1, 50):
            with contextlib.suppress(Struck):
                struck_at(number, wait)

    with pytest.raises(RuntimeError, match="un-acquired lock"):
        wait_and_be_struck()


def test_the_deadline_ends_a_wait():
    """With whatever was seen last; an earlier one is seen at once, without waiting."""
    changes = Changes()
    assert changes.wait_for(lambda: 0, SHORT_S) == 0
    assert changes.wait_for(lambda: "", -1.0) == ""
    assert changes.wait_for(lambda: "there", 0.0) == "there"
    with changes.lock:
        changes.tell()  # who has gone is told too, and does not mind


def test_all_who_wait_are_told():
    """One change is enough for any number of threads."""
    changes, over = Changes(), []
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(changes.wait_for(lambda: len(over), LONG_S)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    with changes.lock:
        over.append(1)
        changes.tell()
    for thread in threads:
        thread.join(LONG_S)
    assert found == [1] * 5
