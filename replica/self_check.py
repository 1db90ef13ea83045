"""Read back what was captured, before anything counts as saved: no byte of a tensor is copied.

Two passes over the text that a save would write. The first compares every value that it gives with
the live one: by type, by value, bit by bit for floats, and for a tensor by everything but its
bytes. The second plans a restore onto the live state itself, as `restore` would.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from replica.copies import CopyPlan
from replica.errors import StateError
from replica.fresh import Facts, LeafReader, SpecFacts, TensorFacts
from replica.image import Bytes, Image, ImageError, ShardHeader, read_image
from replica.leaves import LeafList, is_fortran
from replica.tables import mesh_signature, placement_names
from replica.torch_private import DTensor
from replica.tree import MAPPING_START, SEQUENCE_START, Node
from replica.tree_reader import Decoder, check_mapping, check_sequence, empty_mapping, tag_of
from replica.unsupported import path_text, shown, type_text
from replica.wrapped import Wrapped

Keys = tuple[object, ...]
Restore = Callable[[LeafReader], object]
"""Plans a restore from a reader; its errors name what would not fit."""

_IN_JSON = {bool, int, str, type(None)}
_PARTS = {"list", "tuple", "deque", "set", "frozenset", "slice"}
CHECK_HEADER = ShardHeader(job="check", epoch=0, step=0, generation="0" * 32, owner=0, world=1)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One capture: what was read of the live state, and the text and plan made of it."""

    state: MutableMapping[str, object]
    seen: list[object]
    """The states of its objects, in the order of the walk, and the random states."""
    leaves: LeafList
    tree: bytes
    copies: CopyPlan


def check_readable(captured: Captured, rank: int, restore: Restore) -> None:
    """Raise `StateError` with key path and type where a restore would not give back the state."""
    try:
        with torch.no_grad():
            image = _image(captured)
            _Comparison(captured, image).run()
            restore(_LiveReader(image, captured.leaves))
    except StateError as fault:
        raise StateError(
            f"rank {rank}: the self-check before the first save could not read the state back: "
            f"{fault}"
        ) from fault
    except RecursionError:
        raise StateError(
            f"rank {rank}: the state is nested too deeply for what is left of this thread's stack; "
            "call save from fewer levels of functions"
        ) from None


@dataclass(frozen=True, kw_only=True)
class _Planned(Image):
    """An image of which only header and tree are there; arrays and bytes come from the leaves."""

    tree: bytes
    plain: dict[int, Any]
    """Leaves that are no tensors, by the number of their entry."""

    def entry_bytes(self, index: int) -> Bytes:
        value = self.plain[index]
        if isinstance(value, np.ndarray):
            value = (value.T if is_fortran(value) else value).tobytes()
        return np.frombuffer(value, np.uint8)

    def tree_bytes(self) -> bytes:
        return self.tree


def _image(captured: Captured) -> _Planned:
    layout, tree = captured.copies.layout, captured.tree
    shard_bytes = layout.tree_start + len(tree)
    head = np.frombuffer(layout.head(CHECK_HEADER, len(tree), shard_bytes), np.uint8)
    found = read_image(head, nbytes=shard_bytes)
    if found.entries != layout.entries or found.starts != layout.starts:
        raise ImageError("shard image: the header names other entries than were written")
    return _Planned(
        header=found.header,
        entries=found.entries,
        starts=found.starts,
        tree_start=found.tree_start,
        shard_bytes=shard_bytes,
        buffer=head,
        tree=tree,
        plain={entry: captured.leaves.values[leaf] for entry, leaf in captured.copies.plain},
    )


class _LiveReader(LeafReader):
    """Gives the live tensors in place of those that an image would hold."""

    def __init__(self, image: Image, leaves: LeafList) -> None:
        super().__init__(image)
        self.leaves = leaves
        self._index: dict[int, int] = {}

    def take(self, index: object) -> Facts:
        facts = super().take(index)
        self._index[id(facts)] = index  # type: ignore[assignment]
        return facts

    def local(self, facts: TensorFacts, device: str) -> torch.Tensor:  # noqa: ARG002
        found = self.leaves.values[self._index[id(facts)]]
        assert isinstance(found, torch.Tensor)
        return found.detach()


class _Comparison:
    """The first pass."""

    def __init__(self, captured: Captured, image: Image) -> None:
        self._captured = captured
        self._reader = LeafReader(image)
        self._leaves = captured.leaves
        self._objects = iter(captured.seen)
        self._decoder = Decoder(self)
        self._bases: dict[int, int] = {}

    def run(self) -> None:
        root = self._reader.root
        if type(root) is not list or len(root) != 3 or root[0] != "tuple":
            raise ImageError("shard image: the root of the tree is damaged")
        self._compare({**self._captured.state}, root[1], ())
        self._compare(next(self._objects, None), root[2], ("planaria.random",))

    def value(self, index: int) -> np.ndarray[Any, Any] | bytes:
        """Only leaves that are no tensors are decoded."""
        facts = self._reader.take(index)
        if isinstance(facts, TensorFacts):
            raise ImageError("shard image: a tensor where none was captured")
        return self._reader.plain(facts)

    def _compare(self, value: Any, node: Node, keys: Keys) -> None:
        tag = tag_of(node)
        if tag == "object":
            self._compare(next(self._objects), node[2], keys)
        elif isinstance(value, torch.Tensor):
            self._compare_tensor(value, node, keys)
        elif isinstance(value, Wrapped):
            self._compare_rows(value.parts, node[4::2], node[5::2], keys)
            same = node[1:4] == [value.kind, value.context, list(value.shape)]
            self._check(same, value, "another wrapper", keys)
        elif tag in MAPPING_START:
            check_mapping(node)
            made: Any = empty_mapping(node)
            self._check(_same_mapping(value, made), value, made, keys)
            rows = self._decoder.pairs(node)
            self._compare_rows(value, [key for key, _ in rows], [row for _, row in rows], keys)
        elif tag in _PARTS:
            self._compare_parts(value, node, keys)
        else:
            found = self._decoder.decode(node)
            self._check(_same(value, found), value, found, keys)

    def _compare_rows(
        self, value: dict[Any, Any], found: list[Any], nodes: list[Node], keys: Keys
    ) -> None:
        self._check(len(value) == len(found), value, f"{len(found)} entries", keys)
        for (key, item), other, node in zip(value.items(), found, nodes, strict=True):
            if not _same_key(key, other):
                raise StateError(
                    f"{path_text(keys)} has the key {shown(key)}, which is a {type_text(key)} and "
                    f"came back as {shown(other)}"
                )
            self._compare(item, node, (*keys, key))

    def _compare_parts(self, value: Any, node: Node, keys: Keys) -> None:
        tag = node[0]
        self._check(type(value).__name__ == tag, value, f"a {tag}", keys)
        if tag == "deque":
            check_sequence(node)
            self._check(value.maxlen == node[1], value.maxlen, node[1], keys)
        items = (value.start, value.stop, value.step) if tag == "slice" else value
        nodes = node[SEQUENCE_START.get(tag, 1) :]
        self._check(len(items) == len(nodes), value, f"{len(nodes)} items", keys)
        # No call per item for lists of numbers.
        kinds = [*map(type, nodes)]
        if {*kinds} <= _IN_JSON and kinds == [*map(type, items)] and nodes == [*items]:
            return
        for index, (item, part) in enumerate(zip(items, nodes, strict=True)):
            self._compare(item, part, (*keys, index))

    def _compare_tensor(self, value: torch.Tensor, node: Node, keys: Keys) -> None:
        index = node[1] if tag_of(node) == "leaf" and len(node) == 2 else None
        facts = self._reader.take(index)
        local = self._leaves.values[node[1]]
        same = self._leaves.wholes.get(node[1], local) is value and isinstance(facts, TensorFacts)
        if not same or not isinstance(facts, TensorFacts) or not isinstance(local, torch.Tensor):
            raise StateError(f"{path_text(keys)} is a {type_text(value)} and came back as another")
        for what, now, then in (
            ("dtype", local.dtype, facts.dtype),
            ("shape", tuple(local.shape), facts.shape),
            ("strides", local.stride(), facts.strides),
            ("device", local.device.type, facts.device),
            ("sharding", _spec(value), facts.spec),
            ("place in memory", *self._places(local, facts)),
        ):
            if now != then:
                raise StateError(
                    f"{path_text(keys)} is a {type_text(value)} of {what} {now} and came back with "
                    f"{then}"
                )

    def _places(self, local: torch.Tensor, facts: TensorFacts) -> tuple[int, int]:
        """Where the memory of its entry begins by this tensor, and by the first one of it."""
        if not local.numel():
            return 0, 0
        base = local.data_ptr() - max(facts.offset_bytes, 0)
        return base, self._bases.setdefault(facts.entry, base)

    @staticmethod
    def _check(same: bool, value: object, found: object, keys: Keys) -> None:  # noqa: FBT001
        if not same:
            raise StateError(
                f"{path_text(keys)} is a {type_text(value)} and came back as another: "
                f"{shown(value)} as {shown(found)}"
            )


def _spec(value: torch.Tensor) -> SpecFacts | None:
    if not isinstance(value, DTensor):
        return None
    return SpecFacts(
        shape=tuple(value.shape),
        strides=tuple(value.stride()),
        placements=tuple(placement_names(value)),
        mesh=mesh_signature(value.device_mesh),
    )


def _same_mapping(value: object, made: object) -> bool:
    factory = getattr(value, "default_factory", None)
    return type(value) is type(made) and factory is getattr(made, "default_factory", None)


def _same_key(key: Any, found: Any) -> bool:
    if isinstance(key, tuple | frozenset) and type(found) is type(key):
        rows = (key, found) if isinstance(key, tuple) else (_sorted(key), _sorted(found))
        return len(key) == len(found) and all(map(_same_key, *rows))
    return _same(key, found)


def _sorted(items: Iterable[object]) -> list[object]:
    return sorted(items, key=lambda item: (type_text(item), shown(item)))


def _same(value: Any, found: Any) -> bool:
    """Equal in type and value, bit by bit where NaN or a sign would hide a difference."""
    if isinstance(value, np.generic):
        # Of several types of one dtype the usual one comes back.
        return isinstance(found, np.generic) and _same(np.asarray(value), np.asarray(found))
    if type(found) is not type(value):
        return False
    if isinstance(value, float):
        return struct.pack("d", value) == struct.pack("d", found)
    if isinstance(value, complex):
        return _same(value.real, found.real) and _same(value.imag, found.imag)
    if isinstance(value, np.ndarray):
        form = [(one.dtype, one.shape, is_fortran(one)) for one in (value, found)]
        return form[0] == form[1] and _same_numbers(value, found)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        kinds = {*map(type, value)}
        same = len(value) == len(found) and len(kinds) == 1 and kinds == {*map(type, found)}
        return same and np.array(value).tobytes() == np.array(found).tobytes()
    if isinstance(value, dt.datetime | dt.time | dt.timezone):
        return _moment(value) == _moment(found)
    return str(value) == str(found) if isinstance(value, Decimal) else bool(value == found)


def _same_numbers(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Equal bytes but for those that no number is in: gaps of a dtype, the end of a long double."""
    if one.dtype.names is not None:
        return all(_same_numbers(one[name], other[name]) for name in one.dtype.names)
    if one.dtype.char not in "gG":
        return one.tobytes() == other.tobytes()
    then, now = (np.signbit([value.real, value.imag]) for value in (one, other))
    return np.array_equal(one, other, equal_nan=True) and np.array_equal(then, now)


def _moment(value: dt.datetime | dt.time | dt.timezone) -> object:
    if isinstance(value, dt.timezone):
        return value.utcoffset(None), value.tzname(None)
    zone = value.tzinfo
    bare = value.replace(tzinfo=None).isoformat()
    return bare, value.fold, _moment(zone) if isinstance(zone, dt.timezone) else zone
