"""Many small tensors copied into one buffer by a few calls, straight from their addresses.

A call per tensor costs more than the bytes of a small one. `process_vm_readv` takes a thousand
addresses at once, without the interpreter's lock, and here the process that it reads is this one.
What was measured for that choice: `docs/performance.md`.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replica.memcopy import share

SMALL_BYTES = 1 << 16
"""Tensors of fewer bytes are gathered; above, the bytes take longer than the call."""
_CALL_VECTORS = 1024
"""What the kernel takes at once (IOV_MAX)."""
_SERIAL_CALLS = 2

_Words = npt.NDArray[np.uint64]


def _system_call() -> Callable[..., int] | None:
    call: Any = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is not None:
        word, address = ctypes.c_ulong, ctypes.c_void_p
        call.argtypes = [ctypes.c_int, address, word, address, word, word]
        call.restype = ctypes.c_ssize_t
    return call  # type: ignore[no-any-return]


_read: Callable[..., int] | None = _system_call()


@dataclass(frozen=True)
class Small:
    """One small tensor that lies as it goes into the image."""

    start: int
    """Byte of the buffer."""
    nbytes: int
    position: int
    """Which of the tensors it is."""


class Gathers:
    """The small tensors of a plan. Holds neither a tensor nor an address."""

    def __init__(self, smalls: Sequence[Small]) -> None:
        self._positions = np.array([small.position for small in smalls], np.intp)
        self._targets = _vectors([small.start for small in smalls], smalls)
        self._sources = _vectors([0] * len(smalls), smalls)

    def copy(self, pointers: Sequence[int], base: int, keep: object) -> None:
        """Copy all into the buffer at address `base`; `pointers` are those of all the tensors.

        `keep` holds the memory alive. Returns, or raises, when no thread touches any of it any
        more.
        """
        if not len(self._positions):
            return
        targets, sources = self._targets.copy(), self._sources.copy()
        targets[:, 0] += np.uint64(base)
        sources[:, 0] = np.array(pointers, np.uint64)[self._positions]
        calls = range(0, len(sources), _CALL_VECTORS)
        left = iter(calls)
        share(lambda: _drain(left, targets, sources, keep), len(calls) // _SERIAL_CALLS)


def _vectors(starts: list[int], smalls: Sequence[Small]) -> _Words:
    """uint64[n, 2]: addresses and bytes, as `struct iovec` has them."""
    sizes = [small.nbytes for small in smalls]
    return np.array([starts, sizes], np.uint64).T.copy()


def _drain(left: Iterator[int], targets: _Words, sources: _Words, keep: object) -> None:  # noqa: ARG001 - held, not used
    for begin in left:
        some = slice(begin, begin + _CALL_VECTORS)
        _copy(targets[some], sources[some])


def _copy(targets: _Words, sources: _Words) -> None:
    count = len(sources)
    if _read is not None:
        vectors = (targets.ctypes.data, count, sources.ctypes.data, count)
        if _read(os.getpid(), *vectors, 0) == int(sources[:, 1].sum()):
            return
    # Not allowed here, or memory of a driver's that the kernel does not read for others.
    columns = (targets[:, 0].tolist(), sources[:, 0].tolist(), sources[:, 1].tolist())
    deque(map(ctypes.memmove, *columns), maxlen=0)
