"""The toy training: a state whose bytes tell which steps of which incarnations led to it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulations.config import Config

SHARD_MAX = 60
GROWTH = 1.6


def size_of(config: Config, owner: int, step: int) -> int:
    """Bytes of an owner's shard at a step: uneven, often empty for somebody, growing once."""
    if config.sizes:
        size = config.sizes[owner % len(config.sizes)]
    else:
        drawn = hashlib.blake2b(f"{config.seed}/{owner}".encode(), digest_size=2).digest()
        size = 0 if drawn[0] < 24 else drawn[1] % 37 + 1
    if config.grow_at and step >= config.grow_at:
        size = int(size * GROWTH) + 1
    return min(size, SHARD_MAX)


def advance(state: bytes, *, owner: int, step: int, nonce: str, size: int) -> bytes:
    """The state after one more step, of which every byte depends on the whole history."""
    text = f"{owner}/{step}/{nonce}/{size}".encode()
    return hashlib.blake2b(state + text, digest_size=64).digest()[:size]
