"""What ranks say to each other at the opening of a job, checked before any of it is used.

All ranks read the same words, so what is refused here is refused on all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from recovery.errors import RecoveryError
from recovery.tree import load
from replica.errors import ConfigError, PeerError
from replica.memory import MemoryFacts

_NUMBER_MAX = 1 << 62
_HEX = set("0123456789abcdef")
_OPTIONAL = {"tmpfs_free_bytes", "cgroup_free_bytes"}
_TEXTS = {"filesystem", "boot_id"}


def parse_word(raw: bytes, rank: int) -> dict[str, Any]:
    """``{"value": ...}`` or ``{"kind": text, "error": text}``; PeerError for anything else."""
    try:
        word = load(raw, f"the word of rank {rank}")
    except RecoveryError as error:
        raise PeerError(f"{error}: do all ranks run this library, and the same version?") from error
    if isinstance(word, dict):
        found: dict[str, Any] = word
        if set(word) == {"value"}:
            return found
        if set(word) == {"kind", "error"} and all(isinstance(v, str) for v in word.values()):
            return found
    raise PeerError(
        f"rank {rank} said {_short(word)}, expected a value or an error: "
        "do all ranks run the same version of this library?"
    )


def check_introductions(said: Sequence[Any], library: str) -> None:
    """Raise ConfigError unless every rank says its node, its memory and what must be the same."""
    for rank, one in enumerate(said):
        known = isinstance(one, dict) and (
            _is_text(one.get("node"))
            and _is_text(one.get("arena_dir"))
            and _is_number(one.get("bytes"))
            and isinstance(one.get("same"), dict)
        )
        if not known:
            node = one.get("node") if isinstance(one, dict) else None
            raise ConfigError(
                f"rank {rank} on node {_short(node)} does not introduce itself as version "
                f"{library} of this library does: all ranks must run the same version"
            )


def check_facts(said: Sequence[Any]) -> None:
    """Raise PeerError unless every rank says what its arena and its memory are."""
    for rank, one in enumerate(said):
        if not (isinstance(one, Mapping) and _are_facts(one)):
            raise PeerError(f"rank {rank} said {_short(one)} of its arena: restart the job")


def _are_facts(one: Mapping[str, Any]) -> bool:
    memory = one.get("memory")
    names = {field.name for field in fields(MemoryFacts)}
    return (
        all(_is_number(one.get(name)) for name in ("epoch", "present"))
        and all(_is_hex(one.get(name)) for name in ("nonce", "incarnation"))
        and isinstance(memory, dict)
        and set(memory) == names
        and all(isinstance(memory[name], str) for name in _TEXTS)
        and all(
            _is_number(memory[name]) or (name in _OPTIONAL and memory[name] is None)
            for name in names - _TEXTS
        )
    )


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _NUMBER_MAX


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and not set(value) - _HEX


def _short(value: object) -> str:
    return repr(value)[:200]
