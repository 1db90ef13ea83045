"""JSON from an untrusted source, with every size bounded before the parser sees it."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class JsonError(ValueError):
    """Text that is no JSON, or more of it than allowed. The sentence continues 'header ...'."""


def parse_bounded(text: bytes, max_bytes: int, max_nodes: int) -> Any:
    """Parse UTF-8 JSON of at most `max_bytes`, with at most `max_nodes` values.

    The number of values is bounded from the separators, counted without parsing, so that a short
    text cannot make the parser take unbounded memory. Objects with a doubled key, NaN and
    infinities are refused.
    """
    if len(text) > max_bytes:
        raise JsonError(f"has {len(text)} bytes, at most {max_bytes} are taken")
    count = count_nodes(text)
    if count > max_nodes:
        raise JsonError(f"has about {count} values, at most {max_nodes} are taken")
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise JsonError("is nested too deeply") from None
    except ValueError as fault:
        raise JsonError(f"is not the JSON expected: {fault}") from fault


def count_nodes(text: bytes) -> int:
    """An upper bound of the number of JSON values in a text, from its separators."""
    return 1 + sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonError("has an object with a doubled key")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"has the constant {name}")
