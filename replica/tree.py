"""Nested Python values as typed JSON, and back. No pickle, no class looked up by name.

JSON's null, booleans, strings, ints of 64 bits and finite floats stand for themselves. Everything
else is a list that begins with its tag: `["tuple", 1, 2]`, `["dict", key, value, key, value]`,
`["leaf", 7]`. Tensors, numpy arrays, long byte strings, very long texts and very long lists of
numbers are leaves: their bytes lie in entries of the image, and the tree only numbers them.

What is supported is listed in `docs/state.md`, made from the tables here.
A subclass of a supported type is refused: it could not come back as itself.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch

from replica.image import MAX_NODES, MAX_TREE_BYTES
from replica.jsontext import count_nodes
from replica.scalars import SCALARS, fits, numpy_node, text_node
from replica.unsupported import Unsupported, advice, path_text
from replica.wrapped import Wrapped

Node = Any
"""What `json` reads and writes: None, bool, int, float, str or a list of nodes."""

MAX_DEPTH = 250
INLINE_BYTES = 1 << 12
"""Longer byte strings become leaves."""
INLINE_CHARS = 1 << 20
"""Longer texts do."""
INLINE_NUMBERS = 1 << 18
"""So do longer lists and tuples of ints or of floats."""
_GROWTH_BYTES = 1 << 19
"""Leaves of texts and numbers grow in such steps, so that a growing one rarely changes the plan."""

FACTORIES = {
    kind.__name__: kind
    for kind in (
        *(int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(OrderedDict, Counter, deque),
    )
}
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
NUMBERS: dict[type, np.dtype[Any]] = {int: np.dtype("<i8"), float: np.dtype("<f8")}
"""Of what a long list of Python numbers makes an array."""
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


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
        self.bare = ""
        """Why no tensor and no object may be here: "which cannot be in a set"; or empty."""

    def encode(self, value: object) -> Node:
        """Node of one value; `Unsupported` names what cannot be carried."""
        kind = type(value)
        scalar = SCALARS.get(kind)
        if scalar is not None:
            return scalar(value)
        handler = _ENCODERS.get(kind)
        if handler is not None:
            return handler(self, value)
        return self._other(value)

    def _other(self, value: object) -> Node:
        if isinstance(value, torch.Tensor):
            if self.bare:
                raise Unsupported(value, self.bare)
            return ["leaf", self.leaves.tensor(value)]
        if isinstance(value, np.generic):
            return numpy_node(value)
        found = self._state_of(value)
        if found is None:
            why = self.bare if hasattr(value, "state_dict") else ""
            raise Unsupported(value, why or advice(value, PLAIN_TYPES))
        kind, state = found
        return ["object", kind, self.inner(state)]

    def inner(self, state: object) -> Node:
        """Node of an object's state, or of a part of it.

        Inside of it no further object can be told where to load itself.
        """
        live, self._live = self._live, None
        node = self.encode(state)
        self._live = live
        return node

    def _state_of(self, value: object) -> tuple[str, object] | None:
        if self._live is None or self.bare:
            return None
        try:
            return self._live(value)
        except Unsupported:
            raise
        except Exception as fault:
            why = f"whose state could not be read: {type(fault).__name__}: {fault}"
            raise Unsupported(value, why) from fault

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
        bare, self.bare = self.bare, "which cannot be a key"
        node = self.encode(key)
        self.bare = bare
        if _has_leaf(node):
            raise Unsupported(key, "which cannot be a key")
        if not _equals_itself(key):
            raise Unsupported(key, "which cannot be a key: it does not equal itself")
        return node


def _has_leaf(node: Node) -> bool:
    return type(node) is list and (node[0] == "leaf" or any(map(_has_leaf, node)))


def _equals_itself(key: Any) -> bool:
    """Not so NaN: a restore would look for it in a live dict in vain."""
    if isinstance(key, tuple | frozenset):
        return all(map(_equals_itself, key))
    return bool(key == key)  # noqa: PLR0124 - that is the question


def _encode_pairs(encoder: Encoder, value: dict[Any, Any]) -> Node:
    head: list[Node] = [MAPPING_TAGS[type(value)]]
    if isinstance(value, defaultdict):
        head.append(_factory_name(value))
    encoder.open(value)
    key: object = None
    try:
        for key, item in value.items():
            head.append(key if type(key) is str and key.isascii() else encoder.key(key))
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
    found = set(map(type, value))
    if len(found) == 1 and (number := found.pop()) in NUMBERS:
        if number is int and not (fits(min(value)) and fits(max(value))):
            pass
        elif len(value) > INLINE_NUMBERS and kind in {list, tuple} and not encoder.bare:
            return _encode_numbers(encoder, value, number)
        elif number is int:
            return [*head, *value]
    encoder.open(value)
    bare = encoder.bare
    if kind in {set, frozenset}:
        encoder.bare = bare or "which cannot be in a set"
    index = 0
    try:
        for index, item in enumerate(value):  # noqa: B007 - the handler needs it
            head.append(encoder.encode(item))
    except Unsupported as fault:
        fault.keys.append(index)
        raise
    encoder.bare = bare
    encoder.close(value)
    return head


def _encode_numbers(encoder: Encoder, value: list[Any] | tuple[Any, ...], number: type) -> Node:
    dtype, count = NUMBERS[number], len(value)
    step = _GROWTH_BYTES // dtype.itemsize
    room = np.zeros(-(-count // step) * step, dtype)
    room[:count] = value
    return ["numbers", type(value).__name__, count, ["leaf", encoder.leaves.array(room)]]


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    name = None if factory is None else str(getattr(factory, "__name__", ""))
    if name is not None and FACTORIES.get(name) is not factory:
        raise Unsupported(value, f"whose default factory is not one of {sorted(FACTORIES)}")
    return name


def _encode_str(encoder: Encoder, value: str) -> Node:
    if len(value) > INLINE_CHARS and not encoder.bare:
        raw = value.encode("utf-8", "surrogatepass")
        room = -(-len(raw) // _GROWTH_BYTES) * _GROWTH_BYTES
        return ["str", len(raw), ["leaf", encoder.leaves.raw(raw.ljust(room, b"\0"))]]
    return value if value.isascii() else text_node(value)


def _encode_bytes(encoder: Encoder, value: bytes) -> Node:
    if len(value) > INLINE_BYTES:
        return ["bytes", ["leaf", encoder.leaves.raw(value)]]
    return ["bytes", b64encode(value).decode()]


def _encode_bytearray(encoder: Encoder, value: bytearray) -> Node:
    return ["bytearray", _encode_bytes(encoder, bytes(value))]


def _encode_slice(encoder: Encoder, value: slice) -> Node:
    encoder.open(value)
    bare, encoder.bare = encoder.bare, encoder.bare or "which cannot be in a slice"
    head: list[Node] = ["slice"]
    for part in (value.start, value.stop, value.step):
        head.append(encoder.encode(part))  # noqa: PERF401 - no frame for a comprehension
    encoder.bare = bare
    encoder.close(value)
    return head


def _encode_wrapped(encoder: Encoder, value: Wrapped) -> Node:
    head: list[Node] = ["wrapped", value.kind, value.context, list(value.shape)]
    encoder.open(value)
    name = ""
    try:
        for name, part in value.parts.items():
            head += [name, encoder.encode(part)]
    except Unsupported as fault:
        fault.keys.append(name)
        raise
    encoder.close(value)
    return head


_ENCODERS: dict[type, Callable[[Encoder, Any], Node]] = {
    str: _encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytearray,
    **dict.fromkeys((list, tuple, set, frozenset, deque), _encode_items),
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), _encode_pairs),
    slice: _encode_slice,
    np.ndarray: lambda encoder, value: ["leaf", encoder.leaves.array(value)],
    Wrapped: _encode_wrapped,
}
PLAIN_TYPES = tuple(kind for kind in (*SCALARS, *_ENCODERS) if kind is not Wrapped)
"""Types whose values are carried, each as itself."""


def tree_text(node: Node, tables: str) -> bytes:
    """The tree's JSON: `tables` (members of an object, already text) and the root.

    Raises `ValueError` when the text is larger than the reader takes.
    """
    text = joined_text(node_text(node), tables)
    if not is_readable(text):
        raise ValueError(
            f"its structure takes {len(text)} bytes and about {count_nodes(text)} values of JSON; "
            f"at most {MAX_TREE_BYTES} and {MAX_NODES} are carried. {len(tables)} bytes of it "
            f"describe tensors, and {_largest(node)}: put many small tensors into a few, and many "
            "numbers into an array"
        )
    return text


def node_text(node: Node) -> str:
    """JSON of one node."""
    return _JSON.encode(node)


def joined_text(root: str, tables: str) -> bytes:
    """The tree's JSON from its two parts, whatever its size."""
    return f'{{{tables},"root":{root}}}'.encode()


def is_readable(text: bytes) -> bool:
    """Whether a tree is no larger than its reader takes."""
    # What separates values takes a byte each: most texts need not be counted.
    few = len(text) < MAX_NODES or count_nodes(text) <= MAX_NODES
    return few and len(text) <= MAX_TREE_BYTES


def _largest(root: Node) -> str:
    """Which value at the top of a state is the largest in the text."""
    rows = [(len(json.dumps(value)), key) for key, value in pairs(root[1])]
    size, key = max(rows, key=itemgetter(0), default=(0, ""))
    return f"{path_text([key])} takes {size}"


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
    elif tag in {"object", "bytes", "bytearray", "str", "numbers"}:
        yield from leaf_names(node[-1], prefix)
    elif tag == "wrapped":
        for name, part in zip(node[4::2], node[5::2], strict=True):
            yield from leaf_names(part, f"{prefix}.{name}")
