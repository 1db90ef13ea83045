"""Memory is copied whole, by all threads, and nobody touches it after the call."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch

from replica import memcopy
from replica.memcopy import PIECE_BYTES, copy_pieces


@pytest.fixture(params=["loop", "memmove"])
def kind(request, monkeypatch):
    """Copy by the compiled loop, or piece by piece as where there is none."""
    if request.param == "memmove":
        monkeypatch.setattr(memcopy, "copy_loop", lambda: None)
    return request.param


def pieces_of(target, source, size):
    """Cut a copy of two arrays into pieces."""
    to, at = (array.__array_interface__["data"][0] for array in (target, source))
    return [
        (to + begin, at + begin, min(size, source.nbytes - begin))
        for begin in range(0, source.nbytes, size)
    ]


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
@pytest.mark.parametrize("size", [1 << 20, 3 << 20, 64 << 20])
def test_every_byte_is_copied(threads, size, rng, monkeypatch):
    """Source and target are equal for any number of threads and any size of piece."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    source = rng.integers(0, 256, 5 * PIECE_BYTES + 77, np.uint8)
    target = np.zeros_like(source)
    copy_pieces(pieces_of(target, source, size), (target, source))
    assert (target == source).all()


@pytest.mark.usefixtures("kind")
def test_no_pieces_are_no_work():
    """An empty list is fine: a rank without tensors has one."""
    copy_pieces([], None)


def test_an_interrupt_waits_for_the_other_threads(monkeypatch, kind):
    """When the calling thread is interrupted the others have finished before it raises."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    caller, started, finished, broken = threading.current_thread(), threading.Event(), [], []

    def work(count):
        if threading.current_thread() is caller:
            assert started.wait(60)
            broken.append(count)
            raise KeyboardInterrupt
        started.set()
        finished.append(count)

    if kind == "loop":
        monkeypatch.setattr(memcopy, "copy_loop", lambda: lambda _, count: work(count))
    monkeypatch.setattr(ctypes, "memmove", lambda *_: work(1))
    with pytest.raises(KeyboardInterrupt):
        copy_pieces([(0, 0, PIECE_BYTES)] * 40, None)
    assert len(broken) == 1
    assert sum(finished) == 40 - broken[0]


@pytest.mark.usefixtures("kind")
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


def test_many_pieces_are_shared(monkeypatch, rng):
    """Small pieces go to more than one thread too, and each is copied once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    source = rng.integers(0, 256, 200_000 * 8, np.uint8)
    target = np.zeros_like(source)
    seen = []

    def loop(address, count):
        seen.append((threading.get_ident(), count))
        real(address, count)

    real = memcopy.copy_loop()
    if real is None:
        pytest.skip("llvmlite is not installed")
    monkeypatch.setattr(memcopy, "copy_loop", lambda: loop)
    copy_pieces(np.array(pieces_of(target, source, 8), np.uint64), (target, source))
    assert (target == source).all()
    assert sum(count for _, count in seen) == 200_000
    assert len(seen) > 5
