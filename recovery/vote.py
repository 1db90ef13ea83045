"""The vote of a restore: what every rank found, merged up the tree and counted once (rule P19).

A vote and the verdict come from other processes: every part is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from recovery.errors import RecoveryError
from recovery.manifest import MAX_WORLD, WHOLE
from recovery.plan import Read
from recovery.tree import dump, load

_READS = ("bad", "silent")
_PARTS = {"plan", "bad", "silent", "wrong", "errors"}
_ABORT_BYTES_MAX = 60_000

Named = tuple[int, int, int]
"""A read by name: (owner, fragment, source)."""


@dataclass(frozen=True)
class Verdict:
    """What to leave out in the next attempt; ``wrong`` has sets that decoded to a wrong shard."""

    bad: tuple[Named, ...]
    silent: tuple[Named, ...]
    wrong: frozenset[tuple[int, tuple[int, ...]]]


def encode_vote(
    fingerprint: str,
    *,
    bad: Sequence[Read],
    silent: Sequence[Read],
    wrong: Sequence[tuple[int, Sequence[int]]],
    errors: Sequence[str],
) -> bytes:
    """One rank's vote, or none against: then all parts but the plan's fingerprint are empty."""
    return dump(
        {
            "plan": [fingerprint],
            "bad": [[r.owner, r.fragment, r.source] for r in bad],
            "silent": [[r.owner, r.fragment, r.source] for r in silent],
            "wrong": [[owner, list(fragments)] for owner, fragments in wrong],
            "errors": list(errors),
        }
    )


def merge_votes(values: Sequence[bytes]) -> bytes:
    """Several votes as one; RecoveryError when one is not a vote."""
    votes = [_parsed(value) for value in values]
    merged = {
        name: [item for vote in votes for item in vote[name]] for name in sorted(_PARTS - {"plan"})
    }
    return dump({"plan": sorted({fp for vote in votes for fp in vote["plan"]}), **merged})


def count(merged: bytes) -> bytes:
    """The verdict that rank 0 proposes for the merged vote of all ranks."""
    votes = _parsed(merged)
    if len(votes["plan"]) != 1:
        return abort("ranks derived different plans from one inventory")
    if votes["errors"]:
        return abort("; ".join(votes["errors"]))
    again = {name: votes[name] for name in ("bad", "silent", "wrong")}
    if any(again.values()):
        return b"again:" + dump(again)
    return b"go:"


def abort(reason: str) -> bytes:
    """The verdict that nobody loads."""
    return b"abort:" + reason[:_ABORT_BYTES_MAX].encode("utf-8", "replace")[:_ABORT_BYTES_MAX]


def read_verdict(raw: bytes) -> Verdict | None:
    """None: go. RecoveryError for an abort, with its reason, and for what is no verdict."""
    if raw == b"go:":
        return None
    if raw.startswith(b"again:"):
        parts = load(raw.removeprefix(b"again:"), "the vote")
        _check(parts, {"bad", "silent", "wrong"})
        return Verdict(
            tuple((owner, fragment, source) for owner, fragment, source in parts["bad"]),
            tuple((owner, fragment, source) for owner, fragment, source in parts["silent"]),
            frozenset((owner, tuple(fragments)) for owner, fragments in parts["wrong"]),
        )
    reason = raw.removeprefix(b"abort:")
    if reason == raw or not reason:
        raise RecoveryError(f"vote is {raw[:64]!r}, expected go, again or abort")
    raise RecoveryError(reason.decode("utf-8", "replace"))


def _parsed(value: bytes) -> dict[str, Any]:
    vote = load(value, "a vote")
    _check(vote, _PARTS)
    found: dict[str, Any] = vote
    return found


def _check(vote: object, parts: set[str]) -> None:
    if not isinstance(vote, dict) or set(vote) != parts:
        raise RecoveryError(f"a vote is {str(vote)[:200]!r}, expected {sorted(parts)}")
    for name, items in vote.items():
        if not isinstance(items, list) or not all(_fits(name, item) for item in items):
            raise RecoveryError(f"a vote's {name!r} is {str(items)[:200]!r}")


def _fits(name: str, item: object) -> bool:
    if name in _READS:
        return _are_numbers(item) and len(item) == 3
    if name == "wrong":
        return (
            isinstance(item, list)
            and len(item) == 2
            and _are_numbers(item[:1])
            and _are_numbers(item[1])
        )
    return isinstance(item, str)


def _are_numbers(item: object) -> TypeGuard[list[int]]:
    """Ranks or indices of fragments, WHOLE (-1) among them."""
    return isinstance(item, list) and all(type(n) is int and WHOLE <= n < MAX_WORLD for n in item)
