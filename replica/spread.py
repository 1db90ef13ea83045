"""Whether tensors that moved in memory still share with nobody, told from addresses alone.

`find_homes` looks at every tensor by itself. What moves from save to save is mostly a random state
read into new memory, or a parameter given new `data`: sorting all addresses is enough there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from replica.leaves import Homes, span, unexpanded


class Spread:
    """The stretches of memory that the tensors of one plan take, without their addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor], homes: Homes) -> None:
        block_of = np.array([home.block for home in homes.homes], np.int64)
        self._alone = np.bincount(block_of, minlength=1)[block_of] == 1
        self._reach = np.array([_reach_bytes(value) for value in tensors], np.int64)

    def holds(self, old: Sequence[int], new: Sequence[int]) -> bool | None:
        """Whether the homes stay as they are when the addresses change from `old` to `new`.

        False where a tensor has lost its memory, None where only `find_homes` can tell.
        """
        before, after = np.array(old, np.int64), np.array(new, np.int64)
        filled = self._reach > 0
        if (after[filled] == 0).any():
            return False
        if (before != after)[filled & ~self._alone].any():
            return None
        starts = after[filled & self._alone]
        stops = starts + self._reach[filled & self._alone]
        shared = filled & ~self._alone
        # Those that share overlap one another: each is held against the ones that are alone only.
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        if (stops[:-1] > starts[1:]).any():
            return None
        first, last = after[shared], after[shared] + self._reach[shared]
        # All that begins before a stretch ends must have ended before it begins.
        if (np.searchsorted(starts, last, "left") != np.searchsorted(stops, first, "right")).any():
            return None
        return True


def _reach_bytes(value: torch.Tensor) -> int:
    bare = unexpanded(value)
    return span(bare.shape, bare.stride()) * value.itemsize
