"""What an owner offers to its holders before any byte moves (P6)."""

from __future__ import annotations

from erasure.code import Code
from erasure.digest import ALGORITHM, CHUNK_BYTES
from recovery.errors import RecoveryError
from recovery.manifest import FORMAT_VERSION, Generation
from recovery.tree import dump, load


def encode_offer(code: Code, shard_bytes: int, base: Generation | None) -> bytes:
    """Everything in which all ranks of a generation must agree, and the length of this shard."""
    return dump(
        {
            "format": FORMAT_VERSION,
            "algorithm": ALGORITHM,
            "chunk_bytes": CHUNK_BYTES,
            "k": code.k,
            "m": code.m,
            "shard_bytes": shard_bytes,
            "base": base.id if base else "",
        }
    )


def check_offer(raw: bytes, mine: bytes, owner: int) -> int:
    """The owner's shard bytes; RecoveryError when its offer differs from ``mine`` otherwise."""
    theirs, ours = load(raw, f"offer of rank {owner}"), load(mine, "own offer")
    size = theirs.get("shard_bytes") if isinstance(theirs, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise RecoveryError(f"rank {owner} offers a shard of {size!r} bytes")
    odd = sorted(k for k in ours if k != "shard_bytes" and theirs.get(k) != ours[k])
    if odd:
        got, expected = [(k, theirs.get(k)) for k in odd], [ours[k] for k in odd]
        raise RecoveryError(f"rank {owner} offers {got}, expected {expected}")
    return size
