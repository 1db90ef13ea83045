"""Typed JSON back to Python values. The text may be damaged or hostile: nothing in it is trusted.

No class is looked up by name outside the fixed tables of `replica.tree`, no code is run, and what
a node can make is at most a constant times its own text, except for leaves, whose sizes were
checked against the image.
"""

from __future__ import annotations

import datetime as dt
import struct
from base64 import b64decode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import torch

from replica.dtypes import DTYPES
from replica.errors import StateError
from replica.image import ImageError
from replica.numpy_types import dtype_from
from replica.scalars import PATHS
from replica.tree import (
    FACTORIES,
    MAPPING_START,
    MAX_DEPTH,
    NUMBERS,
    SEQUENCE_START,
    Node,
)

_SLACK_LEVELS = 10
"""Nodes below the deepest container: a key that is a tuple, the parts of a slice."""
NO_VALUE = (
    *(TypeError, ValueError, ArithmeticError, LookupError, RuntimeError),
    *(SyntaxError, struct.error),
)
"""What Python, numpy and torch raise when a node's parts do not make its value."""


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class LeafSource(Protocol):
    """Gives a leaf's value in memory of its own; `ImageError` for a number it does not have."""

    def value(self, index: int) -> torch.Tensor | np.ndarray[Any, Any] | bytes: ...


class NoLeaves:
    """For a `Decoder` of what can hold none: keys, dtypes."""

    def value(self, index: int) -> bytes:
        """Refuse it."""
        raise ImageError(f"shard image: leaf {index!r} where none can be")


def tag_of(node: Node) -> str | None:
    """The tag of a node, None for a plain JSON value. Refuses what is neither."""
    if node is None or type(node) in {bool, int, float, str}:
        return None
    if type(node) is not list or not node or type(node[0]) is not str:
        raise ImageError("shard image: the tree has a node without a tag")
    return str(node[0])


def check_mapping(node: Node) -> None:
    """Refuse a mapping node with a key that has no value, or an unknown default factory."""
    start = MAPPING_START[node[0]]
    if len(node) < start or (len(node) - start) % 2:
        raise ImageError(f"shard image: a {node[0]} node of {len(node)} parts")
    name = node[1] if node[0] == "defaultdict" else None
    if name is not None and (type(name) is not str or name not in FACTORIES):
        raise ImageError(f"shard image: a defaultdict of {name!r}")


def check_sequence(node: Node) -> None:
    """Refuse a deque node without a length that may be."""
    if node[0] == "deque":
        limit = node[1] if len(node) > 1 else -1
        if limit is not None and (type(limit) is not int or not 0 <= limit < 1 << 62):
            raise ImageError(f"shard image: a deque of maximal length {limit!r}")


class Decoder:
    """Makes values from nodes, every tensor and container new."""

    def __init__(self, leaves: LeafSource) -> None:
        self.leaves = leaves
        self._depth = 0

    def decode(self, node: Node) -> Any:
        """Value of a node; `ImageError` if it is none that an encoder makes."""
        tag = tag_of(node)
        if tag is None:
            return node
        handler = _DECODERS.get(tag)
        if handler is None:
            raise ImageError(f"shard image: the tree has a node {tag!r}, which has no meaning here")
        if self._depth > MAX_DEPTH + _SLACK_LEVELS:
            raise ImageError("shard image: the tree is nested too deeply")
        self._depth += 1
        try:
            return handler(self, node)
        except StateError:
            raise
        except NO_VALUE as fault:
            raise ImageError(f"shard image: a damaged {tag} node: {fault}") from fault
        finally:
            self._depth -= 1

    def pairs(self, node: Node) -> list[tuple[Any, Node]]:
        """Decoded keys and undecoded values of a mapping node; keys must differ."""
        check_mapping(node)
        start = MAPPING_START[node[0]]
        keys = [self.decode(key) for key in node[start::2]]
        try:
            distinct = len({*keys})
        except TypeError as fault:
            raise ImageError(f"shard image: a key that cannot be one: {fault}") from fault
        if distinct != len(keys):
            raise ImageError(f"shard image: a {node[0]} node with a doubled key")
        return list(zip(keys, node[start + 1 :: 2], strict=True))


def leaf_keys(node: Node, keys: tuple[object, ...] = ()) -> dict[int, tuple[object, ...]]:
    """The key path of every leaf below a node that an `Encoder` made, for the words of an error."""
    if type(node) is not list:
        return {}
    tag = node[0]
    rows: list[tuple[tuple[object, ...], Node]] = []
    if tag == "leaf":
        return {node[1]: keys}
    if tag in MAPPING_START:
        rows = [((*keys, key), value) for key, value in Decoder(NoLeaves()).pairs(node)]
    elif tag in SEQUENCE_START:
        rows = [((*keys, at), item) for at, item in enumerate(node[SEQUENCE_START[tag] :])]
    elif tag in {"object", "bytes", "bytearray", "str", "numbers"}:
        rows = [(keys, node[-1])]
    elif tag == "wrapped":
        rows = [((*keys, name), part) for name, part in zip(node[4::2], node[5::2], strict=True)]
    found: dict[int, tuple[object, ...]] = {}
    for below, part in rows:
        found.update(leaf_keys(part, below))
    return found


def empty_mapping(node: Node) -> dict[Any, Any]:
    """A new container of the type that a mapping node stands for, empty."""
    if node[0] == "defaultdict":
        name = node[1]
        return defaultdict(None if name is None else FACTORIES[name])
    kinds: dict[str, type[dict[Any, Any]]] = {
        "dict": dict,
        "odict": OrderedDict,
        "counter": Counter,
    }
    return kinds[node[0]]()


def _mapping(decoder: Decoder, node: Node) -> Any:
    check_mapping(node)
    made = empty_mapping(node)
    for key, value in decoder.pairs(node):
        made[key] = decoder.decode(value)
    return made


def _sequence(decoder: Decoder, node: Node) -> Any:
    check_sequence(node)
    tag, made = node[0], []
    for item in node[SEQUENCE_START[tag] :]:
        made.append(decoder.decode(item))  # noqa: PERF401 - no frame for a comprehension
    return deque(made, node[1]) if tag == "deque" else _SEQUENCES[tag](made)


def _bytes(decoder: Decoder, node: Node) -> bytes:
    (content,) = node[1:]
    if type(content) is str:
        return b64decode(content, validate=True)
    found = decoder.decode(content)
    if type(found) is not bytes:
        raise ImageError("shard image: a bytes node that holds no bytes")
    return found


def _bytearray(decoder: Decoder, node: Node) -> bytearray:
    (content,) = node[1:]
    return bytearray(_bytes(decoder, content))


def _str(decoder: Decoder, node: Node) -> str:
    if len(node) == 2:
        return b64decode(node[1], validate=True).decode("utf-8", "surrogatepass")
    size, content = node[1:]
    found = decoder.decode(content)
    if type(found) is not bytes or type(size) is not int or not 0 <= size <= len(found):
        raise ImageError("shard image: a text longer than its bytes")
    return found[:size].decode("utf-8", "surrogatepass")


def _numbers(decoder: Decoder, node: Node) -> Any:
    kind, count, content = node[1:]
    found = decoder.decode(content)
    if not isinstance(found, np.ndarray) or found.dtype not in NUMBERS.values() or found.ndim != 1:
        raise ImageError("shard image: a list of numbers without an array of them")
    if kind not in {"list", "tuple"} or type(count) is not int or not 0 <= count <= found.size:
        raise ImageError("shard image: a list of more numbers than are there")
    return _SEQUENCES[kind](found[:count].tolist())


def _int(_: Decoder, node: Node) -> int:
    (text,) = node[1:]
    return int(text, 16)


def _float(_: Decoder, node: Node) -> float:
    (text,) = node[1:]
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _complex(decoder: Decoder, node: Node) -> complex:
    real, imag = (decoder.decode(part) for part in node[1:])
    return complex(real, imag)


def _scalar(decoder: Decoder, node: Node) -> Any:
    descr, text = node[1:]
    dtype = dtype_from(decoder.decode(descr))
    data = b64decode(text, validate=True)
    if len(data) != dtype.itemsize:
        raise ImageError(f"shard image: {len(data)} bytes for a numpy {dtype}")
    return np.frombuffer(data, dtype).copy()[0] if data else np.zeros(1, dtype)[0]


def _leaf(decoder: Decoder, node: Node) -> Any:
    (index,) = node[1:]
    return decoder.leaves.value(index)


def _size(_: Decoder, node: Node) -> torch.Size:
    # torch takes a larger number, and fails when the size is looked at.
    if any(type(size) is not int or abs(size) >= 1 << 63 for size in node[1:]):
        raise ImageError("shard image: a torch.Size with a part out of range")
    return torch.Size(node[1:])


def _datetime(decoder: Decoder, node: Node) -> Any:
    text, fold, *zone = node[1:]
    kind: Any = {"datetime": dt.datetime, "time": dt.time}[node[0]]
    found = kind.fromisoformat(text).replace(fold=fold)
    if not zone:
        return found
    (named,) = map(decoder.decode, zone)
    return found.replace(tzinfo=named)


def _path(decoder: Decoder, node: Node) -> Any:
    name, text = node[1:]
    return PATHS[name](decoder.decode(text))


def _one(make: Callable[[Any], Any]) -> Callable[[Decoder, Node], Any]:
    def decode(decoder: Decoder, node: Node) -> Any:
        (part,) = node[1:]
        return make(decoder.decode(part))

    return decode


def _many(make: Callable[..., Any]) -> Callable[[Decoder, Node], Any]:
    return lambda decoder, node: make(*map(decoder.decode, node[1:]))


_DECODERS: dict[str, Callable[[Decoder, Node], Any]] = {
    **dict.fromkeys(MAPPING_START, _mapping),
    **dict.fromkeys(SEQUENCE_START, _sequence),
    "leaf": _leaf,
    "str": _str,
    "numbers": _numbers,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "int": _int,
    "float": _float,
    "complex": _complex,
    "scalar": _scalar,
    "slice": _many(slice),
    "range": _many(range),
    "timedelta": _many(dt.timedelta),
    "decimal": _one(Decimal),
    "date": _one(dt.date.fromisoformat),
    "timezone": _many(dt.timezone),
    "datetime": _datetime,
    "time": _datetime,
    "size": _size,
    "dtype": _one(DTYPES.__getitem__),
    "device": _one(torch.device),
    "path": _path,
}
