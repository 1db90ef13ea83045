"""Bulk bytes between two ranks.

``Transport`` is small because everything but bytes travels through the store: who sends what, and
whether the other side is ready, is settled there before a buffer is posted. A channel joins two
ranks and carries buffers in the order in which they are posted, in each direction on its own.
Buffers belong to the caller and must stay alive and unchanged (send) or untouched (receive) until
``wait`` returns or raises.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from replica.errors import ConfigError
from replica.store import Store

Bytes = npt.NDArray[np.uint8]


def check_buffer(buffer: Bytes) -> None:
    """Raise ConfigError for a buffer that no channel carries."""
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous or buffer.size == 0:
        raise ConfigError(
            "a bulk buffer is a non-empty contiguous uint8 array, "
            f"got {buffer.dtype}[{buffer.size}]"
        )


class Pending(Protocol):
    """One posted buffer."""

    def wait(self) -> None:
        """Return when the buffer is sent or filled; PeerError when it cannot be, or too late."""
        ...


class Channel(Protocol):
    """A connection to one other rank. One thread sends and one thread receives."""

    def send(self, buffer: Bytes) -> Pending:
        """Post ``buffer``, uint8[n] with n > 0."""
        ...

    def receive(self, buffer: Bytes) -> Pending:
        """Post ``buffer`` to be filled, uint8[n]; n equals what the peer sends."""
        ...

    def close(self) -> None:
        """Give the connection up; posted buffers may still be written to until their wait ends."""
        ...


class Transport(Protocol):
    """Makes channels. Each side calls ``connect`` with the same name; both must be ready."""

    def connect(self, name: str, rank: int, peer: int, store: Store, timeout_s: float) -> Channel:
        """A channel between ``rank`` (here) and ``peer``; PeerError when the peer does not come."""
        ...
