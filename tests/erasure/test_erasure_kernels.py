"""Kernels: found, tested at load, refused when wrong, exchanged without anybody noticing."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import zfec

from erasure import Code, Codec, CodeError, KernelUnavailable, best_kernel, load_isal, load_zfec
from erasure.kernels import Recipe, self_test
from erasure.kernels import isal as isal_module
from tests.sources import ROOT

REPORT = """
import logging, sys
import numpy as np
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
from erasure import Code, Codec, best_kernel, digest
codec = Codec(Code(4, 3))
data = [np.arange(i, i + 100_003).astype(np.uint8) for i in range(3)] + [np.ones(50, np.uint8)]
parity = [np.zeros(100_003, np.uint8) for _ in range(3)]
codec.encode(data, parity)
back = {i: np.zeros(data[i].size, np.uint8) for i in (0, 2, 3)}
codec.decode({1: data[1], 4: parity[0], 5: parity[1], 6: parity[2]}, back)
assert all(np.array_equal(back[i], data[i]) for i in back)
print(codec.kernel.name.split()[0], digest(np.concatenate(parity)).hex(), "zfec" in sys.modules)
"""
BLOCK_ZFEC = "import sys; sys.modules['zfec'] = None\n"
BLOCK_ISAL = """
import sys
def refuse(event, args):
    if event == "ctypes.dlopen" and "isal" in str(args[0]):
        raise OSError("blocked")
sys.addaudithook(refuse)
"""


def run(program):
    """Run a program in a fresh interpreter at the root of the repository."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def library_with(isal, encode):
    """Return a library whose ec_encode_data is the Python function encode(real, *arguments)."""
    return SimpleNamespace(
        ec_init_tables=isal._init_tables,
        ec_encode_data=lambda *arguments: encode(isal._encode, *arguments),
    )


def test_zfec_may_be_absent_where_isal_is(isal):
    """With zfec blocked, encode and decode run and give the bytes of a process that has both."""
    both, alone = run(REPORT), run(BLOCK_ZFEC + REPORT)
    assert (both.returncode, alone.returncode) == (0, 0), both.stderr + alone.stderr
    name, parity, imported = both.stdout.split()
    assert (name, imported) == ("ISA-L", "False")
    assert alone.stdout.split() == ["ISA-L", parity, "True"]
    assert alone.stderr.count("ISA-L") == 1


def test_zfec_takes_over_where_isal_is_absent(isal):
    """With the loading of ISA-L blocked, zfec gives the same bytes, and one warning says so."""
    fast, portable = run(REPORT), run(BLOCK_ISAL + REPORT)
    assert portable.returncode == 0, portable.stderr
    assert portable.stdout.split()[:2] == ["zfec", fast.stdout.split()[1]]
    assert portable.stderr.count("WARNING erasure code computed by zfec") == 1
    assert "blocked" in portable.stderr


def test_no_kernel_at_all_is_one_clear_error():
    """With both blocked the error names both reasons and what to install."""
    nothing = run(BLOCK_ZFEC + BLOCK_ISAL + REPORT)
    assert nothing.returncode == 1
    last = nothing.stderr.strip().splitlines()[-1]
    assert last.startswith("erasure.errors.KernelUnavailable: no usable ISA-L")
    assert "blocked" in last
    assert "planaria[fast]" in last
    assert "zfec cannot be imported" in last


@pytest.fixture
def fresh_choice():
    """Forget the kernel that was chosen, before and after."""
    best_kernel.cache_clear()
    yield
    best_kernel.cache_clear()


def test_the_choice_is_made_and_logged_once(isal, fresh_choice, caplog):
    """Many codecs, one line in the log: it names the library."""
    caplog.set_level(logging.INFO, "planaria")
    kernels = {Codec(Code(2, 1)).kernel for _ in range(3)}
    assert kernels == {best_kernel()}
    assert [record.getMessage() for record in caplog.records] == [
        f"erasure code computed by {isal.name}"
    ]


def test_the_next_library_is_tried(isal, monkeypatch, tmp_path):
    """A missing file, a file that is no library and a library without the functions are passed."""
    text = tmp_path / "libisal.so.2"
    text.write_text("no library")
    real = isal.name.removeprefix("ISA-L (").removesuffix(")")
    paths = [str(tmp_path / "missing.so"), str(text), "libc.so.6", real]
    monkeypatch.setattr(isal_module, "find_isal", lambda: tuple(paths))
    assert load_isal().name == isal.name
    paths.pop()
    with pytest.raises(KernelUnavailable) as caught:
        load_isal()
    assert all(path in str(caught.value) for path in paths)
    assert "(libc.so.6) is not ISA-L's erasure code" in str(caught.value)


def wrong_tail(real, *call):
    """Compute all but the last byte of the last output."""
    real(*call)
    nbytes, _, wanted, _, _, outputs = call
    ctypes.c_ubyte.from_address(outputs[wanted - 1] + nbytes - 1).value ^= 1


def too_far(real, *call):
    """Write one byte past the end of the first output."""
    real(*call)
    nbytes, *_, outputs = call
    ctypes.c_ubyte.from_address(outputs[0] + nbytes).value ^= 1


def undone_when_short(real, *call):
    """Do nothing for short lengths."""
    if call[0] >= 32:
        real(*call)


@pytest.mark.parametrize("encode", [wrong_tail, too_far, undone_when_short])
def test_a_library_that_computes_wrongly_is_refused(isal, encode):
    """The self-test at load finds a wrong tail, a write too far and an undone short length."""
    with pytest.raises(KernelUnavailable, match="broken is refused: its self-test failed"):
        isal_module.IsalKernel(library_with(isal, encode), "broken")


def test_a_zfec_that_computes_wrongly_is_refused(monkeypatch):
    """The portable kernel takes the same test: an encoder that returns zeros is refused."""

    class ZerosEncoder:
        def __init__(self, k, n):
            self.counts = k, n

        def encode(self, blocks, wanted):
            return [bytes(len(blocks[0])) for _ in wanted]

    broken = SimpleNamespace(__version__="0", Encoder=ZerosEncoder, Decoder=zfec.Decoder)
    monkeypatch.setitem(sys.modules, "zfec", broken)
    with pytest.raises(KernelUnavailable, match="zfec 0 is refused: its self-test failed"):
        load_zfec()


def test_every_kernel_passes_the_self_test(kernel):
    """The self-test that both kernels took at load passes again: it changes nothing."""
    self_test(kernel)


def test_long_work_is_split(isal, monkeypatch):
    """No call is longer than CALL_BYTES, which fits a C int: calls are recorded, bytes compared."""
    lengths = []

    def record(real, nbytes, *rest):
        lengths.append(nbytes)
        real(nbytes, *rest)

    assert isal_module.CALL_BYTES < 2**30
    recording = isal_module.IsalKernel(library_with(isal, record), "recording")
    data = [np.arange(i, i + 2500).astype(np.uint8) for i in range(3)]
    whole, split = ([np.zeros(2500, np.uint8) for _ in range(2)] for _ in range(2))
    Codec(Code(3, 2), isal).encode(data, whole)
    monkeypatch.setattr(isal_module, "CALL_BYTES", 1000)
    lengths.clear()
    Codec(Code(3, 2), recording).encode(data, split)
    assert lengths == [1000, 1000, 500]
    assert [bytes(p) for p in split] == [bytes(p) for p in whole]


def test_tables_are_expanded_once(isal):
    """A codec keeps what it prepared: many blocks of one shape expand the matrix once."""
    expanded = []

    class Counting:
        name = "counting"

        def combine(self, recipe):
            expanded.append(recipe)
            return isal.combine(recipe)

    codec = Codec(Code(3, 1), Counting())
    buffers = [np.zeros(100, np.uint8) for _ in range(4)]
    for _ in range(5):
        codec.encode(buffers[:3], buffers[3:])
        codec.decode(dict(enumerate(buffers[1:], 1)), {0: buffers[0]})
    assert [recipe.want for recipe in expanded] == [(3,), (0,)]


def test_a_lookup_knows_the_wheel(isal):
    """The system's library comes first, then the file that PyECLib's wheel lists, if installed."""
    first, *bundled = isal_module.find_isal()
    assert first == "libisal.so.2"
    assert all("libisal" in path for path in bundled)


@pytest.mark.parametrize("given", [(1, 0), (0, 2), (0, 0, 1)])
def test_a_recipe_checks_itself(given):
    """The given fragments are a part of the k that are used, in order; else no recipe exists."""
    with pytest.raises(CodeError, match="recipe: given"):
        Recipe(Code(2, 1), (0, 1), given, (2,))
