"""Plain copies of memory on as many threads as torch uses, with one point of waiting.

`Tensor.copy_` waits for all of torch's threads once per tensor. With 64 tensors and a busy
machine that was measured at five times the time of one large copy; here the threads take pieces
from one list, so that a thread that was descheduled holds up one piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

PIECE_BYTES = 4 << 20
_SERIAL_BYTES = 4 * PIECE_BYTES
_THREADS_MAX = 16

Piece = tuple[int, int, int]
"""Address to, address from, bytes."""

_pool: list[ThreadPoolExecutor] = []
# Threads do not survive a fork; a child that copies starts its own.
os.register_at_fork(after_in_child=_pool.clear)


def copy_pieces(pieces: Sequence[Piece], keep: object) -> None:
    """Copy all pieces; returns, or raises, when no thread touches any of them any more.

    `keep` holds the memory alive until then. Pieces must not overlap one another's targets.
    """
    shared = iter(pieces)
    small = sum(nbytes for _, _, nbytes in pieces) < _SERIAL_BYTES
    share(lambda: _drain(shared, keep), 1 if small else len(pieces))


def share(drain: Callable[[], None], parts: int) -> None:
    """Run `drain` here and in as many other threads as torch uses, at most `parts` in all.

    It takes parts of the work from an iterator until none is left. Returns, or raises, when it has
    returned in every thread.
    """
    threads = min(torch.get_num_threads(), _THREADS_MAX, parts)
    helpers: list[Future[None]] = []
    try:
        # At the interpreter's end no thread can be started: then this one does it all.
        with contextlib.suppress(RuntimeError):
            helpers = [_executor().submit(drain) for _ in range(threads - 1)]
        drain()
    finally:
        for helper in helpers:
            helper.result()


def _drain(pieces: Iterator[Piece], keep: object) -> None:  # noqa: ARG001 - held, not used
    for target, source, nbytes in pieces:
        ctypes.memmove(target, source, nbytes)


def _executor() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(_THREADS_MAX - 1, "planaria-copy"))
    return _pool[0]
