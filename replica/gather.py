"""Many small tensors copied into one buffer by a few calls, straight from their addresses.

A call per tensor costs more than the bytes of a small one. The compiled loop takes all of them at
once. Where there is none, `process_vm_readv` takes a thousand addresses, without the interpreter's
lock, and here the process that it reads is this one. What was measured for that choice:
`docs/performance.md`. The system takes 2 us for each, however small: what is no larger than a
number, as an optimizer's step counts, is picked by numpy instead.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from replica.copy_loop import Words, copy_loop
from replica.image import Bytes
from replica.memcopy import copy_pieces, share

_NUMBER_BYTES = (1, 2, 4, 8)
SMALL_BYTES = 1 << 16
"""Tensors of fewer bytes are gathered; above, the bytes take longer than the call."""
_CALL_VECTORS = 1024
"""What the system takes at once (IOV_MAX)."""
_SERIAL_CALLS = 2


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
        self._rows = _Rows(smalls) if copy_loop() is not None else None
        if self._rows is not None:
            return
        sizes = [_number_bytes(small) for small in smalls]
        split = {size: list(compress(smalls, map(size.__eq__, sizes))) for size in set(sizes)}
        self._vectors = _Vectors(split.pop(0, []))
        self._numbers = [_Numbers(size, some) for size, some in split.items()]

    def copy(self, addresses: Words, buffer: Bytes, keep: object) -> None:
        """Copy all into the buffer; `addresses`, uint64[n], are those of all the tensors.

        `keep` holds the memory alive. Returns, or raises, when no thread touches any of it any
        more.
        """
        base = buffer.__array_interface__["data"][0]
        if self._rows is not None:
            self._rows.copy(addresses, base, keep)
            return
        for numbers in self._numbers:
            numbers.copy(addresses, buffer)
        self._vectors.copy(addresses, base, keep)


def _number_bytes(small: Small) -> int:
    """The size of a tensor that goes into the buffer as one number would lie there, or 0."""
    fits = small.nbytes in _NUMBER_BYTES and small.start % small.nbytes == 0
    return small.nbytes if fits else 0


class _Rows:
    """Tensors that the compiled loop copies."""

    def __init__(self, smalls: Sequence[Small]) -> None:
        self._positions = np.array([small.position for small in smalls], np.intp)
        self._starts = np.array([small.start for small in smalls], np.uint64)
        self._sizes = np.array([small.nbytes for small in smalls], np.uint64)

    def copy(self, addresses: Words, base: int, keep: object) -> None:
        """As `Gathers.copy`, into a buffer at address `base`."""
        targets = self._starts + np.uint64(base)
        copy_pieces(np.stack((targets, addresses[self._positions], self._sizes), axis=1), keep)


class _Numbers:
    """Tensors of one number each, all of one size."""

    def __init__(self, size: int, smalls: Sequence[Small]) -> None:
        self._size = size
        self._positions = np.array([one.position for one in smalls], np.intp)
        self._targets = np.array([one.start // size for one in smalls], np.intp)
        self._end = max(one.start + size for one in smalls)

    def copy(self, addresses: Words, buffer: Bytes) -> None:
        """Pick them out of what looks like one array, from the lowest address to the highest."""
        size, number = self._size, np.dtype(f"u{self._size}")
        sources = addresses[self._positions]
        lowest = sources.min()
        far = (sources - lowest).astype(np.intp)
        # One that lies across its size, as in a file's bytes, is picked byte by byte.
        word = 1 if (far % size).any() else size
        memory = _memory(int(lowest), int(far.max()) + size).view(f"u{word}")
        found = memory[(far // word)[:, None] + np.arange(size // word)]
        buffer[: self._end].view(number)[self._targets] = found.view(number)[:, 0]


class _Window:
    """Some of this process's address space, for numpy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, True),
        }


def _memory(address: int, nbytes: int) -> Bytes:
    """uint8[nbytes] at an address; most of it must not be read, for nothing may be mapped there."""
    return np.asarray(_Window(address, nbytes))


class _Vectors:
    """Tensors that the system copies, a list of them at a time."""

    def __init__(self, smalls: Sequence[Small]) -> None:
        self._positions = np.array([small.position for small in smalls], np.intp)
        self._targets = _vectors([small.start for small in smalls], smalls)
        self._sources = _vectors([0] * len(smalls), smalls)

    def copy(self, addresses: Words, base: int, keep: object) -> None:
        """As `Gathers.copy`, into a buffer at address `base`."""
        if not len(self._positions):
            return
        targets, sources = self._targets.copy(), self._sources.copy()
        targets[:, 0] += np.uint64(base)
        sources[:, 0] = addresses[self._positions]
        calls = range(0, len(sources), _CALL_VECTORS)
        left = iter(calls)
        share(lambda: _drain(left, targets, sources, keep), len(calls) // _SERIAL_CALLS)


def _vectors(starts: list[int], smalls: Sequence[Small]) -> Words:
    """uint64[n, 2]: addresses and bytes, as `struct iovec` has them."""
    sizes = [small.nbytes for small in smalls]
    return np.array([starts, sizes], np.uint64).T.copy()


def _drain(left: Iterator[int], targets: Words, sources: Words, keep: object) -> None:  # noqa: ARG001 - held, not used
    for begin in left:
        some = slice(begin, begin + _CALL_VECTORS)
        _copy(targets[some], sources[some])


def _copy(targets: Words, sources: Words) -> None:
    count = len(sources)
    if _read is not None:
        vectors = (targets.ctypes.data, count, sources.ctypes.data, count)
        if _read(os.getpid(), *vectors, 0) == int(sources[:, 1].sum()):
            return
    # Not allowed here, or memory of a driver's that the system does not read for others.
    columns = (targets[:, 0].tolist(), sources[:, 0].tolist(), sources[:, 1].tolist())
    deque(map(ctypes.memmove, *columns), maxlen=0)
