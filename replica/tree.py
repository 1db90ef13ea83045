"""Nested Python values as typed JSON, and back. No pickle, no class looked up by name.

JSON's null, booleans, strings, ints of 64 bits and finite floats stand for themselves. Everything
else is a list that begins with its tag: `["tuple", 1, 2]`, `["dict", key, value, key, value]`,
`["leaf", 7]`. Tensors, numpy arrays and long byte strings are leaves: their bytes lie in entries of
the image, and the tree only numbers them.

Supported: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict,
Counter, defaultdict (of a built-in type), set, frozenset, deque, slice, range, Decimal, datetime,
date, time, timedelta, timezone, PosixPath and the PurePath classes, numpy scalars and arrays
without objects, torch.Size, torch.dtype, torch.device and tensors. A subclass of these is refused:
it could not come back as itself. So is a named tuple, a dataclass and an enum member.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import struct
from base64 import b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import numpy as np
import torch

from replica.dtypes import dtype_name
from replica.image import MAX_TREE_BYTES
from replica.jsontext import count_nodes

Node = Any
"""What `json` reads and writes: None, bool, int, float, str or a list of nodes."""

MAX_DEPTH = 250
MAX_NODES = 1 << 23
INLINE_BYTES = 4096
"""Longer byte strings become leaves."""

FACTORIES = {kind.__name__: kind for kind in (int, float, complex, bool, str, list, dict, set)}
PATHS = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, PureWindowsPath)}
MAPPING_TAGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "odict",
    Counter: "counter",
    defaultdict: "defaultdict",
}
MAPPING_START = {"dict": 1, "odict": 1, "counter": 1, "defaultdict": 2}
"""Tags of mappings, with the position of their first key."""
SEQUENCE_START = {"list": 1, "tuple": 1, "set": 1, "frozenset": 1, "deque": 2}
"""Tags of sequences and sets, with the position of their first item."""


class Unsupported(Exception):
    """A value that cannot be carried. `keys` grows outward while the error passes containers."""

    def __init__(self, value: object, why: str) -> None:
        super().__init__(why)
        self.value = value
        self.why = why
        self.keys: list[object] = []

    def describe(self) -> str:
        """Key path, type and reason in one clause."""
        return f"{path_text(reversed(self.keys))} is a {type_text(self.value)}, {self.why}"


def type_text(value: object) -> str:
    """Qualified name of a value's type."""
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )


def path_text(keys: Iterable[object]) -> str:
    """Key path as the user would write it: `state['a']['b'][3]`."""
    shown = []
    for key in keys:
        text = repr(key)
        shown.append(f"[{text if len(text) <= 80 else text[:77] + '...'}]")
    return "state" + "".join(shown)


class Leaves(Protocol):
    """Takes what is too large or too typed for JSON; returns the number of the leaf."""

    def tensor(self, value: torch.Tensor) -> int: ...
    def array(self, value: np.ndarray[Any, Any]) -> int: ...
    def raw(self, value: bytes | bytearray) -> int: ...


class Encoder:
    """Turns values into nodes in one walk. An instance that raised is not used again.

    `live` is asked about every value of an unknown type: it gives the kind of a state object and
    the plain state to carry for it, or None.
    """

    def __init__(self, leaves: Leaves, live: Callable[[object], tuple[str, object] | None]) -> None:
        self.leaves = leaves
        self._live: Callable[[object], tuple[str, object] | None] | None = live
        self._open: set[int] = set()

    def encode(self, value: object) -> Node:
        """Node of one value; `Unsupported` names what cannot be carried."""
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        handler = _ENCODERS.get(kind)
        if handler is not None:
            return handler(self, value)
        return self._other(value)

    def _other(self, value: object) -> Node:
        if isinstance(value, torch.Tensor):
            return ["leaf", self.leaves.tensor(value)]
        if isinstance(value, np.generic):
            return _encode_scalar(value)
        found = self._live(value) if self._live is not None else None
        if found is None:
            raise Unsupported(
                value,
                "which is not one of the supported types: tensors, arrays, plain values, "
                "containers of them, and objects with state_dict and load_state_dict",
            )
        kind, state = found
        # Inside the state of an object no further object can be told where to load itself.
        live, self._live = self._live, None
        node = ["object", kind, self.encode(state)]
        self._live = live
        return node

    def open(self, value: object) -> None:
        """Note a container on the way down; refuse one that contains itself or lies too deep."""
        if id(value) in self._open:
            raise Unsupported(value, "which contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise Unsupported(value, f"nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))

    def close(self, value: object) -> None:
        """Note the way up."""
        self._open.discard(id(value))

    def key(self, key: object) -> Node:
        """Node of a mapping's key: anything supported that holds no leaf and no object."""
        live, self._live = self._live, None
        node = self.encode(key)
        self._live = live
        if isinstance(key, torch.Tensor) or _has_leaf(node):
            raise Unsupported(key, "which cannot be a key")
        return node


def _has_leaf(node: Node) -> bool:
    return type(node) is list and (node[0] == "leaf" or any(map(_has_leaf, node)))


def _encode_pairs(encoder: Encoder, value: dict[Any, Any]) -> Node:
    head: list[Node] = [MAPPING_TAGS[type(value)]]
    if isinstance(value, defaultdict):
        head.append(_factory_name(value))
    encoder.open(value)
    key: object = None
    try:
        for key, item in value.items():
            head.append(key if type(key) is str else encoder.key(key))
            head.append(encoder.encode(item))
    except Unsupported as fault:
        fault.keys.append(key)
        raise
    encoder.close(value)
    return head


# Two Python frames per level, here and when reading: MAX_DEPTH levels must fit any caller's stack.
def _encode_items(encoder: Encoder, value: Any) -> Node:
    kind = type(value)
    head: list[Node] = [kind.__name__, value.maxlen] if kind is deque else [kind.__name__]
    # Sampler permutations are lists of millions of ints: no call per item for these.
    if value and set(map(type, value)) == {int} and _fits(min(value)) and _fits(max(value)):
        return [*head, *value]
    encoder.open(value)
    index = 0
    try:
        for index, item in enumerate(value):  # noqa: B007 - the handler needs it
            head.append(encoder.encode(item))
    except Unsupported as fault:
        fault.keys.append(index)
        raise
    encoder.close(value)
    return head


def _fits(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 63


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    name = None if factory is None else str(getattr(factory, "__name__", ""))
    if name is not None and FACTORIES.get(name) is not factory:
        raise Unsupported(value, f"whose default factory is not one of {sorted(FACTORIES)}")
    return name


def _encode_int(_: Encoder, value: int) -> Node:
    # Python's own parser refuses ints of more than 4300 digits; hexadecimal has no such limit.
    return value if _fits(value) else ["int", hex(value)]


def float_node(value: float) -> Node:
    """A finite float as itself (repr round-trips); NaN with its payload and infinities by bits."""
    return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]


def _encode_bytes(encoder: Encoder, value: bytes) -> Node:
    if len(value) > INLINE_BYTES:
        return ["bytes", ["leaf", encoder.leaves.raw(value)]]
    return ["bytes", b64encode(value).decode()]


def _encode_bytearray(encoder: Encoder, value: bytearray) -> Node:
    return ["bytearray", _encode_bytes(encoder, bytes(value))]


def _encode_scalar(value: np.generic) -> Node:
    # As an array: an empty np.str_ says that it has no bytes and gives four.
    array = np.asarray(value)
    return ["scalar", dtype_node(value, array.dtype), b64encode(array.tobytes()).decode()]


def dtype_node(owner: object, dtype: np.dtype[Any]) -> Node:
    """Describe a dtype as .npy files do; refuses one that holds objects."""
    if dtype.hasobject or dtype.kind not in "biufcmMSUV":
        raise Unsupported(owner, f"whose dtype {dtype} does not lie in its own bytes")
    return _described(np.lib.format.dtype_to_descr(dtype))


def _described(part: object) -> Node:
    if isinstance(part, list):
        return ["list", *map(_described, part)]
    return ["tuple", *map(_described, part)] if isinstance(part, tuple) else part


def _encode_slice(encoder: Encoder, value: slice) -> Node:
    return ["slice", *(encoder.encode(part) for part in (value.start, value.stop, value.step))]


def _encode_datetime(_: Encoder, value: dt.datetime | dt.time) -> Node:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise Unsupported(value, "whose time zone is not a datetime.timezone")
    return [type(value).__name__, value.isoformat(), value.fold]


def _encode_timezone(encoder: Encoder, value: dt.timezone) -> Node:
    return ["timezone", encoder.encode(value.utcoffset(None))]


_ENCODERS: dict[type, Callable[[Encoder, Any], Node]] = {
    int: _encode_int,
    float: lambda _, value: float_node(value),
    complex: lambda _, value: ["complex", float_node(value.real), float_node(value.imag)],
    bytes: _encode_bytes,
    bytearray: _encode_bytearray,
    **dict.fromkeys((list, tuple, set, frozenset, deque), _encode_items),
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), _encode_pairs),
    slice: _encode_slice,
    range: lambda encoder, v: ["range", *map(encoder.encode, (v.start, v.stop, v.step))],
    Decimal: lambda _, value: ["decimal", str(value)],
    dt.datetime: _encode_datetime,
    dt.time: _encode_datetime,
    dt.date: lambda _, value: ["date", value.isoformat()],
    dt.timedelta: lambda _, v: ["timedelta", v.days, v.seconds, v.microseconds],
    dt.timezone: _encode_timezone,
    torch.Size: lambda _, value: ["size", *value],
    torch.dtype: lambda _, value: ["dtype", dtype_name(value)],
    torch.device: lambda _, value: ["device", str(value)],
    np.ndarray: lambda encoder, value: ["leaf", encoder.leaves.array(value)],
    **{
        kind: lambda _, value: ["path", type(value).__name__, str(value)] for kind in PATHS.values()
    },
}


def tree_text(node: Node, tables: str) -> bytes:
    """The tree's JSON: `tables` (members of an object, already text) and the root.

    Raises `ValueError` when the text is larger than the reader takes.
    """
    root = json.dumps(node, separators=(",", ":"), allow_nan=False)
    text = f'{{{tables},"root":{root}}}'.encode()
    if len(text) > MAX_TREE_BYTES or count_nodes(text) > MAX_NODES:
        raise ValueError(
            f"its Python values take {len(text)} bytes and about {count_nodes(text)} values of "
            f"JSON; at most {MAX_TREE_BYTES} and {MAX_NODES} are carried: "
            "put long sequences of numbers into an array or a tensor"
        )
    return text


def pairs(node: Node) -> Iterator[tuple[Node, Node]]:
    """Key and value nodes of a mapping node that was checked to be one."""
    start = MAPPING_START[node[0]]
    return zip(node[start::2], node[start + 1 :: 2], strict=True)


def items(node: Node) -> Sequence[Node]:
    """Item nodes of a sequence node that was checked to be one."""
    return list(node[SEQUENCE_START[node[0]] :])


def leaf_names(node: Node, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Dotted names of the leaves below a node that an `Encoder` made; not always distinct."""
    if type(node) is not list:
        return
    tag = node[0]
    if tag == "leaf":
        yield node[1], prefix
    elif tag in MAPPING_START:
        for key, value in pairs(node):
            label = key if type(key) is str else json.dumps(key)
            yield from leaf_names(value, f"{prefix}.{label}" if prefix else label)
    elif tag in SEQUENCE_START:
        for index, item in enumerate(items(node)):
            yield from leaf_names(item, f"{prefix}.{index}" if prefix else str(index))
    elif tag == "object":
        yield from leaf_names(node[2], prefix)
    elif tag in {"bytes", "bytearray"}:
        yield from leaf_names(node[1], prefix)
