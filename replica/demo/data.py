"""Real text without a download: the Python standard library's own source files.

Every rank reads its own windows of the text in a fixed, scattered order. What a resume needs is the
loader's position and two random states: a window is shifted by a draw from ``random``, and some
input bytes are replaced by draws from ``numpy.random``. A resume that loses one reads other bytes.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from erasure.digest import digest

# Windows are visited in steps of this prime: neighbours in time are not neighbours in the text.
SCATTER = 7919
NOISE_SHARE = 0.02


def standard_library_text() -> npt.NDArray[np.uint8]:
    """Return the source of the standard library's top-level modules, uint8[n], in order of names.

    Raises:
        FileNotFoundError: this Python has no source files (a zipped standard library, say).
    """
    directory = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(directory.glob("*.py"))]
    if not sources:
        raise FileNotFoundError(f"no Python source files in {directory}: the demo trains on them")
    return np.frombuffer(b"".join(sources), np.uint8)


class TextLoader:
    """One rank's batches, forever, from a position that is saved and loaded.

    Args:
        text: uint8[n], kept and never written; at least two windows long.
        rank: whose share of the windows this is.
        world: number of ranks that share them.
        batch: B, windows in a batch.
        context: T, bytes in a window.
    """

    def __init__(
        self, text: npt.NDArray[np.uint8], *, rank: int, world: int, batch: int, context: int
    ) -> None:
        # One window less than fit: a shifted window and its last target must lie inside the text.
        self._windows = len(text) // context - 1
        if self._windows < 1:
            raise ValueError(f"text must hold 2 windows of {context} bytes, got {len(text)} bytes")
        self._text = text
        self._rank = rank
        self._world = world
        self._batch = batch
        self._context = context
        self._position = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64[B, T] each, and move on by one batch."""
        rows = np.stack([self._window(self._position + i) for i in range(self._batch)])
        self._position += self._batch
        inputs, targets = rows[:, :-1].copy(), rows[:, 1:]
        noisy = np.random.random(inputs.shape) < NOISE_SHARE  # noqa: NPY002 - the global state is the point
        inputs[noisy] = np.random.randint(0, 256, int(noisy.sum()))  # noqa: NPY002 - the same
        return torch.from_numpy(inputs), torch.from_numpy(targets.copy())

    def state_dict(self) -> dict[str, int | str]:
        """Return the position and what it counts in; the text is only named by its digest."""
        return {
            "position": self._position,
            "windows": self._windows,
            "text_digest": digest(self._text).hex(),
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on at a saved position.

        Raises:
            ValueError: the position was saved over another text.
        """
        own = self.state_dict()
        for name in ("windows", "text_digest"):
            if state[name] != own[name]:
                raise ValueError(
                    f"loader state of another text: {name} is {own[name]} here, {state[name]} there"
                    f"; every node needs the same Python version"
                )
        self._position = int(state["position"])

    def _window(self, position: int) -> npt.NDArray[np.int64]:
        index = (position * self._world + self._rank) * SCATTER % self._windows
        start = index * self._context + random.randrange(self._context)
        return self._text[start : start + self._context + 1].astype(np.int64)
