"""Encode and decode, from and into buffers that the caller owns.

Legend for shapes: k data, m parity; L the bytes of the longest fragment (of the slice at hand).
Every byte of a fragment depends only on the bytes at the same offset of the others, so callers may
work block by block: give slices of all fragments at one offset. Sources of uneven length count as
padded with zeros up to L, and nothing is copied for that: the range is split where a source ends,
and each part is computed from the sources that are still there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from erasure.buffers import Block, ByteArray, blocks_of, check_no_overlap
from erasure.code import Code
from erasure.errors import CodeError, TooFewFragments
from erasure.kernels import Combine, Kernel, Recipe, best_kernel

_KEPT_RECIPES = 256  # a stripe meets few patterns of loss; tables are at most 64 KiB each


class Codec:
    """One code, computed by one kernel.

    Allocates no bulk memory, keeps no reference to a buffer, and may be used by several threads at
    once. Buffers are numpy uint8[n], contiguous. Content is never verified: keep digests.
    `kernel` None means the fastest one that loads; KernelUnavailable if there is none.
    """

    def __init__(self, code: Code, kernel: Kernel | None = None) -> None:
        self.code = code
        self.kernel = best_kernel() if kernel is None else kernel
        self._data = tuple(range(code.k))
        self._parity = tuple(range(code.k, code.n))
        self._prepared = lru_cache(_KEPT_RECIPES)(self._prepare)

    def encode(self, data: Sequence[ByteArray], parity: Sequence[ByteArray]) -> None:
        """Overwrite the m parity buffers, uint8[L] each, from the k data buffers, uint8[up to L].

        Data may be read by others meanwhile; parity must not be touched, and overlaps nothing.
        Raises CodeError for another number, kind or length of buffers, before anything is written.
        """
        self._check_count(data, self.code.k, "data")
        self._check_count(parity, self.code.m, "parity")
        sources = blocks_of(self._data, data)
        outputs = blocks_of(self._parity, parity, write=True)
        self._check(self._data, sources, self._parity, outputs)
        self._run(self._data, sources, self._parity, outputs)

    def decode(self, have: Mapping[int, ByteArray], want: Mapping[int, ByteArray]) -> None:
        """Overwrite the buffers `want` with these fragments, made from k of the fragments `have`.

        Keys are fragment indices, data or parity. With more than k in `have`, the lowest k serve.
        Parity is uint8[L], data uint8[up to L]: shorter data in `have` counts as padded with zeros,
        shorter data in `want` gets its first bytes. Raises TooFewFragments below k fragments and
        CodeError for a wrong index, kind or length, before anything is written.
        """
        for index in (*have, *want):
            self.code.check_index(index)
        if len(have) < self.code.k:
            raise TooFewFragments(have=len(have), need=self.code.k)
        here, wanted = tuple(sorted(have)), tuple(sorted(want))
        sources = blocks_of(here, [have[i] for i in here])
        outputs = blocks_of(wanted, [want[i] for i in wanted], write=True)
        self._check(here, sources, wanted, outputs)
        k = self.code.k
        self._run(here[:k], sources[:k], wanted, outputs)

    def _check_count(self, buffers: Sequence[ByteArray], count: int, what: str) -> None:
        if len(buffers) != count:
            raise CodeError(
                f"code {self.code}: expected {count} {what} buffers, got {len(buffers)}"
            )

    def _check(
        self,
        have: tuple[int, ...],
        sources: list[Block],
        want: tuple[int, ...],
        outputs: list[Block],
    ) -> None:
        # Past its end a parity is not zeros: a shorter one would give wrong bytes, silently.
        longest = max(block.size for block in (*sources, *outputs))
        for index, block in zip((*have, *want), (*sources, *outputs), strict=True):
            if index >= self.code.k and block.size != longest:
                raise CodeError(
                    f"parity fragment {index}: expected {longest} bytes, as many as the longest "
                    f"fragment, got {block.size}"
                )
        check_no_overlap(sources, outputs)

    def _run(
        self,
        have: tuple[int, ...],
        sources: list[Block],
        want: tuple[int, ...],
        outputs: list[Block],
    ) -> None:
        """Compute the ranges of bytes between the places where a buffer ends, in order."""
        start = 0
        for stop in sorted({block.size for block in (*sources, *outputs)}):
            if stop > start:
                given, reads = _reaching(stop, start, have, sources)
                wanted, writes = _reaching(stop, start, want, outputs)
                self._prepared(have, given, wanted)(reads, writes)
            start = stop

    def _prepare(
        self, have: tuple[int, ...], given: tuple[int, ...], want: tuple[int, ...]
    ) -> Combine:
        return _with_copies(Recipe(self.code, have, given, want), self.kernel)


def _reaching(
    stop: int, start: int, indices: tuple[int, ...], blocks: list[Block]
) -> tuple[tuple[int, ...], list[Block]]:
    """Return the bytes from `start` to `stop` of the blocks that have them, and whose they are."""
    pairs = [(i, b) for i, b in zip(indices, blocks, strict=True) if b.size >= stop]
    return tuple([i for i, _ in pairs]), [b.part(start, stop) for _, b in pairs]


def _with_copies(recipe: Recipe, kernel: Kernel) -> Combine:
    """Give the kernel only what needs arithmetic; the rest is zeros, or copies of one source."""
    rows = recipe.rows
    sums = [int(row.sum(dtype=np.intp)) for row in rows]  # 0: all zeros; 1: a single one
    hard = [i for i, total in enumerate(sums) if total > 1]
    if len(hard) == len(rows) > 0:
        return kernel.combine(recipe)
    copies = [(i, int(rows[i].argmax())) for i, total in enumerate(sums) if total == 1]
    zeros = [i for i, total in enumerate(sums) if total == 0]
    arithmetic = (
        kernel.combine(replace(recipe, want=tuple(recipe.want[i] for i in hard))) if hard else None
    )

    def combine(sources: Sequence[Block], outputs: Sequence[Block]) -> None:
        for i, source in copies:
            np.copyto(outputs[i].array, sources[source].array)
        for i in zeros:
            outputs[i].array.fill(0)
        if arithmetic is not None:
            arithmetic(sources, [outputs[i] for i in hard])

    return combine
