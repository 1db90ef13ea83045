"""Memory is copied whole, by all threads, and nobody touches it after the call."""

from __future__ import annotations

import ctypes
import threading
import time

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


def test_a_thread_that_cannot_be_started(kind, monkeypatch, rng):
    """The system allows no more threads: who has begun is waited for, and all is copied."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(memcopy, "_pool", [])
    started, begun, inner = [], threading.Event(), threading.Thread.start

    def start(self):
        started.append(self)
        if len(started) > 1:
            assert begun.wait(60)
            raise RuntimeError("can't start new thread")
        inner(self)

    real = ctypes.memmove if kind == "memmove" else memcopy.copy_loop()
    if real is None:
        pytest.skip("llvmlite is not installed")

    def slowly(*args):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            # The caller has run through all the rest by then, and would not wait much longer.
            assert over.wait(60)
            time.sleep(0.2)
        elif begun.is_set():
            left.append(1)
            if len(left) == 5:
                over.set()
        return real(*args)

    left, over = [], threading.Event()
    if kind == "memmove":
        monkeypatch.setattr(ctypes, "memmove", slowly)
    else:
        monkeypatch.setattr(memcopy, "copy_loop", lambda: slowly)
    monkeypatch.setattr(threading.Thread, "start", start)
    source = rng.integers(0, 256, 30 * PIECE_BYTES, np.uint8)
    target = np.zeros_like(source)
    copy_pieces(pieces_of(target, source, PIECE_BYTES), (target, source))
    assert len(started) > 1
    assert (target == source).all()


def test_ctrl_c_while_the_others_are_waited_for(monkeypatch):
    """It is raised when they have left, not before."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(memcopy, "copy_loop", lambda: None)
    caller, finished, begun = threading.current_thread(), [], threading.Event()
    waits, inner = [], memcopy.Changes.wait_for

    def wait_for(self, look, timeout_s):
        waits.append(1)
        if len(waits) < 3:
            raise KeyboardInterrupt
        return inner(self, look, timeout_s)

    def move(*_):
        if threading.current_thread() is caller:
            assert begun.wait(60)
            return
        begun.set()
        limit_s = time.monotonic() + 60
        while len(waits) < 2 and time.monotonic() < limit_s:
            pass
        finished.append(1)

    monkeypatch.setattr(memcopy.Changes, "wait_for", wait_for)
    monkeypatch.setattr(ctypes, "memmove", move)
    with pytest.raises(KeyboardInterrupt):
        copy_pieces([(0, 0, PIECE_BYTES)] * 10, None)
    assert finished
