"""The plan of a shard: which leaf is copied to which bytes of the image.

Made once and kept while the state keeps its geometry and its sharing of memory. A save then only
compares, copies tensor bytes into views that were made before, and writes the frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from erasure.digest import digest
from replica.dtypes import carrier, code_of, dtype_name
from replica.image import (
    METADATA_KEY,
    PAD_NAME,
    TREE_NAME,
    Bytes,
    Entry,
    Layout,
    raw_entry,
)
from replica.leaves import (
    Block,
    Home,
    Leaf,
    LeafList,
    find_homes,
    is_fortran,
    memory_of,
    unexpanded,
)
from replica.memcopy import PIECE_BYTES, copy_pieces
from replica.torch_private import DTensor
from replica.tree import Node, dtype_node

TABLE_FORMAT = 1
CONJ, NEG = 1, 2
"""Flags of a tensor in a shared stretch of memory, whose bytes are kept as they lie."""

_NAME_CHARS = 200
_MAX_BOUND = 4
_TREE_SLACK_BYTES = 1 << 12
_PAGE_BYTES = 4096

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Copy:
    """One copy of a save: from a tensor, seen through `view`, to a run of an entry's bytes."""

    begin: int
    """Byte of the entry."""
    nbytes: int
    leaf: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    view: View | None
    direct: bool
    """The bytes lie in this machine's memory as they go into the entry."""


@dataclass(frozen=True)
class _Item:
    """An entry before its place is known, with the copies that fill it."""

    entry: Entry
    align_bytes: int
    copies: tuple[_Copy, ...]
    leaf: int


class CopyPlan:
    """Layout and copies for one state. Holds no reference to the state's tensors.

    It does hold views of the last buffers it was used with; `forget_buffers` lets them go.
    """

    def __init__(self, leaves: LeafList, names: Iterable[tuple[int, str]]) -> None:
        tensors = leaves.tensor_values()
        self._keys = leaves.keys
        self._pointers = [value.data_ptr() for value in tensors]
        self._homes = find_homes(tensors)
        items = list(_items(leaves, self._homes.blocks, _unique(names, len(leaves.values))))
        # Sizes are multiples of their alignment, so falling alignment keeps every entry aligned.
        order = sorted(range(len(items)), key=lambda index: -items[index].align_bytes)
        self.layout = Layout([items[index].entry for index in order])
        place = {item: number for number, item in enumerate(order)}
        copies = [(place[index], copy) for index, item in enumerate(items) for copy in item.copies]
        self._views = [(entry, copy) for entry, copy in copies if not copy.direct]
        self._pieces = list(_pieces(self.layout, leaves, copies))
        self._plain = [
            (place[index], item.leaf) for index, item in enumerate(items) if not item.copies
        ]
        blocks = [place[index] for index in range(len(self._homes.blocks))]
        self.tables = _tables(leaves, self._homes.homes, blocks, dict(_swap(self._plain)))
        self.fingerprint = digest(self.tables.encode()).hex()
        self._cuda = {value.device for value in tensors if value.is_cuda}
        self._bound: dict[tuple[int, int], list[tuple[torch.Tensor, int, View | None]]] = {}

    def matches(self, leaves: LeafList) -> bool:
        """Whether this plan still describes the state whose leaves these are."""
        if leaves.keys != self._keys:
            return False
        tensors = leaves.tensor_values()
        pointers = [value.data_ptr() for value in tensors]
        if pointers == self._pointers:
            return True
        if find_homes(tensors) != self._homes:
            return False
        self._pointers = pointers
        return True

    def capacity_bytes(self, tree: bytes) -> int:
        """Bytes of a buffer that leaves room for the Python values to grow."""
        needed = self.layout.tree_start + len(tree) + len(tree) // 8 + _TREE_SLACK_BYTES
        return -(-needed // _PAGE_BYTES) * _PAGE_BYTES

    def copy(self, leaves: LeafList, buffer: Bytes) -> None:
        """Copy every leaf into its entry of `buffer`; when it returns, all bytes are there.

        `leaves` are those that this plan was made from or that `matches` saw last.
        """
        values: list[Any] = leaves.values
        base, pointers = buffer.__array_interface__["data"][0], self._pointers
        copy_pieces(
            [(base + to, pointers[at] + begin, size) for to, at, begin, size in self._pieces],
            (leaves, buffer),
        )
        with torch.no_grad():
            for target, leaf, view in self._bind(buffer):
                source = values[leaf]
                target.copy_(source if view is None else view(source), non_blocking=source.is_cuda)
            for device in self._cuda:
                torch.cuda.current_stream(device).synchronize()
        for entry, leaf in self._plain:
            start = self.layout.starts[entry]
            _copy_plain(buffer[start : start + self.layout.entries[entry].nbytes], values[leaf])

    def forget_buffers(self) -> None:
        """Drop the views of buffers, so that their mappings can go."""
        self._bound.clear()

    def _bind(self, buffer: Bytes) -> list[tuple[torch.Tensor, int, View | None]]:
        key = (buffer.__array_interface__["data"][0], buffer.nbytes)
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= _MAX_BOUND:
                self._bound.pop(next(iter(self._bound)))
            whole = torch.from_numpy(buffer)
            bound = [self._target(whole, entry, copy) for entry, copy in self._views]
            self._bound[key] = bound
        return bound

    def _target(
        self, whole: torch.Tensor, entry: int, copy: _Copy
    ) -> tuple[torch.Tensor, int, View | None]:
        start = self.layout.starts[entry] + copy.begin
        target = whole[start : start + copy.nbytes].view(copy.dtype).view(copy.shape)
        return target, copy.leaf, copy.view


def _items(leaves: LeafList, blocks: tuple[Block, ...], names: list[str]) -> Iterator[_Item]:
    for block in blocks:
        members = [leaves.tensors[member] for member in block.members]
        yield _tensor_item(leaves.values, block, members, names[members[0]])
    for index, value in enumerate(leaves.values):
        if not isinstance(value, torch.Tensor):
            nbytes = value.nbytes if isinstance(value, np.ndarray) else len(value)
            yield _Item(raw_entry(names[index], nbytes), 1, (), index)


def _pieces(
    layout: Layout, leaves: LeafList, copies: Iterable[tuple[int, _Copy]]
) -> Iterator[tuple[int, int, int, int]]:
    """Direct copies in pieces: offset in the buffer, which tensor, byte of it, bytes."""
    position = {leaf: number for number, leaf in enumerate(leaves.tensors)}
    for entry, copy in copies:
        start = layout.starts[entry] + copy.begin
        for begin in range(0, copy.nbytes if copy.direct else 0, PIECE_BYTES):
            size = min(PIECE_BYTES, copy.nbytes - begin)
            yield start + begin, position[copy.leaf], begin, size


def _tensor_item(values: list[Leaf], block: Block, members: list[int], name: str) -> _Item:
    sources: list[torch.Tensor] = [values[member] for member in members]  # type: ignore[misc]
    if block.region_bytes < 0:
        return _packed_item(sources[0], members[0], name)
    copies = []
    for leaf, source, offset in zip(members, sources, block.offsets, strict=True):
        nbytes = memory_of(source).numel()
        copies.append(_Copy(offset, nbytes, leaf, torch.uint8, (nbytes,), memory_of, source.is_cpu))
    return _Item(raw_entry(name, block.region_bytes), 1, tuple(copies), members[0])


def _packed_item(source: torch.Tensor, leaf: int, name: str) -> _Item:
    bare = unexpanded(source)
    shape, nbytes, code = tuple(bare.shape), bare.numel() * bare.itemsize, code_of(bare.dtype)
    entry = (
        raw_entry(name, nbytes)
        if code is None
        else Entry(name=name, code=code, shape=shape, nbytes=nbytes)
    )
    dtype = carrier(source.dtype)
    view = _view(expanded=bare is not source, recast=dtype is not source.dtype)
    as_it_lies = bare.is_contiguous() and not source.is_conj() and not source.is_neg()
    copy = _Copy(0, nbytes, leaf, dtype, shape, view, source.is_cpu and as_it_lies)
    return _Item(entry, source.itemsize, (copy,), leaf)


def _view(*, expanded: bool, recast: bool) -> View | None:
    if recast:
        return lambda value: unexpanded(value).view(carrier(value.dtype))
    return unexpanded if expanded else None


def _copy_plain(target: Bytes, value: np.ndarray[Any, Any] | bytes | bytearray) -> None:
    if isinstance(value, bytes | bytearray):
        target[:] = np.frombuffer(value, np.uint8)
    elif value.nbytes:
        source = value.T if is_fortran(value) else value
        np.copyto(target.view(source.dtype).reshape(source.shape), source, casting="no")


def _swap(rows: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    return ((right, left) for left, right in rows)


def _unique(names: Iterable[tuple[int, str]], count: int) -> list[str]:
    """A distinct, printable, valid name per leaf: readers see it, the tree does not use it."""
    wanted = dict(names)
    used = {TREE_NAME, PAD_NAME, METADATA_KEY, "__metadata__", ""}
    found = []
    for index in range(count):
        raw = wanted.get(index, "leaf")[:_NAME_CHARS]
        name = text = raw.encode("utf-8", "backslashreplace").decode()
        while name in used:
            name = f"{text}#{index}" if name == text else name + "#"
        used.add(name)
        found.append(name)
    return found


def _tables(
    leaves: LeafList, homes: tuple[Home, ...], blocks: list[int], plain: dict[int, int]
) -> str:
    """The constant members of the tree: leaves, DTensor specs, meshes."""
    specs: dict[str, int] = {}
    meshes: dict[str, int] = {}
    spec_of = {
        leaf: _number(specs, _spec_row(whole, meshes)) for leaf, whole in leaves.wholes.items()
    }
    home_of = dict(zip(leaves.tensors, homes, strict=True))
    rows = []
    for index, value in enumerate(leaves.values):
        if isinstance(value, torch.Tensor):
            home = home_of[index]
            rows.append(_tensor_row(value, home, blocks[home.block], spec_of.get(index, -1)))
        elif isinstance(value, np.ndarray):
            descr = dtype_node(value, value.dtype)
            rows.append(["a", plain[index], descr, list(value.shape), is_fortran(value)])
        else:
            rows.append(["b", plain[index]])
    text = json.dumps(rows, separators=(",", ":"))
    return (
        f'"format":{TABLE_FORMAT},"leaves":{text},'
        f'"specs":[{",".join(specs)}],"meshes":[{",".join(meshes)}]'
    )


def _tensor_row(value: torch.Tensor, home: Home, entry: int, spec: int) -> list[Node]:
    # A packed entry holds the values as they are seen, a stretch of memory what lies there.
    flags = CONJ * value.is_conj() + NEG * value.is_neg() if home.offset_bytes >= 0 else 0
    return [
        "t",
        entry,
        dtype_name(value.dtype),
        list(value.shape),
        list(value.stride()),
        home.offset_bytes,
        flags,
        value.device.type,
        spec,
    ]


def _number(rows: dict[str, int], row: Node) -> int:
    return rows.setdefault(json.dumps(row, separators=(",", ":")), len(rows))


def _spec_row(whole: DTensor, meshes: dict[str, int]) -> Node:
    mesh = _number(meshes, mesh_signature(whole.device_mesh))
    return [list(whole.shape), list(whole.stride()), placement_names(whole), mesh]


def placement_names(whole: DTensor) -> list[str]:
    """Placements as text, in mesh order."""
    return [repr(placement) for placement in whole.placements]


def mesh_signature(mesh: Any) -> Node:
    """What tells one device mesh from another: ranks, dimension names, device type."""
    names = mesh.mesh_dim_names
    return [mesh.mesh.tolist(), None if names is None else list(names), mesh.device_type]
