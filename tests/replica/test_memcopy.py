"""Memory is copied whole, by all threads, and nobody touches it after the call."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch

from replica import memcopy
from replica.memcopy import PIECE_BYTES, copy_pieces


def pieces_of(target, source, size):
    """Cut a copy of two arrays into pieces."""
    to, at = (array.__array_interface__["data"][0] for array in (target, source))
    return [
        (to + begin, at + begin, min(size, source.nbytes - begin))
        for begin in range(0, source.nbytes, size)
    ]


@pytest.mark.parametrize("threads", [1, 2, 5, 64])
@pytest.mark.parametrize("size", [1 << 20, 3 << 20, 64 << 20])
def test_every_byte_is_copied(threads, size, rng, monkeypatch):
    """Source and target are equal for any number of threads and any size of piece."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    source = rng.integers(0, 256, 5 * PIECE_BYTES + 77, np.uint8)
    target = np.zeros_like(source)
    copy_pieces(pieces_of(target, source, size), (target, source))
    assert (target == source).all()


def test_no_pieces_are_no_work():
    """An empty list is fine: a rank without tensors has one."""
    copy_pieces([], None)


def test_an_interrupt_waits_for_the_other_threads(monkeypatch):
    """When the calling thread is interrupted the others have finished before it raises."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    caller, started, finished = threading.current_thread(), threading.Event(), []

    def move(_target, _source, nbytes):
        if threading.current_thread() is caller:
            assert started.wait(60)
            raise KeyboardInterrupt
        started.set()
        finished.append(nbytes)

    monkeypatch.setattr(ctypes, "memmove", move)
    with pytest.raises(KeyboardInterrupt):
        copy_pieces([(0, 0, PIECE_BYTES)] * 10, None)
    assert len(finished) == 9


def test_without_threads_the_caller_copies(monkeypatch, rng):
    """At the interpreter's end no thread starts; the call still copies everything."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def refuse():
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(memcopy, "_executor", refuse)
    source = rng.integers(0, 256, 6 * PIECE_BYTES, np.uint8)
    target = np.zeros_like(source)
    copy_pieces(pieces_of(target, source, PIECE_BYTES), None)
    assert (target == source).all()
