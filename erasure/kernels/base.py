"""What a kernel is: the one operation that touches bulk bytes; and its test at load.

Encoding and decoding are the same operation: some fragments are made from others by one matrix. A
Recipe says which, a kernel turns it into a function, and codecs keep that function. Every kernel
gives the same bytes, so which one ran is never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from erasure import field
from erasure.buffers import Block, ByteArray, blocks_of
from erasure.code import Code
from erasure.errors import CodeError, KernelUnavailable

Combine = Callable[[Sequence[Block], Sequence[Block]], None]
"""combine(sources, outputs): overwrites outputs[i], uint8[n], with fragment recipe.want[i].

sources[j], uint8[n], is fragment recipe.given[j]. All have one length n > 0, and the caller has
seen to it that no output overlaps anything. It may run in several threads at once, and keeps no
reference to a buffer.
"""


@dataclass(frozen=True)
class Recipe:
    """Which fragments are made from which. Raises CodeError if the indices do not fit."""

    code: Code
    """The code whose matrix is used."""

    have: tuple[int, ...]
    """k distinct fragment indices in rising order: what the wanted ones are made from."""

    given: tuple[int, ...]
    """Those of `have` whose bytes are given, in rising order; the others are all zeros here."""

    want: tuple[int, ...]
    """The fragment indices to make."""

    def __post_init__(self) -> None:
        self.code.recover_rows(self.have, self.want)
        if self.given != tuple(index for index in self.have if index in self.given):
            raise CodeError(f"recipe: given {self.given} is not a part, in order, of {self.have}")

    @property
    def rows(self) -> ByteArray:
        """uint8[len(want), len(given)]: the matrix to multiply the given fragments by."""
        columns = [self.have.index(index) for index in self.given]
        return self.code.recover_rows(self.have, self.want)[:, columns]


class Kernel(Protocol):
    """A library that computes recipes.

    It exists so that the fast library can be absent: every implementation passes one conformance
    suite and is exchangeable at any time. Implementations hold no state that a call changes.
    """

    @property
    def name(self) -> str:
        """For logs: the library and where it came from."""

    def combine(self, recipe: Recipe) -> Combine:
        """Prepare the tables of one recipe, with at least one given and one wanted fragment."""


_TEST_BYTES = 4096 + 13  # an odd tail: vector code treats the last bytes apart
_GUARD_BYTES = 64


def self_test(kernel: Kernel) -> None:
    """Raise KernelUnavailable unless `kernel` computes one encode and one decode exactly.

    Compared with our own table arithmetic, for a length with an odd tail and a short one, and a
    write past the end of an output is noticed.
    """
    code = Code(5, 7)  # vector code is written out for up to six rows at once: ask for more
    encoding = Recipe(code, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10, 11))
    decoding = Recipe(code, (0, 2, 5, 8, 11), (0, 2, 5, 8, 11), (1, 3, 4, 9))
    uneven = Recipe(code, (0, 2, 5, 8, 11), (2, 5, 8), (1, 3, 4, 9))
    values = np.random.default_rng(0)
    for recipe in (encoding, decoding, uneven):
        for nbytes in (_TEST_BYTES, 13):
            sources = values.integers(0, 256, (len(recipe.given), nbytes), np.uint8)
            _check_recipe(kernel, recipe, sources)


def _check_recipe(kernel: Kernel, recipe: Recipe, sources: ByteArray) -> None:
    nbytes = sources.shape[1]
    guarded = np.full((len(recipe.want), nbytes + _GUARD_BYTES), 0xA5, np.uint8)
    outputs = blocks_of(recipe.want, [row[:nbytes] for row in guarded], write=True)
    kernel.combine(recipe)(blocks_of(recipe.given, list(sources)), outputs)
    right = np.array_equal(guarded[:, :nbytes], field.matmul(recipe.rows, sources))
    if not right or np.any(guarded[:, nbytes:] != 0xA5):
        raise KernelUnavailable(
            f"{kernel.name} is refused: its self-test failed (code {recipe.code}, {nbytes} bytes, "
            f"fragments {recipe.want} from {recipe.given}); install another build of it"
        )
