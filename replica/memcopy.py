"""Plain copies of memory on as many threads as torch uses, with one point of waiting.

`Tensor.copy_` waits for all of torch's threads once per tensor. With 64 tensors and a busy
machine that was measured at five times the time of one large copy; here the threads take pieces
from one list, so that a thread that was descheduled holds up no more than what it has taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise, starmap

import numpy as np
import torch

from replica.changes import Changes
from replica.copy_loop import CopyLoop, Words, copy_loop

PIECE_BYTES = 4 << 20
_TURN_BYTES = 16 << 20
"""What a thread takes at once, with the loop: some milliseconds, after which Ctrl-C is heard."""
_ROW_BYTES = 1 << 10
"""A piece more takes as long as so many bytes: its memory is somewhere else, and cold."""
_SERIAL_BYTES = 4 * PIECE_BYTES
_THREADS_MAX = 16
_LOOK_S = 60.0

Piece = tuple[int, int, int]
"""Address to, address from, bytes."""

_pool: list[ThreadPoolExecutor] = []
# Threads do not survive a fork; a child that copies starts its own.
os.register_at_fork(after_in_child=_pool.clear)


def copy_pieces(pieces: Sequence[Piece] | Words, keep: object) -> None:
    """Copy all pieces; returns, or raises, when no thread touches any of them any more.

    As an array they are uint64[n, 3]. `keep` holds the memory alive until then. Pieces must not
    overlap one another's targets, and be of at most `PIECE_BYTES` if several threads are to share
    them.
    """
    rows = np.ascontiguousarray(pieces, np.uint64).reshape(-1, 3)
    costs = np.cumsum(rows[:, 2] + np.uint64(_ROW_BYTES))
    if not len(rows):
        return
    parts = 1 if costs[-1] < _SERIAL_BYTES else len(rows)
    loop = copy_loop()
    if loop is None:
        singly: Iterator[list[int]] = iter(rows.tolist())
        share(partial(_drain, singly, keep), parts)
        return
    cuts = (np.flatnonzero(np.diff(costs // np.uint64(_TURN_BYTES))) + 1).tolist()
    turns = iter(list(pairwise([0, *cuts, len(rows)])))
    share(partial(_drain_turns, loop, turns, rows, keep), parts)


def share(drain: Callable[[], None], parts: int) -> None:
    """Run `drain` here and in as many other threads as torch uses, at most `parts` in all.

    It takes parts of the work from an iterator until none is left. Returns, or raises, when it has
    returned in every thread that has begun it; no other begins it any more.
    """
    threads, crew = min(torch.get_num_threads(), _THREADS_MAX, parts), _Crew(drain)
    try:
        # At the interpreter's end no thread can be started, or the system allows no more: then
        # those that there are do it all.
        with contextlib.suppress(RuntimeError):
            for _ in range(threads - 1):
                _executor().submit(crew.join)
        drain()
    finally:
        crew.leave()


class _Crew:
    """The threads that run one `drain`. One that was asked for may come at any time, or never."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain, self._changes = drain, Changes()
        self._at_work, self._over = 0, False
        self._error: BaseException | None = None

    def join(self) -> None:
        """In another thread: take part."""
        with self._changes.lock:
            if self._over:
                return
            self._at_work += 1
        try:
            self._drain()
        except BaseException as error:  # noqa: BLE001 - raised by `leave`
            self._error = error
        finally:
            with self._changes.lock:
                self._at_work -= 1
                self._changes.tell()

    def leave(self) -> None:
        """Wait for those that take part, Ctrl-C or not; raises what one of them did, or that."""
        interrupt: BaseException | None = None
        at_work = True
        while at_work:
            try:
                self._over = True
                at_work = not self._changes.wait_for(lambda: not self._at_work, _LOOK_S)
            except BaseException as error:  # noqa: BLE001 - raised when all have left
                interrupt = error
        if interrupt or self._error:
            raise interrupt or self._error  # type: ignore[misc]


def _drain(pieces: Iterator[list[int]], keep: object) -> None:  # noqa: ARG001 - held, not used
    # Without a step of the interpreter between two pieces, where another thread takes its lock.
    deque(starmap(ctypes.memmove, pieces), maxlen=0)


def _drain_turns(
    loop: CopyLoop,
    turns: Iterator[tuple[int, int]],
    rows: Words,
    keep: object,  # noqa: ARG001 - held, not used
) -> None:
    start, row_bytes = rows.ctypes.data, rows.strides[0]
    for begin, end in turns:
        loop(start + begin * row_bytes, end - begin)


def _executor() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(_THREADS_MAX - 1, "planaria-copy"))
    return _pool[0]
