"""The leaves of one walk: tensors, arrays and long byte strings, and where tensors share memory.

A `LeafList` only notes references and geometry: it copies nothing. `find_homes` decides which
bytes become one entry of the image: a tensor alone is stored packed (its elements in C order),
views of one memory that overlap are stored as that stretch of memory, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replica.numpy_types import dtype_refusal
from replica.tensor_kinds import ELEMENTS_LIMIT, MAX_TENSORS, REORDERED, TOO_MANY, refusal
from replica.torch_private import DTensor, local_and_spec, shard_order
from replica.unsupported import Unsupported, type_text

_EXACT_OVERLAP_ELEMENTS = 1 << 24

Leaf = torch.Tensor | np.ndarray[Any, Any] | bytes | bytearray


class LeafList:
    """Collects the leaves of one walk, in order."""

    def __init__(self) -> None:
        self.values: list[Leaf] = []
        """The local tensor of a DTensor, everything else as it is."""
        self.keys: dict[int, tuple[object, ...]] = {}
        """What must stay equal for a plan to stay valid, per leaf that is no tensor."""
        self.wholes: dict[int, DTensor] = {}
        """The DTensors, by the number of their leaf."""
        self.tensors: list[int] = []
        """Numbers of the leaves that are tensors."""

    def tensor(self, value: torch.Tensor) -> int:
        """Take a tensor of any dense layout, or a DTensor; `Unsupported` for any other kind."""
        index = len(self.values)
        local = value
        if isinstance(value, DTensor):
            local, _ = local_and_spec(value)
            if shard_order(value) is not None:
                raise Unsupported(value, REORDERED)
            self.wholes[index] = value
        why = refusal(local)
        if why is not None:
            whose = "" if local is value else f"whose local shard is a {type_text(local)}, "
            raise Unsupported(value, whose + why)
        if len(self.tensors) >= MAX_TENSORS:
            raise Unsupported(value, f"the {MAX_TENSORS + 1:,}th of this state: {TOO_MANY}")
        self.values.append(local)
        self.tensors.append(index)
        return index

    def array(self, value: np.ndarray[Any, Any]) -> int:
        """Take a numpy array without Python objects in it."""
        why = dtype_refusal(value.dtype)
        if why is None and max(value.shape, default=0) >= ELEMENTS_LIMIT:
            why = "with a size beyond what an image describes"
        if why is not None:
            raise Unsupported(value, why)
        self.keys[len(self.values)] = (value.dtype, value.shape, is_fortran(value))
        self.values.append(value)
        return len(self.values) - 1

    def raw(self, value: bytes | bytearray) -> int:
        """Take bytes."""
        self.keys[len(self.values)] = (len(value),)
        self.values.append(value)
        return len(self.values) - 1

    def tensor_values(self) -> list[torch.Tensor]:
        """The tensors alone, in order."""
        return [self.values[index] for index in self.tensors]  # type: ignore[misc]


def geometry(local: torch.Tensor) -> tuple[object, ...]:
    """Everything about a tensor but its address and its values."""
    return (
        local.dtype,
        local.shape,
        local.stride(),
        local.device,
        local.is_conj(),
        local.is_neg(),
    )


def is_fortran(value: np.ndarray[Any, Any]) -> bool:
    """Whether an array is stored column first (and not also row first)."""
    return value.flags.f_contiguous and not value.flags.c_contiguous


def unexpanded(value: torch.Tensor) -> torch.Tensor:
    """The view without repetition: dimensions of stride 0 narrowed to one element."""
    if 0 not in value.stride():
        return value
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def overlaps_itself(value: torch.Tensor) -> bool:
    """Whether two elements lie at one place, those aside that a dimension of stride 0 repeats."""
    bare = unexpanded(value)
    reach = 1
    for stride, size in sorted(zip(bare.stride(), bare.shape, strict=True)):
        if size > 1 and stride < reach:
            break
        reach += max(size - 1, 0) * stride
    else:
        return False
    # Dimensions that interleave, as in sliding windows. Where it is long to tell: they do.
    many = bare.numel() > _EXACT_OVERLAP_ELEMENTS
    return many or bool(np.unique(_places(bare)).size < bare.numel())


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a view, both counted; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """uint8[span bytes]: the stretch of memory that a view spreads over, physical bytes."""
    nbytes = span(value.shape, value.stride()) * value.itemsize
    start = value.storage_offset() * value.itemsize
    empty = torch.empty(0, dtype=torch.uint8, device=value.device)
    return empty.set_(value.untyped_storage(), start, (nbytes,), (1,))


@dataclass(frozen=True)
class Home:
    """Where one tensor's values lie: in which block, and at which byte of it (-1: packed)."""

    block: int
    offset_bytes: int


@dataclass(frozen=True)
class Block:
    """One entry to be: a packed tensor (`region_bytes` -1) or a stretch of memory."""

    members: tuple[int, ...]
    """Positions (in the list given to `find_homes`) whose bytes make it up."""
    offsets: tuple[int, ...]
    """Byte of the block where each member's memory begins."""
    region_bytes: int


@dataclass(frozen=True)
class _Group:
    """Views that are the same in everything: one address, one geometry."""

    start: int
    stop: int
    packed_bytes: int
    members: tuple[int, ...]
    overlaps_itself: bool


@dataclass(frozen=True)
class Homes:
    """The answer of `find_homes`; comparable, so that a plan sees when sharing changed."""

    blocks: tuple[Block, ...]
    homes: tuple[Home, ...]


def find_homes(tensors: Sequence[torch.Tensor]) -> Homes:
    """Decide for each tensor the block that holds it.

    Views that overlap share a block. A stretch of memory is stored only where that costs no more
    than its views, or where the views really have elements in common.
    """
    parts = [part for cluster in _clusters(_groups(tensors)) for part in _parts(cluster, tensors)]
    # Addresses differ from run to run and, for temporaries, from save to save: order by the walk.
    parts.sort(key=lambda part: min(group.members[0] for group in part))
    homes: dict[int, Home] = {}
    blocks = [_block(part) for part in parts]
    for number, (part, block) in enumerate(zip(parts, blocks, strict=True)):
        for group in part:
            offset = -1 if block.region_bytes < 0 else group.start - part[0].start
            homes.update((member, Home(number, offset)) for member in group.members)
    return Homes(tuple(blocks), tuple(homes[index] for index in range(len(tensors))))


def misaligned(tensors: Sequence[torch.Tensor], homes: Homes) -> tuple[int, int] | None:
    """Two tensors in one stretch of memory of which one lies across elements of the other.

    No storage has views at both places, so that no restore could give them back. Sizes of elements
    are powers of two: those that fit the largest one of a stretch fit one another.
    """
    widest: dict[int, int] = {}
    for index, home in enumerate(homes.homes):
        known = widest.setdefault(home.block, index)
        if tensors[known].itemsize < tensors[index].itemsize:
            widest[home.block] = index
    for index, home in enumerate(homes.homes):
        first = widest[home.block]
        if (home.offset_bytes - homes.homes[first].offset_bytes) % tensors[index].itemsize:
            return min(first, index), max(first, index)
    return None


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[_Group]]:
    """Groups of equal views, a list per device, by rising address."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, value in enumerate(tensors):
        address = value.data_ptr() if value.numel() else -1 - index
        found.setdefault((value.device, address, *geometry(value)), []).append(index)
    devices: dict[object, list[_Group]] = {}
    for key, members in found.items():
        devices.setdefault(key[0], []).append(_group(tensors[members[0]], tuple(members)))
    return [sorted(groups, key=lambda group: group.start) for groups in devices.values()]


def _group(value: torch.Tensor, members: tuple[int, ...]) -> _Group:
    bare = unexpanded(value)
    reach = span(bare.shape, bare.stride())
    start = value.data_ptr() if reach else -1 - members[0]
    stop = start + reach * value.itemsize
    return _Group(start, stop, bare.numel() * value.itemsize, members, reach < bare.numel())


def _clusters(devices: list[list[_Group]]) -> Iterator[list[_Group]]:
    """Runs of groups whose stretches of memory overlap."""
    for groups in devices:
        cluster: list[_Group] = []
        stop = 0
        for group in groups:
            if cluster and group.start >= stop:
                yield cluster
                cluster = []
            stop = max(stop, group.stop) if cluster else group.stop
            cluster.append(group)
        if cluster:
            yield cluster


def _parts(cluster: list[_Group], tensors: Sequence[torch.Tensor]) -> list[list[_Group]]:
    """Split a cluster whose stretch is larger than its views by common elements."""
    reach = max(group.stop for group in cluster) - cluster[0].start
    cost = sum(group.packed_bytes for group in cluster)
    elements = cost // min(tensors[group.members[0]].itemsize for group in cluster)
    if len(cluster) == 1 or reach <= cost or elements > _EXACT_OVERLAP_ELEMENTS:
        return [cluster]
    parts: list[tuple[list[_Group], np.ndarray[Any, Any]]] = []
    for group in cluster:
        joined, touched = [group], _touched(tensors[group.members[0]])
        for part in list(parts):
            if np.intersect1d(part[1], touched).size:
                parts.remove(part)
                joined, touched = part[0] + joined, np.union1d(part[1], touched)
        parts.append((joined, touched))
    return [sorted(groups, key=lambda group: group.start) for groups, _ in parts]


def _touched(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Addresses of all bytes of a view, sorted."""
    first = value.data_ptr() + _places(unexpanded(value)).reshape(-1, 1) * value.itemsize
    return np.unique(first + np.arange(value.itemsize))


def _places(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """int64 of the view's shape: elements from its first one to each of them."""
    places = np.zeros((1,) * value.dim(), np.int64)
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        shape = [1] * value.dim()
        shape[dim] = size
        places = places + (np.arange(size, dtype=np.int64) * stride).reshape(shape)
    return places


def _block(part: list[_Group]) -> Block:
    members = tuple(group.members[0] for group in part)
    if len(part) == 1 and not part[0].overlaps_itself:
        return Block(members, (0,), -1)
    start = part[0].start
    stop = max(group.stop for group in part)
    return Block(members, tuple(group.start - start for group in part), stop - start)
