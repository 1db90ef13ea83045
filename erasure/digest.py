"""Digests: which bytes are still the ones that were stored.

An erasure code repairs what is known to be missing; it does not notice what is wrong. So every
buffer is digested in chunks, and the digest of the whole is made from the digests of its chunks:
a bad chunk is found by itself, and the whole is checked without reading the bytes again.
The digest (XXH3, 128 bits) guards against faults, not against an adversary.
"""

from __future__ import annotations

import numpy as np
import xxhash

from erasure.buffers import ByteArray, check_buffer
from erasure.errors import CodeError

ALGORITHM = "xxh3-128"
"""Written beside every digest: a reader that does not know the name must not compare."""

DIGEST_BYTES = 16
"""Size of one digest."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes under one digest: large enough that the list is small, small enough to stay in cache."""


def digest(buffer: bytes | bytearray | memoryview | ByteArray) -> bytes:
    """Return the 16-byte digest of contiguous bytes.

    Reads them in place, and releases the interpreter lock meanwhile.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else buffer
    return xxhash.xxh3_128_digest(view)


def chunk_digests(buffer: ByteArray, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Digest each chunk of `buffer`, uint8[n]; the last chunk may be shorter.

    Returns the digests one after the other, 16 bytes each: ceil(n / chunk_bytes) of them, none for
    n = 0. Raises CodeError for another kind of buffer or a chunk size below 1.
    """
    check_buffer(buffer, "buffer")
    return b"".join([digest(chunk) for chunk in _chunks(buffer, chunk_bytes)])


def root_digest(chunk_digests: bytes, nbytes: int) -> bytes:
    """Return the 16-byte digest of a whole buffer, made from its length and its chunk digests.

    Raises CodeError for a negative length or a list that is not whole digests.
    """
    if nbytes < 0 or len(chunk_digests) % DIGEST_BYTES:
        raise CodeError(
            f"root digest: expected a length of at least 0 and whole {DIGEST_BYTES}-byte digests, "
            f"got length {nbytes} and {len(chunk_digests)} bytes of digests"
        )
    return digest(nbytes.to_bytes(8, "little") + chunk_digests)


def bad_chunks(
    buffer: ByteArray, chunk_digests: bytes, chunk_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Return the indices of the chunks of `buffer`, uint8[n], that differ from their digest.

    A list of digests that is missing, too short or too long vouches for nothing: then every chunk
    is bad, and for an empty buffer, chunk 0. So "nothing bad" always means "all verified".
    Raises CodeError for another kind of buffer or a chunk size below 1.
    """
    check_buffer(buffer, "buffer")
    chunks = _chunks(buffer, chunk_bytes)
    if len(chunk_digests) != len(chunks) * DIGEST_BYTES:
        return tuple(range(max(1, len(chunks))))
    expected = [chunk_digests[i * DIGEST_BYTES :][:DIGEST_BYTES] for i in range(len(chunks))]
    return tuple(i for i, chunk in enumerate(chunks) if digest(chunk) != expected[i])


def _chunks(buffer: ByteArray, chunk_bytes: int) -> list[ByteArray]:
    if chunk_bytes < 1:
        raise CodeError(f"chunk_bytes: expected at least 1, got {chunk_bytes}")
    return [buffer[at : at + chunk_bytes] for at in range(0, buffer.size, chunk_bytes)]
