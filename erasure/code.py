"""The code: how a shard is cut into fragments, and which matrix makes parity from them.

Indices 0..k-1 are data fragments (the shard itself, cut in k), k..k+m-1 are parity.
Legend for shapes: k data, m parity, n = k + m fragments; S = shard bytes; c = fragment bytes.
The matrix is zfec's, so fragments can be exchanged with it: V has the rows [1, 0, .., 0] and then
alpha ** (i * column) for i = 0..n-2; multiplied by the inverse of its top it becomes systematic
(the top k rows are the identity), and any k of its n rows are still independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from erasure import field
from erasure.buffers import ByteArray
from erasure.errors import CodeError

MAX_DATA = 32
"""Largest k."""

MAX_FRAGMENTS = 64
"""Largest k + m."""


@dataclass(frozen=True)
class Code:
    """k data fragments and m parity fragments; any k distinct ones give the shard back.

    k = 1 is plain copies. Raises CodeError unless 1 <= k <= 32, 0 <= m and k + m <= 64.
    """

    k: int
    """Data fragments."""

    m: int
    """Parity fragments."""

    def __post_init__(self) -> None:
        if not (_is_int(self.k) and _is_int(self.m)):
            raise CodeError(f"code: expected two whole numbers k and m, got {self.k!r}, {self.m!r}")
        if not 1 <= self.k <= MAX_DATA:
            raise CodeError(f"code: expected k from 1 to {MAX_DATA}, got k={self.k}")
        if not 0 <= self.m <= MAX_FRAGMENTS - self.k:
            raise CodeError(
                f"code: expected m of at least 0 and k+m up to {MAX_FRAGMENTS}, got {self}"
            )

    def __str__(self) -> str:
        return f"{self.k}+{self.m}"

    @property
    def n(self) -> int:
        """Fragments in all, k + m."""
        return self.k + self.m

    @property
    def parity_rows(self) -> ByteArray:
        """The parity part of the matrix: uint8[m, k], read-only. Row j makes fragment k + j."""
        return _generator(self.k, self.n)[self.k :]

    def fragment_bytes(self, shard_bytes: int) -> int:
        """Return c = ceil(S / k): the bytes of the largest fragment of a shard of S bytes."""
        if shard_bytes < 0:
            raise CodeError(f"shard_bytes: expected at least 0, got {shard_bytes}")
        return -(-shard_bytes // self.k)

    def span(self, index: int, shard_bytes: int) -> tuple[int, int]:
        """Return where data fragment `index` starts and stops in a shard of S bytes.

        The last fragments may be shorter than c, or empty: the missing bytes count as zeros.
        """
        if not 0 <= index < self.k:
            raise CodeError(f"span: expected a data fragment from 0 to {self.k - 1}, got {index}")
        size = self.fragment_bytes(shard_bytes)
        return min(index * size, shard_bytes), min((index + 1) * size, shard_bytes)

    def length(self, index: int, shard_bytes: int) -> int:
        """Return the bytes of fragment `index` of a shard of S bytes; c for parity."""
        self.check_index(index)
        if index >= self.k:
            return self.fragment_bytes(shard_bytes)
        start, stop = self.span(index, shard_bytes)
        return stop - start

    def recover_rows(self, have: Sequence[int], want: Sequence[int]) -> ByteArray:
        """Return the matrix that makes the fragments `want` from the fragments `have`.

        `have`: k distinct indices in rising order. Returns uint8[len(want), k], read-only: row i
        times the fragments `have` gives fragment want[i]. Raises CodeError for other indices.
        """
        if len(have) != self.k or list(have) != sorted(set(have)):
            raise CodeError(
                f"code {self}: expected {self.k} distinct indices in rising order, got {list(have)}"
            )
        for index in (*have, *want):
            self.check_index(index)
        return _recover_rows(self.k, self.n, tuple(have), tuple(want))

    def check_index(self, index: int) -> None:
        """Raise CodeError unless `index` is one of the n fragments."""
        if not (_is_int(index) and 0 <= index < self.n):
            raise CodeError(
                f"code {self}: expected a fragment index from 0 to {self.n - 1}, got {index!r}"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@lru_cache
def _generator(k: int, n: int) -> ByteArray:
    """Return zfec's systematic matrix, uint8[n, k], read-only."""
    vandermonde = np.zeros((n, k), np.uint8)
    vandermonde[0, 0] = 1
    vandermonde[1:] = field.EXP[np.outer(np.arange(n - 1), np.arange(k)) % len(field.EXP)]
    return _frozen(field.matmul(vandermonde, field.inverse(vandermonde[:k])))


@lru_cache
def _recover_rows(k: int, n: int, have: tuple[int, ...], want: tuple[int, ...]) -> ByteArray:
    generator = _generator(k, n)
    return _frozen(field.matmul(generator[list(want)], field.inverse(generator[list(have)])))


def _frozen(matrix: ByteArray) -> ByteArray:
    matrix.flags.writeable = False
    return matrix
