"""Erasure codes over host memory: arithmetic only, no files, no network, no clock.

`Codec(Code(k=3, m=1))` makes parity with `encode(data, parity)` and lost fragments with
`decode({0: a, 2: c, 3: p}, {1: b})`: any k fragments give any other, into buffers that are yours.
"""

from __future__ import annotations

from erasure.buffers import ByteArray
from erasure.code import MAX_DATA, MAX_FRAGMENTS, Code
from erasure.codec import Codec
from erasure.digest import (
    ALGORITHM,
    CHUNK_BYTES,
    DIGEST_BYTES,
    bad_chunks,
    chunk_digests,
    digest,
    root_digest,
)
from erasure.errors import (
    CodeError,
    ErasureError,
    KernelUnavailable,
    PlanariaError,
    TooFewFragments,
)
from erasure.kernels import Kernel, best_kernel, load_isal, load_zfec

__all__ = [
    "ALGORITHM",
    "CHUNK_BYTES",
    "DIGEST_BYTES",
    "MAX_DATA",
    "MAX_FRAGMENTS",
    "ByteArray",
    "Code",
    "CodeError",
    "Codec",
    "ErasureError",
    "Kernel",
    "KernelUnavailable",
    "PlanariaError",
    "TooFewFragments",
    "bad_chunks",
    "best_kernel",
    "chunk_digests",
    "digest",
    "load_isal",
    "load_zfec",
    "root_digest",
]
