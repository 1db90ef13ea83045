"""The compiled copy: every byte, none beside it, and no loop where it cannot be trusted."""

from __future__ import annotations

import builtins
import ctypes
import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica import copy_loop as module
from replica import gather, memcopy
from replica.copy_loop import STREAM_BYTES, copy_loop
from replica.gather import SMALL_BYTES
from replica.snapshot import Snapshot
from tests.replica.snapshot_tools import HEADER

SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(STREAM_BYTES - 130, STREAM_BYTES + 130),
    st.integers(0, 1 << 18),
)
NEEDS_LOOP = pytest.mark.skipif(copy_loop() is None, reason="llvmlite is not installed")
PIECE = st.tuples(st.integers(0, 200), st.integers(0, 200), SIZES)


@pytest.fixture
def anew():
    """Have the loop looked for again, here and by whoever comes after."""
    copy_loop.cache_clear()
    yield
    copy_loop.cache_clear()


@NEEDS_LOOP
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
    copy_loop()(words.ctypes.data, len(words))
    assert target.tobytes() == twin.tobytes()


@NEEDS_LOOP
def test_an_image_is_the_same_without_it(monkeypatch, rng):
    """Large, small, single and empty tensors, and views: each way writes the very same bytes."""
    base = torch.from_numpy(rng.integers(0, 256, 6 << 20, np.uint8))
    sizes = [0, 1, 2, 4, 8, 12, 300, SMALL_BYTES - 4, SMALL_BYTES, SMALL_BYTES + 4, 5 << 20]
    state = {
        "bytes": [base[at : at + size].clone() for at, size in enumerate(sizes)],
        "views": [base[at : at + size] for at, size in enumerate(sizes)],
        "numbers": [torch.tensor(float(at)) for at in range(500)],
        "halves": [torch.full((3, at), float(at), dtype=torch.bfloat16) for at in range(50)],
        "turned": base[: 1 << 20].view(1 << 10, 1 << 10).T,
    }
    images = []
    for way in ("loop", "system"):
        if way == "system":
            monkeypatch.setattr(gather, "copy_loop", lambda: None)
            monkeypatch.setattr(memcopy, "copy_loop", lambda: None)
        snapshot = Snapshot({"s": state}, random_states=False)
        buffer = np.full(snapshot.plan(0).capacity_bytes, 0xA5, np.uint8)
        images.append(buffer[: snapshot.capture_into(buffer, HEADER)].tobytes())
    assert images[0] == images[1]


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
        assert copy_loop() is None
        assert copy_loop() is None
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
        assert copy_loop() is None
    assert "copies wrong bytes" in caplog.text


@NEEDS_LOOP
@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"])
def test_it_is_written_past_the_cache(triple):
    """What LLVM makes of it has the instructions meant, for both kinds of processor."""
    from llvmlite import binding  # noqa: PLC0415 - optional

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    words = module._X86 if triple.startswith("x86") else module._OTHERS
    source = module._SOURCE.format(**words, stream_bytes=STREAM_BYTES)
    machine = binding.Target.from_triple(triple).create_target_machine(opt=2)
    text = machine.emit_assembly(binding.parse_assembly(source))
    store, fence = ("movnt", "sfence") if triple.startswith("x86") else ("stnp", "dmb")
    assert store in text
    assert fence in text


FORBIDDEN = """
import ctypes, logging, sys
logging.basicConfig(level="INFO")
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE: no memory that was written is ever run
    sys.exit(77)
from replica.copy_loop import copy_loop
print(copy_loop())
"""


@NEEDS_LOOP
def test_where_the_system_forbids_machine_code():
    """There is none, and nobody dies: services are run so, by systemd's MemoryDenyWriteExecute."""
    found = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=False, timeout=120
    )
    if found.returncode == 77:
        pytest.skip("this kernel cannot forbid it")
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "None"
    assert "forbids machine code" in found.stderr
