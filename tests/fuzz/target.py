"""What a fuzz target is: bytes in, a value or one of our own errors out.

A target hands bytes to one reader of the product, as they would come from a file, a peer or the
store. It returns the reader's value or the error with which the reader refused; any other exception
is a finding. Whatever else must hold is asserted inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from erasure.errors import PlanariaError

BYTES_MAX = 1 << 16
"""Inputs are cut here: what is longer is refused by length alone, which tests of their own show."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """``run`` is called with any bytes; ``seeds`` are good or nearly good ones to begin from."""

    name: str
    run: Callable[[bytes], Any]
    seeds: Sequence[bytes]


def refused(read: Callable[[], Any]) -> Any:
    """What ``read`` returns, or the error of ours that it raises."""
    try:
        return read()
    except PlanariaError as error:
        if not str(error):
            raise AssertionError(f"{type(error).__name__} without a word") from error
        return error


def is_refusal(value: Any) -> bool:
    """Whether a target's value says that the bytes were not taken."""
    if isinstance(value, tuple | list):
        return bool(value) and all(is_refusal(item) for item in value)
    return value is None or isinstance(value, PlanariaError)


def dumped(value: Any) -> bytes:
    """JSON as our own messages are written, for seeds."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
