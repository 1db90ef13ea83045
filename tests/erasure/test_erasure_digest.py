"""Digests: one flipped bit is found, and nothing unverified passes for verified."""

from __future__ import annotations

import numpy as np
import pytest

from erasure import (
    ALGORITHM,
    CHUNK_BYTES,
    DIGEST_BYTES,
    CodeError,
    bad_chunks,
    chunk_digests,
    digest,
    root_digest,
)


def test_the_algorithm_never_changes():
    """Stored digests stay comparable: name, size and two known values are written here."""
    assert (ALGORITHM, DIGEST_BYTES, CHUNK_BYTES) == ("xxh3-128", 16, 4 * 1024 * 1024)
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest(b"planaria").hex() == "47bb7cdb38429fe9233c24635fc5535b"
    assert root_digest(b"", 0).hex() == "2c0a8a99dc147d5445c3b49d035665b2"


def test_every_kind_of_bytes_has_one_digest():
    """Bytes, bytearray, memoryview and array of the same content give the same digest."""
    array = np.arange(100, dtype=np.uint8)
    kinds = [array, array.tobytes(), bytearray(array.tobytes()), memoryview(array.tobytes())]
    assert len({digest(kind) for kind in kinds}) == 1
    assert digest(np.zeros(0, np.uint8)) == digest(b"")


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 11, 100, 101])
def test_chunks_are_digested_one_by_one(rng, nbytes):
    """The list is the digests of the slices, joined: compared for whole and broken last chunks."""
    data = rng.integers(0, 256, nbytes, np.uint8)
    slices = [data[at : at + 10] for at in range(0, nbytes, 10)]
    assert chunk_digests(data, 10) == b"".join(digest(piece) for piece in slices)
    assert bad_chunks(data, chunk_digests(data, 10), 10) == ()


def test_the_usual_chunk(rng):
    """Without a size, chunks are of CHUNK_BYTES: one byte more makes a second digest."""
    data = rng.integers(0, 256, CHUNK_BYTES + 1, np.uint8)
    digests = chunk_digests(data)
    assert digests == digest(data[:CHUNK_BYTES]) + digest(data[CHUNK_BYTES:])
    data[-1] ^= 1
    assert bad_chunks(data, digests) == (1,)


def test_every_flipped_bit_is_found(rng):
    """A flip names its own chunk: every bit of 50 bytes in five chunks is flipped in turn."""
    data = rng.integers(0, 256, 50, np.uint8)
    digests = chunk_digests(data, 11)
    for bit in range(400):
        data[bit // 8] ^= 1 << bit % 8
        assert bad_chunks(data, digests, 11) == (bit // 88,)
        data[bit // 8] ^= 1 << bit % 8
    assert bad_chunks(data, digests, 11) == ()


def test_swapped_chunks_are_found(rng):
    """A chunk in another's place is wrong in both places."""
    data = rng.integers(0, 256, 30, np.uint8)
    digests = chunk_digests(data, 10)
    swapped = np.concatenate([data[10:20], data[:10], data[20:]])
    assert bad_chunks(swapped, digests, 10) == (0, 1)


@pytest.mark.parametrize("wrong", [b"", bytes(16), bytes(33), bytes(47), bytes(64)])
def test_a_list_that_does_not_fit_vouches_for_nothing(wrong):
    """Missing, short, torn and long lists make every chunk bad: three chunks are checked."""
    assert bad_chunks(np.zeros(25, np.uint8), wrong, 10) == (0, 1, 2)


def test_a_list_that_is_right_but_longer_vouches_for_nothing():
    """A right list with one digest too many, or a cut one, is no proof of any chunk."""
    data = np.zeros(25, np.uint8)
    right = chunk_digests(data, 10)
    assert bad_chunks(data, right + digest(b""), 10) == (0, 1, 2)
    assert bad_chunks(data, right[:-1], 10) == (0, 1, 2)


def test_an_empty_buffer_is_verified_only_by_an_empty_list():
    """No bytes and no digests are fine; no bytes with a list are a fault: chunk 0 is named."""
    empty = np.zeros(0, np.uint8)
    assert bad_chunks(empty, b"") == ()
    assert bad_chunks(empty, digest(b"")) == (0,)


def test_the_root_covers_length_and_list():
    """The whole's digest changes with any chunk, their order and the length."""
    a, b = digest(b"a"), digest(b"b")
    roots = {root_digest(*args) for args in [(a + b, 2), (b + a, 2), (a + b, 3), (a, 2), (b"", 0)]}
    assert len(roots) == 5


@pytest.mark.parametrize(("digests", "nbytes"), [(b"", -1), (bytes(15), 1), (bytes(17), 1)])
def test_a_root_of_nonsense_is_refused(digests, nbytes):
    """A negative length or torn digests are the caller's mistake."""
    with pytest.raises(CodeError, match="root digest: expected"):
        root_digest(digests, nbytes)


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_a_chunk_has_bytes(chunk_bytes):
    """A chunk size below 1 is refused when digests are made and when they are checked."""
    with pytest.raises(CodeError, match="chunk_bytes"):
        chunk_digests(np.zeros(5, np.uint8), chunk_bytes)
    with pytest.raises(CodeError, match="chunk_bytes"):
        bad_chunks(np.zeros(5, np.uint8), b"", chunk_bytes)


@pytest.mark.parametrize("buffer", [b"bytes", np.zeros((2, 2), np.uint8), np.zeros(2, np.int16)])
def test_chunks_are_of_plain_bytes(buffer):
    """All but uint8[n] is refused: with a shape or a type, offsets would mean something else."""
    with pytest.raises(CodeError, match="buffer: expected"):
        chunk_digests(buffer)
