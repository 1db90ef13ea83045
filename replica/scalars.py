"""Python values that are no containers and take few bytes, as nodes of the tree."""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from base64 import b64encode
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from replica.dtypes import dtype_name
from replica.numpy_types import describe, dtype_refusal
from replica.unsupported import Unsupported

Node = Any
PATHS = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, PureWindowsPath)}
# JSON's escapes cannot tell the two halves of a pair that stand side by side from the pair.
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def text_node(value: str) -> Node:
    """A text as itself where JSON can tell it from every other, else its bytes."""
    if not _PAIR.search(value):
        return value
    return ["str", b64encode(value.encode("utf-8", "surrogatepass")).decode()]


def fits(value: int) -> bool:
    """Whether an int has 64 bits at most."""
    return -(1 << 63) <= value < 1 << 63


def int_node(value: int) -> Node:
    """An int of 64 bits as itself, a longer one in hexadecimal, which has no limit of digits."""
    return value if fits(value) else ["int", hex(value)]


def float_node(value: float) -> Node:
    """A finite float as itself (repr round-trips); NaN with its payload and infinities by bits."""
    return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]


def numpy_node(value: np.generic) -> Node:
    """A numpy scalar; `Unsupported` for one of a user's own class or of a dtype with objects."""
    # As an array: an empty np.str_ says that it has no bytes and gives four.
    array = np.asarray(value)
    why = dtype_refusal(array.dtype)
    if why is None and type(value) is not array.dtype.type:
        why = "a subclass, which could not come back as itself"
    if why is not None:
        raise Unsupported(value, why)
    return ["scalar", describe(array.dtype), b64encode(array.tobytes()).decode()]


def _moment(value: dt.datetime | dt.time) -> Node:
    zone = value.tzinfo
    if zone is not None and type(zone) is not dt.timezone:
        raise Unsupported(value, "whose time zone is not a datetime.timezone")
    if zone is None or _is_unnamed(zone):
        return [type(value).__name__, value.isoformat(), value.fold]
    bare = value.replace(tzinfo=None).isoformat()
    return [type(value).__name__, bare, value.fold, _timezone(zone)]


def _timezone(value: dt.timezone) -> Node:
    node = ["timezone", _timedelta(value.utcoffset(None))]
    return node if _is_unnamed(value) else [*node, text_node(value.tzname(None))]


def _is_unnamed(zone: dt.timezone) -> bool:
    return zone.tzname(None) == dt.timezone(zone.utcoffset(None)).tzname(None)


def _timedelta(value: dt.timedelta) -> Node:
    return ["timedelta", value.days, value.seconds, value.microseconds]


def _itself(value: Any) -> Node:
    return value


SCALARS: dict[type, Callable[[Any], Node]] = {
    type(None): _itself,
    bool: _itself,
    int: int_node,
    float: float_node,
    complex: lambda value: ["complex", float_node(value.real), float_node(value.imag)],
    range: lambda value: ["range", *map(int_node, (value.start, value.stop, value.step))],
    Decimal: lambda value: ["decimal", str(value)],
    dt.datetime: _moment,
    dt.time: _moment,
    dt.date: lambda value: ["date", value.isoformat()],
    dt.timedelta: _timedelta,
    dt.timezone: _timezone,
    torch.Size: lambda value: ["size", *value],
    torch.dtype: lambda value: ["dtype", dtype_name(value)],
    torch.device: lambda value: ["device", str(value)],
    **{
        kind: lambda value: ["path", type(value).__name__, text_node(str(value))]
        for kind in PATHS.values()
    },
}
"""What makes the node of a value of each of these types."""
_LEAVES_OF_WALKS = frozenset({*SCALARS, str, bytes})


def only_scalars(values: Iterable[object]) -> bool:
    """Whether nothing in a container needs to be looked into; no call per value."""
    return {*map(type, values)} <= _LEAVES_OF_WALKS
