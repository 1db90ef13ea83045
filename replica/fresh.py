"""Leaves of an image as new tensors, arrays and bytes: never a view of the image's buffer.

Every row of the table is checked against the entry it names before memory is taken, so no row can
make a tensor larger than a small multiple of the bytes that are there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replica.dtypes import DTYPES, carrier
from replica.errors import StateError
from replica.image import MAX_DIMS, MAX_NODES, MAX_TREE_BYTES, Image, ImageError
from replica.jsontext import JsonError, parse_bounded
from replica.leaves import span
from replica.numpy_types import dtype_from
from replica.tables import CONJ, NEG, TABLE_FORMAT
from replica.tensor_kinds import ELEMENTS_LIMIT, QUANTIZED, SIZE_LIMIT
from replica.torch_private import neg_view
from replica.tree import Node
from replica.tree_reader import NO_VALUE, Decoder, NoLeaves

_MAX_STRETCH = 4
"""A view spread over more than this many times its elements comes back without its gaps.

Its dimensions keep their order in memory. Every other view keeps its strides exactly.
"""
_ALIGN_BYTES = 16
_DEVICE = re.compile("(?!meta$)[a-z]{2,16}")
# Their scales would be lost, so no image of ours has them.
_READABLE = {name: dtype for name, dtype in DTYPES.items() if dtype not in QUANTIZED}


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One tensor of the image, checked on construction."""

    entry: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int
    """Where it begins in a shared stretch of memory, -1 for a packed entry."""
    flags: int
    device: str
    """Device type: `cpu`, `cuda`."""
    spec: SpecFacts | None
    """What makes it a DTensor; shape and strides above are then those of the local shard."""

    def __post_init__(self) -> None:
        sizes = (*self.shape, *self.strides)
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMS:
            raise ImageError("shard image: a tensor whose shape and strides do not fit")
        if any(type(size) is not int or not 0 <= size < SIZE_LIMIT for size in sizes):
            raise ImageError("shard image: a tensor with a size or stride out of range")
        if math.prod(self.shape) >= ELEMENTS_LIMIT:
            raise ImageError("shard image: a tensor with too many elements")
        if type(self.offset_bytes) is not int or not -1 <= self.offset_bytes < 1 << 60:
            raise ImageError("shard image: a tensor with an offset out of range")
        if type(self.flags) is not int or not 0 <= self.flags < 4:
            raise ImageError("shard image: a tensor with unknown flags")
        if self.flags & CONJ and not self.dtype.is_complex:
            raise ImageError("shard image: a conjugate view of a tensor that is not complex")
        if type(self.device) is not str or not _DEVICE.fullmatch(self.device):
            raise ImageError("shard image: a tensor without a device type")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape without repetition, which a packed entry holds."""
        sizes = zip(self.shape, self.strides, strict=True)
        return tuple(min(size, 1) if stride == 0 else size for size, stride in sizes)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Global shape of a DTensor, else the shape."""
        return self.shape if self.spec is None else self.spec.shape


@dataclass(frozen=True, kw_only=True)
class SpecFacts:
    """What a DTensor was: global geometry, placements as text, signature of its mesh."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: Node

    def __post_init__(self) -> None:
        sizes = (*self.shape, *self.strides)
        if any(type(size) is not int or not 0 <= size < 1 << 60 for size in sizes):
            raise ImageError("shard image: a DTensor with a size out of range")
        if any(type(text) is not str for text in self.placements):
            raise ImageError("shard image: a DTensor with placements that are no text")


@dataclass(frozen=True, kw_only=True)
class ArrayFacts:
    """One numpy array of the image."""

    entry: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool


Facts = TensorFacts | ArrayFacts | int
"""An int is the entry of a byte string."""


class LeafReader:
    """The leaves of one image.

    Tensors that shared memory when they were saved share it again among those given out here.
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._blocks: dict[tuple[int, str], torch.Tensor] = {}
        self._taken: set[int] = set()
        tree = _tree_of(image)
        self.root: Node = tree["root"]
        specs = _specs(tree)
        rows = tree["leaves"]
        if type(rows) is not list:
            raise ImageError("shard image: the table of leaves is no list")
        self._facts = [self._read(row, specs) for row in rows]
        self._members = _members(self._facts)

    def take(self, index: object) -> Facts:
        """What a leaf is. Each leaf stands at one place of a tree, so each is taken once."""
        if type(index) is not int or not 0 <= index < len(self._facts):
            raise ImageError(f"shard image: leaf {index!r} is not in the table")
        if index in self._taken:
            raise ImageError(f"shard image: leaf {index} stands at two places of the tree")
        self._taken.add(index)
        return self._facts[index]

    def plain(self, facts: ArrayFacts | int) -> np.ndarray[Any, Any] | bytes:
        """An array or a byte string in new memory."""
        if isinstance(facts, ArrayFacts):
            return self._array(facts)
        return self._image.entry_bytes(facts).tobytes()

    def local(self, facts: TensorFacts, device: str) -> torch.Tensor:
        """A tensor of these facts (a DTensor's local shard) in new memory on a device type."""
        key = (facts.entry, device)
        block = self._blocks.get(key)
        if facts.offset_bytes < 0:
            if block is None:
                block = self._blocks[key] = _on_device(self._packed(facts), device)
            return block.expand(facts.shape)
        if block is None:
            block = self._blocks[key] = _on_device(self._region(facts.entry), device)
        start = (self._lead(facts.entry) + facts.offset_bytes) // facts.dtype.itemsize
        view = block.view(facts.dtype).as_strided(facts.shape, facts.strides, start)
        view = view.conj() if facts.flags & CONJ else view
        return neg_view(view) if facts.flags & NEG else view

    def _read(self, row: Node, specs: list[SpecFacts]) -> Facts:
        if type(row) is not list or len(row) < 2:
            raise ImageError("shard image: a leaf that is no row")
        kind, entry = row[:2]
        if type(entry) is not int or not 0 <= entry < len(self._image.entries):
            raise ImageError(f"shard image: a leaf in entry {entry!r}, which is not there")
        if kind == "b" and len(row) == 2:
            return entry
        if kind == "a" and len(row) == 5:
            return self._read_array(row)
        if kind == "t" and len(row) == 9:
            return self._read_tensor(row, specs)
        raise ImageError(f"shard image: a leaf of kind {kind!r} with {len(row)} parts")

    def _read_tensor(self, row: Node, specs: list[SpecFacts]) -> TensorFacts:
        _, entry, dtype, shape, strides, offset, flags, device, spec = row
        if type(dtype) is not str or dtype not in _READABLE:
            raise ImageError(f"shard image: dtype {dtype!r} is not one of this torch's")
        if type(shape) is not list or type(strides) is not list:
            raise ImageError("shard image: a tensor without shape and strides")
        if type(spec) is not int or not -1 <= spec < len(specs):
            raise ImageError(f"shard image: a tensor of DTensor spec {spec!r}")
        facts = TensorFacts(
            entry=entry,
            dtype=_READABLE[dtype],
            shape=tuple(shape),
            strides=tuple(strides),
            offset_bytes=offset,
            flags=flags,
            device=device,
            spec=None if spec < 0 else specs[spec],
        )
        self._check_fit(facts)
        return facts

    def _check_fit(self, facts: TensorFacts) -> None:
        here, size = self._image.entries[facts.entry].nbytes, facts.dtype.itemsize
        if facts.offset_bytes < 0:
            fits = math.prod(facts.stored_shape) * size == here
        else:
            reach = span(facts.shape, facts.strides) * size
            fits = facts.offset_bytes + reach <= here
        if not fits:
            raise ImageError(
                f"shard image: a tensor of {facts.dtype}{list(facts.shape)} does not fit entry "
                f"{self._image.entries[facts.entry].name!r} of {here} bytes"
            )

    def _read_array(self, row: Node) -> ArrayFacts:
        _, entry, descr, shape, fortran = row
        try:
            dtype = dtype_from(Decoder(NoLeaves()).decode(descr))
        except StateError:
            raise
        except NO_VALUE as fault:
            raise ImageError(f"shard image: a damaged numpy dtype: {fault}") from fault
        if type(shape) is not list or len(shape) > MAX_DIMS or type(fortran) is not bool:
            raise ImageError("shard image: an array without a shape or an order")
        if any(type(size) is not int or not 0 <= size < 1 << 60 for size in shape):
            raise ImageError("shard image: an array with a size out of range")
        if math.prod(shape) * dtype.itemsize != self._image.entries[entry].nbytes:
            raise ImageError(f"shard image: an array {dtype}{shape} that does not fit its entry")
        return ArrayFacts(entry=entry, dtype=dtype, shape=tuple(shape), fortran=fortran)

    def _array(self, facts: ArrayFacts) -> np.ndarray[Any, Any]:
        shape = facts.shape[::-1] if facts.fortran else facts.shape
        made = self._image.entry_bytes(facts.entry).copy()
        if made.nbytes:
            found = made.view(facts.dtype).reshape(shape)
        else:
            found = np.zeros(shape, facts.dtype)
        return found.T if facts.fortran else found

    def _packed(self, facts: TensorFacts) -> torch.Tensor:
        """The tensor without repetition, with its own strides where they are not too wide."""
        shape = facts.stored_shape
        flat = _empty(math.prod(shape), facts.dtype)
        _fill(flat, self._image, facts.entry)
        strides = _own_strides(facts)
        made = flat.view(shape)
        if tuple(made.stride()) == strides:
            return made
        integers = carrier(facts.dtype)
        spread = _empty(span(shape, strides), facts.dtype).as_strided(shape, strides)
        spread.view(integers).copy_(made.view(integers))
        return spread

    def _region(self, entry: int) -> torch.Tensor:
        lead, nbytes = self._lead(entry), self._image.entries[entry].nbytes
        whole = -(-(lead + nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        made = torch.zeros(whole, dtype=torch.uint8, device="cpu")
        _fill(made[lead : lead + nbytes], self._image, entry)
        return made

    def _lead(self, entry: int) -> int:
        """Bytes before a stretch of memory that put all its tensors on whole elements."""
        members = self._members[entry]
        for lead in range(_ALIGN_BYTES):
            if all((lead + part.offset_bytes) % part.dtype.itemsize == 0 for part in members):
                return lead
        raise ImageError("shard image: tensors that share memory lie on parts of elements")


def _members(rows: list[Facts]) -> dict[int, list[TensorFacts]]:
    """Tensors by entry, after a check that the bytes of one entry make one block.

    Without it a small image could ask for its largest entry over and over in other forms.
    """
    found: dict[int, list[TensorFacts]] = {}
    alone: set[int] = set()
    for facts in rows:
        entry = facts if isinstance(facts, int) else facts.entry
        if entry in alone or (not isinstance(facts, TensorFacts) and entry in found):
            raise ImageError(f"shard image: entry {entry} holds two leaves that share nothing")
        if not isinstance(facts, TensorFacts):
            alone.add(entry)
            continue
        members = found.setdefault(entry, [])
        if members and _form(members[0]) != _form(facts):
            raise ImageError(f"shard image: entry {entry} holds tensors of two forms")
        members.append(facts)
    return found


def _form(facts: TensorFacts) -> object:
    packed = facts.offset_bytes < 0
    return (facts.dtype, facts.shape, facts.strides) if packed else None


def _fill(target: torch.Tensor, image: Image, entry: int) -> None:
    if target.numel():
        np.copyto(target.view(torch.uint8).numpy(), image.entry_bytes(entry))


def _empty(elements: int, dtype: torch.dtype) -> torch.Tensor:
    # Through bytes: torch warns when it is asked for some dtypes by name.
    return torch.empty(elements * dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)


def _on_device(value: torch.Tensor, device: str) -> torch.Tensor:
    if device == "cpu":
        return value
    try:
        return value.to(device)
    except (RuntimeError, AssertionError) as fault:
        raise StateError(
            f"saved from device {device!r}, which this process lacks: {fault}"
        ) from fault


def _own_strides(facts: TensorFacts) -> tuple[int, ...]:
    """Strides of the saved tensor, gaps closed where they would take too much memory."""
    shape = facts.stored_shape
    if 0 in shape:
        return facts.strides
    if span(shape, facts.strides) <= _MAX_STRETCH * math.prod(shape):
        return facts.strides
    strides, step = list(facts.strides), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (facts.strides[dim], shape[dim])):
        strides[dim] = step if facts.strides[dim] else 0
        step *= shape[dim]
    return tuple(strides)


def _tree_of(image: Image) -> dict[str, Node]:
    try:
        tree = parse_bounded(image.tree_bytes(), MAX_TREE_BYTES, MAX_NODES)
    except JsonError as fault:
        raise ImageError(f"shard image: tree {fault}") from fault
    if type(tree) is not dict or set(tree) != {"format", "leaves", "specs", "meshes", "root"}:
        raise ImageError("shard image: the tree has other members than expected")
    if tree["format"] != TABLE_FORMAT:
        raise ImageError(
            f"shard image: tree format {tree['format']!r}; this version reads {TABLE_FORMAT}"
        )
    return tree


def _specs(tree: dict[str, Node]) -> list[SpecFacts]:
    rows, meshes = tree["specs"], tree["meshes"]
    if type(rows) is not list or type(meshes) is not list:
        raise ImageError("shard image: DTensor specs or meshes are no list")
    found = []
    for row in rows:
        if (
            type(row) is not list
            or len(row) != 4
            or any(type(part) is not list for part in row[:3])
        ):
            raise ImageError("shard image: a DTensor spec of another form")
        shape, strides, placements, mesh = row
        if type(mesh) is not int or not 0 <= mesh < len(meshes):
            raise ImageError(f"shard image: a DTensor on mesh {mesh!r}, which is not there")
        found.append(
            SpecFacts(
                shape=tuple(shape),
                strides=tuple(strides),
                placements=tuple(placements),
                mesh=meshes[mesh],
            )
        )
    return found
