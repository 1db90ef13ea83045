"""The plan of a shard: which leaf is copied to which bytes of the image.

Made once and kept while the state keeps its geometry and its sharing of memory. A save then only
compares, copies tensor bytes into views that were made before, and writes the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from erasure.digest import digest
from replica.bound import Bound
from replica.copy_loop import Words
from replica.device_copy import DeviceCopies
from replica.device_pieces import device_copy, on_host
from replica.dtypes import carrier, code_of
from replica.facts import Facts, pointers_of
from replica.gather import SMALL_BYTES, Gathers, Small
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
    Leaf,
    LeafList,
    find_homes,
    is_fortran,
    memory_of,
    misaligned,
    unexpanded,
)
from replica.memcopy import PIECE_BYTES, Piece, copy_pieces
from replica.spread import Spread
from replica.tables import tables_text

_NAME_CHARS = 200
_TREE_SLACK_BYTES = 1 << 12
_PAGE_BYTES = 4096

View = Callable[[torch.Tensor], torch.Tensor]
_Run = tuple[int, int, int, int]
"""Offset in the buffer, position among the tensors, byte of the tensor, bytes."""
_Runs = npt.NDArray[np.int64]
"""int64[4, n]: the columns of so many."""


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
    small: bool = False
    """Direct, and gathered with its neighbours."""


@dataclass(frozen=True)
class _Item:
    """An entry before its place is known, with the copies that fill it."""

    entry: Entry
    align_bytes: int
    copies: tuple[_Copy, ...]
    leaf: int
    device: str = ""
    """Where its bytes lie, "" for host memory."""

    @property
    def order(self) -> tuple[int, str, bool]:
        """Place in the image, but for the order of the walk."""
        return -self.align_bytes, self.device, self.entry.nbytes < SMALL_BYTES


@dataclass(frozen=True)
class LateCopies:
    """Copies that `CopyPlan.copy` left to its caller, as `memcopy.copy_pieces` takes them."""

    pieces: list[Piece]
    """(address to, address from, bytes), at most `PIECE_BYTES` each."""
    leaves: list[int]
    """The leaf that each piece belongs to."""
    keep: object
    """Holds both memories: as long as this lives, the addresses are valid."""

    @property
    def nbytes(self) -> int:
        """Bytes still to be copied."""
        return sum(nbytes for _, _, nbytes in self.pieces)


class CopyPlan:
    """Layout and copies for one state. Holds no reference to the state's tensors.

    It does hold views of the last buffers it was used with; `forget_buffers` lets them go.
    """

    def __init__(self, leaves: LeafList, names: Iterable[tuple[int, str]]) -> None:
        tensors = leaves.tensor_values()
        self._names = list(names)
        self._facts = Facts(leaves)
        self._pointers = pointers_of(tensors)
        self._homes = find_homes(tensors)
        pair = misaligned(tensors, self._homes)
        self.misaligned = None if pair is None else [leaves.tensors[member] for member in pair]
        """Leaves, two of them, that no restore could give back."""
        self._spread = Spread(tensors, self._homes)
        items = list(_items(leaves, self._homes.blocks, _unique(self._names, len(leaves.values))))
        # Sizes are multiples of their alignment, so falling alignment keeps every entry aligned.
        # Neighbours on one device are fetched together, small ones gathered.
        order = sorted(range(len(items)), key=lambda at: items[at].order)
        self.layout = Layout([items[index].entry for index in order])
        place = {item: number for number, item in enumerate(order)}
        copies = [(place[index], copy) for index, item in enumerate(items) for copy in item.copies]
        ours = [(entry, copy) for entry, copy in copies if on_host(_tensor(leaves, copy.leaf))]
        self._views = [(entry, copy) for entry, copy in ours if not copy.direct]
        self._device = DeviceCopies(
            [
                device_copy(source, self.layout.starts[entry] + copy.begin, copy)
                for entry, copy in copies
                if not on_host(source := _tensor(leaves, copy.leaf))
            ]
        )
        position = {leaf: number for number, leaf in enumerate(leaves.tensors)}
        self._gathers = Gathers(
            [
                Small(self.layout.starts[entry] + copy.begin, copy.nbytes, position[copy.leaf])
                for entry, copy in sorted(copies, key=itemgetter(0))
                if copy.small
            ]
        )
        runs = list(_runs(self.layout, position, copies))
        self._runs: _Runs = np.array(runs, np.int64).reshape(-1, 4).T.copy()
        self._plain = [
            (place[index], item.leaf) for index, item in enumerate(items) if not item.copies
        ]
        blocks = [place[index] for index in range(len(self._homes.blocks))]
        self.tables = tables_text(leaves, self._homes.homes, blocks, dict(_swap(self._plain)))
        self.fingerprint = digest(self.tables.encode()).hex()
        self._bound: Bound[list[tuple[torch.Tensor, int, View | None]]] = Bound()

    @property
    def plain(self) -> list[tuple[int, int]]:
        """(entry, leaf) of every leaf that is no tensor."""
        return self._plain

    def has_names(self, names: Iterable[tuple[int, str]]) -> bool:
        """Whether these are the names that it was made with: plain readers go by them."""
        return list(names) == self._names

    def matches(self, leaves: LeafList) -> bool:
        """Whether this plan still describes the state whose leaves these are, but for names."""
        pointers = self._facts.hold(leaves)
        if pointers is None:
            return False
        if pointers == self._pointers:
            return True
        holds = self._spread.holds(self._pointers, pointers)
        if holds is None:
            holds = find_homes(leaves.tensor_values()) == self._homes
        if holds:
            self._pointers = pointers
        return holds

    def capacity_bytes(self, tree: bytes) -> int:
        """Bytes of a buffer that leaves room for the Python values to grow."""
        needed = self.layout.tree_start + len(tree) + len(tree) // 8 + _TREE_SLACK_BYTES
        return -(-needed // _PAGE_BYTES) * _PAGE_BYTES

    def copy(
        self, leaves: LeafList, buffer: Bytes, *, late: frozenset[int] = frozenset()
    ) -> LateCopies:
        """Copy every leaf into its entry of `buffer`, but for those that can come late.

        `leaves` are those that this plan was made from or that `matches` saw last. When it
        returns, all bytes are there except the returned copies, which the caller makes. A leaf
        of `late` is left out only where it is large, is copied as it lies, and all that share its
        entry are in `late` too.
        """
        values: list[Any] = leaves.values
        base = buffer.__array_interface__["data"][0]
        addresses = np.array(self._pointers, np.uint64)
        now, after, owners, kept = self._runs, [], [], []
        if late:
            tensors = leaves.tensors
            tardy = self._wholly_late(leaves, late)
            left = np.array([tensors[at] in tardy for at in self._runs[1]], np.bool_)
            now, rest = self._runs[:, ~left], self._runs[:, left]
            after = list(map(tuple, _pieces(rest, addresses, base).tolist()))
            owners = [tensors[at] for at in rest[1]]
            # The storages too: a tensor may be given another one before the caller copies.
            kept = [values[leaf].untyped_storage() for leaf in tardy]
        # What lies on a device comes by itself while the processor copies the rest.
        fetched = self._device.issue(values, buffer)
        try:
            copy_pieces(_pieces(now, addresses, base), (leaves, buffer))
            self._gathers.copy(addresses, buffer, (leaves, buffer))
            # What is made in inference mode could never be written to outside of it.
            with torch.inference_mode(mode=False), torch.no_grad():
                for target, leaf, view in self._bound.get(buffer, partial(self._bind, buffer)):
                    source = values[leaf]
                    target.copy_(source if view is None else view(source))
        finally:
            fetched.wait()
        for entry, leaf in self._plain:
            start = self.layout.starts[entry]
            _copy_plain(buffer[start : start + self.layout.entries[entry].nbytes], values[leaf])
        return LateCopies(after, owners, (buffer, kept))

    def _wholly_late(self, leaves: LeafList, late: frozenset[int]) -> set[int]:
        """The late leaves whose entry holds no leaf that is wanted at once."""
        leaf_of, homes = leaves.tensors, self._homes.homes
        wanted = {homes[at].block for at, leaf in enumerate(leaf_of) if leaf not in late}
        return {leaf for at, leaf in enumerate(leaf_of) if homes[at].block not in wanted}

    def forget_buffers(self) -> None:
        """Drop the views of buffers, so that their mappings can go."""
        self._device.forget_buffers()
        self._bound.clear()

    def _bind(self, buffer: Bytes) -> list[tuple[torch.Tensor, int, View | None]]:
        whole = torch.from_numpy(buffer)
        return [self._target(whole, entry, copy) for entry, copy in self._views]

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


def _runs(
    layout: Layout, position: Mapping[int, int], copies: Iterable[tuple[int, _Copy]]
) -> Iterator[_Run]:
    """Direct copies in pieces."""
    for entry, copy in copies:
        start = layout.starts[entry] + copy.begin
        whole = copy.direct and not copy.small
        for begin in range(0, copy.nbytes if whole else 0, PIECE_BYTES):
            size = min(PIECE_BYTES, copy.nbytes - begin)
            yield start + begin, position[copy.leaf], begin, size


def _pieces(runs: _Runs, addresses: Words, base: int) -> Words:
    """The copies, by address: uint64[n, 3]."""
    starts, _, begins, sizes = runs.astype(np.uint64)
    return np.stack((starts + np.uint64(base), addresses[runs[1]] + begins, sizes), axis=1)


def _tensor_item(values: list[Leaf], block: Block, members: list[int], name: str) -> _Item:
    sources: list[torch.Tensor] = [values[member] for member in members]  # type: ignore[misc]
    if block.region_bytes < 0:
        return _packed_item(sources[0], members[0], name)
    copies = []
    for leaf, source, offset in zip(members, sources, block.offsets, strict=True):
        nbytes = memory_of(source).numel()
        here = on_host(source)
        copies.append(_Copy(offset, nbytes, leaf, torch.uint8, (nbytes,), memory_of, here))
    entry = raw_entry(name, block.region_bytes)
    return _Item(entry, 1, tuple(copies), members[0], _device_name(sources[0]))


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
    direct = on_host(source) and as_it_lies
    small = direct and 0 < nbytes < SMALL_BYTES
    copy = _Copy(0, nbytes, leaf, dtype, shape, view, direct, small)
    return _Item(entry, source.itemsize, (copy,), leaf, _device_name(source))


def _device_name(source: torch.Tensor) -> str:
    return "" if on_host(source) else str(source.device)


def _tensor(leaves: LeafList, leaf: int) -> torch.Tensor:
    return leaves.values[leaf]  # type: ignore[return-value]


def _view(*, expanded: bool, recast: bool) -> View | None:
    if recast:
        return lambda value: unexpanded(value).view(carrier(value.dtype))
    return unexpanded if expanded else None


def _copy_plain(target: Bytes, value: np.ndarray[Any, Any] | bytes | bytearray) -> None:
    if isinstance(value, bytes | bytearray):
        target[:] = np.frombuffer(value, np.uint8)
    elif value.nbytes:
        source = value.T if is_fortran(value) else value
        # As bytes: field by field numpy would leave out the gaps between them.
        whole = np.dtype((np.void, source.itemsize))
        np.copyto(target.view(whole).reshape(source.shape), source.view(whole))


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
