"""What callers may hand in: everything else is one clear error, before anything is written."""

from __future__ import annotations

import numpy as np
import pytest

from erasure import Code, Codec, CodeError, ErasureError, PlanariaError, TooFewFragments
from erasure.errors import KernelUnavailable


def good(n=8):
    """Return one valid buffer."""
    return np.full(n, 7, np.uint8)


def read_only():
    """Return a buffer that cannot be written."""
    return np.frombuffer(bytes(8), np.uint8)


KINDS = {
    "bytes": (lambda: bytes(8), "numpy array"),
    "bytearray": (lambda: bytearray(8), "numpy array"),
    "memoryview": (lambda: memoryview(bytes(8)), "numpy array"),
    "none": (lambda: None, "numpy array"),
    "int8": (lambda: np.zeros(8, np.int8), "uint8"),
    "float32": (lambda: np.zeros(2, np.float32), "uint8"),
    "matrix": (lambda: np.zeros((2, 4), np.uint8), "shape"),
    "scalar": (lambda: np.zeros((), np.uint8), "shape"),
    "strided": (lambda: np.zeros(16, np.uint8)[::2], "contiguous"),
    "reversed": (lambda: np.zeros(8, np.uint8)[::-1], "contiguous"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["data", "parity", "have", "want"])
def test_another_kind_of_buffer(kernel, kind, place):
    """Only contiguous uint8[n] is taken, at each of the four places; outputs stay as they were."""
    make, message = KINDS[kind]
    buffers = {"data": good(), "parity": good(), "have": good(), "want": good()} | {place: make()}
    codec, untouched = Codec(Code(2, 2), kernel), good()
    if place in {"data", "parity"}:
        with pytest.raises(CodeError, match=message):
            codec.encode([good(), buffers["data"]], [untouched, buffers["parity"]])
    else:
        with pytest.raises(CodeError, match=message):
            codec.decode({1: good(), 2: buffers["have"]}, {0: untouched, 3: buffers["want"]})
    assert np.array_equal(untouched, good())


def test_outputs_must_be_writable(kernel):
    """Read-only outputs are refused, read-only sources are fine."""
    codec = Codec(Code(2, 1), kernel)
    with pytest.raises(CodeError, match=r"wanted fragment 2: .*read-only"):
        codec.encode([good(), good()], [read_only()])
    with pytest.raises(CodeError, match=r"wanted fragment 0: .*read-only"):
        codec.decode({1: good(), 2: good()}, {0: read_only()})
    parity = good()
    codec.encode([read_only(), read_only()], [parity])
    assert not parity.any()


@pytest.mark.parametrize(
    ("data", "parity", "message"),
    [
        ((8,), (8,), "expected 2 data buffers, got 1"),
        ((8, 8, 8), (8,), "expected 2 data buffers, got 3"),
        ((8, 8), (), "expected 1 parity buffers, got 0"),
        ((8, 8), (8, 8), "expected 1 parity buffers, got 2"),
        ((8, 8), (7,), "fragment 2: expected 8 bytes, .* got 7"),
        ((8, 9), (8,), "fragment 2: expected 9 bytes, .* got 8"),
    ],
)
def test_encode_wants_the_right_number_and_length(kernel, data, parity, message):
    """Too few, too many or too short buffers are refused, in a sentence with the facts."""
    with pytest.raises(CodeError, match=message):
        Codec(Code(2, 1), kernel).encode([good(n) for n in data], [good(n) for n in parity])


@pytest.mark.parametrize(
    ("have", "want", "message"),
    [
        ({0: 8, 2: 7}, {1: 8}, "fragment 2: expected 8 bytes, .* got 7"),
        ({1: 9, 2: 8}, {0: 8}, "fragment 2: expected 9 bytes, .* got 8"),
        ({1: 8, 2: 8}, {0: 9}, "fragment 2: expected 9 bytes, .* got 8"),
        ({0: 8, 1: 8}, {2: 7}, "fragment 2: expected 8 bytes, .* got 7"),
        ({0: 8, 1: 8, 2: 7}, {3: 8}, "fragment 2: expected 8 bytes, .* got 7"),
        ({0: 8, 1: 8}, {4: 8}, "from 0 to 3, got 4"),
        ({0: 8, -1: 8}, {2: 8}, "from 0 to 3, got -1"),
        ({0: 8, True: 8}, {2: 8}, "from 0 to 3, got True"),
        ({0: 8, "1": 8}, {2: 8}, "from 0 to 3, got '1'"),
    ],
)
def test_decode_wants_fitting_fragments(kernel, have, want, message):
    """A parity that is not the longest, or an index that is no fragment, is refused."""
    with pytest.raises(CodeError, match=message):
        Codec(Code(2, 2), kernel).decode(
            {i: good(n) for i, n in have.items()}, {i: good(n) for i, n in want.items()}
        )


def test_too_few_fragments(kernel):
    """Below k the error holds both counts: one of three is given."""
    out = good()
    with pytest.raises(TooFewFragments, match=r"1 distinct .* 3 are needed") as caught:
        Codec(Code(3, 2), kernel).decode({4: good()}, {0: out})
    assert (caught.value.have, caught.value.need) == (1, 3)
    assert np.array_equal(out, good())


OVERLAPS = {
    "output is a source": ((0, 8), (8, 16), (0, 8), (20, 28)),
    "output starts in a source": ((0, 8), (8, 16), (15, 23), (24, 32)),
    "output ends in a source": ((4, 12), (12, 20), (24, 32), (0, 5)),
    "output inside two sources": ((0, 16), (8, 24), (14, 18), (30, 34)),
    "output inside the longer of two sources": ((0, 30), (5, 10), (12, 16), (40, 44)),
    "source inside an output": ((10, 12), (40, 56), (4, 20), (20, 36)),
    "outputs overlap": ((0, 8), (8, 16), (20, 28), (27, 35)),
    "outputs are one": ((0, 8), (8, 16), (20, 28), (20, 28)),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_outputs_overlap_nothing(kernel, name):
    """Memory that is read, or written twice, is no output: slices of one slab overlap each way."""
    slab = np.zeros(64, np.uint8)
    ranges = [slab[start:stop] for start, stop in OVERLAPS[name]]
    codec = Codec(Code(2, 0), kernel)
    with pytest.raises(CodeError, match="overlaps"):
        codec.decode({0: ranges[0], 1: ranges[1]}, {0: ranges[2], 1: ranges[3]})


def test_neighbours_and_shared_sources_are_fine(kernel):
    """Sources may be one memory, and an output may begin where a source ends."""
    slab = np.arange(40, dtype=np.uint8)
    Codec(Code(2, 2), kernel).encode([slab[:10], slab[:10]], [slab[10:20], slab[20:30]])
    apart = [np.zeros(10, np.uint8) for _ in range(2)]
    Codec(Code(2, 2), kernel).encode([slab[:10].copy(), slab[:10].copy()], apart)
    assert [bytes(a) for a in apart] == [bytes(slab[10:20]), bytes(slab[20:30])]
    assert np.array_equal(slab[30:], np.arange(30, 40, dtype=np.uint8))


def test_empty_buffers_overlap_nothing(kernel):
    """Empty slices of a buffer have an address but no bytes: they are accepted."""
    slab = np.zeros(4, np.uint8)
    Codec(Code(2, 1), kernel).encode([slab[:0], slab[2:2]], [slab[1:1]])
    assert not slab.any()


def test_the_tree_of_errors():
    """Callers catch by fault: each error is where the tree says."""
    assert issubclass(CodeError, ErasureError)
    assert issubclass(CodeError, ValueError)
    assert issubclass(TooFewFragments, ErasureError)
    assert issubclass(KernelUnavailable, ErasureError)
    assert issubclass(ErasureError, PlanariaError)
