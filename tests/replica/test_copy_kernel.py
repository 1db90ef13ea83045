"""The compiled copy: every byte, none beside it, and no kernel where it cannot be trusted."""

from __future__ import annotations

import builtins
import ctypes
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica import copy_kernel as module
from replica.copy_kernel import STREAM_BYTES, copy_kernel

SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(STREAM_BYTES - 130, STREAM_BYTES + 130),
    st.integers(0, 1 << 18),
)
PIECE = st.tuples(st.integers(0, 200), st.integers(0, 200), SIZES)


@pytest.fixture
def anew():
    """Have the kernel looked for again, here and by whoever comes after."""
    copy_kernel.cache_clear()
    yield
    copy_kernel.cache_clear()


@given(st.lists(PIECE, max_size=12), st.integers(0, 2**32 - 1))
def test_every_byte_and_none_beside(pieces, seed):
    """Any sizes and alignments of both sides give what a plain copy gives; gaps stay as they were.

    NaNs and all: it is bytes that are moved.
    """
    room = sum(gap + size for gap, _, size in pieces) + 400
    source = np.random.default_rng(seed).integers(0, 256, room + 200, np.uint8)
    target = np.full(room, 0xA5, np.uint8)
    twin, rows, at = target.copy(), [], 0
    for gap, shift, size in pieces:
        at += gap
        twin[at : at + size] = source[at + shift : at + shift + size]
        rows.append((target.ctypes.data + at, source.ctypes.data + at + shift, size))
        at += size
    words = np.array(rows, np.uint64).reshape(-1, 3)
    copy_kernel()(words.ctypes.data, len(words))
    assert target.tobytes() == twin.tobytes()


@pytest.mark.usefixtures("anew")
def test_without_llvmlite_there_is_none(monkeypatch, caplog):
    """It is optional: one line says what would be faster, and the caller copies otherwise."""
    real = builtins.__import__

    def refuse(name, *args):
        if name.startswith("llvmlite"):
            raise ModuleNotFoundError("No module named 'llvmlite'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.INFO, "planaria"):
        assert copy_kernel() is None
        assert copy_kernel() is None
    assert caplog.text.count("planaria[fast] brings what is faster: No module named") == 1


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("fault", ["a byte less", "a byte more", "nothing", "wrong place"])
def test_one_that_copies_wrong_bytes_is_refused(fault, monkeypatch, caplog):
    """What was compiled is tried before it is used: a wrong byte or one more, and there is none."""

    def wrong(address, count):
        rows = (ctypes.c_size_t * (3 * count)).from_address(address)
        for at in range(0, 3 * count, 3):
            target, source, nbytes = rows[at : at + 3]
            nbytes += {"a byte less": -(nbytes > 1000), "a byte more": 1}.get(fault, 0)
            if fault != "nothing":
                ctypes.memmove(target, source + (fault == "wrong place"), nbytes)

    monkeypatch.setattr(module, "_compiled", lambda: wrong)
    with caplog.at_level(logging.INFO, "planaria"):
        assert copy_kernel() is None
    assert "copies wrong bytes" in caplog.text


@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"])
def test_it_is_written_past_the_cache(triple):
    """What LLVM makes of it has the instructions meant, for both kinds of processor."""
    binding = pytest.importorskip("llvmlite.binding")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    words = module._X86 if triple.startswith("x86") else module._OTHERS
    source = module._SOURCE.format(**words, stream_bytes=STREAM_BYTES)
    machine = binding.Target.from_triple(triple).create_target_machine(opt=2)
    text = machine.emit_assembly(binding.parse_assembly(source))
    store, fence = ("movnt", "sfence") if triple.startswith("x86") else ("stnp", "dmb")
    assert store in text
    assert fence in text
