"""Forked children: what they inherit of something open is their parent's, and is left alone.

A data loader's worker, or any other forked child, has copies of the parent's objects, but none of
its threads, and shares its sockets. To close them there in the usual way would wait for threads
that are not there, write into the parent's connections, or end them (seen: a child that left by
``sys.exit`` hung). So in the child every watched object forgets what it had open, and what it had
is kept from being destroyed: the child's end gives back what is the child's.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_watched: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def watch(one: T, forget: Callable[[T], object]) -> None:
    """Have ``forget(one)`` called in every child that is forked from now on.

    It may take no lock, which another thread may have held at the fork, and returns what must not
    be destroyed in the child.
    """
    _watched[one] = forget


def _in_child() -> None:
    kept = [forget(one) for one, forget in list(_watched.items())]
    _watched.clear()
    # One reference too many, for ever: the interpreter's end would destroy what a module refers to.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_in_child)
