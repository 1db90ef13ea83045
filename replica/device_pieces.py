"""How copies from a device are cut: many small tensors in one piece, large ones in their own.

Pure: geometry in, pieces out (see ``device_copy.py`` for who carries them out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

STAGING_BYTES = 16 << 20
"""Device memory that a plan keeps for gathering, at most."""
DIRECT_BYTES = 1 << 20
"""A tensor of so many bytes that lies as it goes into the image is fetched without gathering."""
CARRIED = ("cpu", "cuda")
"""Kinds of devices whose memory is saved. What is on any other is refused by name: how its copies
are ordered is not known here."""

_EXACT = frozenset(
    {torch.float32, torch.float64, torch.complex128}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
"""dtypes that ``_foreach_copy_`` has a kernel for that keeps every bit. Half and bfloat16 pass
through float there, which changes NaNs; others are not known to it. They go as whole numbers."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

View = Callable[[torch.Tensor], torch.Tensor]
Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceCopy:
    """One tensor on a device, and the run of the buffer that its values go to, in C order."""

    device: torch.device
    start: int
    """Byte of the buffer."""
    nbytes: int
    leaf: int
    """Its place in the values given to ``issue``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """dtype and shape as seen through ``view``."""
    view: View | None = None
    as_it_lies: bool
    """Its memory holds the very bytes that go into the buffer."""
    resolve: bool = False
    """It is a conjugate or negative view: its values have to be made, its bytes are not they."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of a tensor is gathered into one piece, at byte ``start`` of it."""

    start: int
    nbytes: int
    leaf: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    view: View | None
    index: Index | None
    recast: torch.dtype | None
    resolve: bool
    dense: bool

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """The part of the tensor as it is copied: a view, or new memory where it has to be made."""
        seen = value if self.view is None else self.view(value)
        seen = seen if self.index is None else seen[self.index]
        seen = seen.resolve_conj().resolve_neg() if self.resolve else seen
        return seen if self.recast is None else seen.view(self.recast)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of the buffer that one copy from the device fills.

    With ``parts`` these are gathered first. Without, it is ``whole``, fetched as it lies.
    """

    start: int
    nbytes: int
    parts: tuple[Part, ...] = ()
    whole: Part | None = None


def plan_pieces(
    copies: Sequence[DeviceCopy],
    *,
    staging_bytes: int = STAGING_BYTES,
    direct_bytes: int = DIRECT_BYTES,
) -> list[Piece]:
    """Cut the copies of one device into pieces, in the order of the buffer.

    Neighbours in the buffer are gathered together. Each part begins at a multiple of its item size
    in its piece, as it has to in the buffer.
    """
    pieces: list[Piece] = []
    run: list[Part] = []
    for copy in sorted(copies, key=lambda one: one.start):
        if copy.as_it_lies and copy.nbytes >= direct_bytes:
            pieces += _piece(run)
            run = []
            pieces.append(Piece(start=copy.start, nbytes=copy.nbytes, whole=_part(copy)))
            continue
        for part in _parts(copy, staging_bytes):
            if run and not _joins(run, part, staging_bytes):
                pieces += _piece(run)
                run = []
            run.append(part)
    return pieces + _piece(run)


def _joins(run: list[Part], part: Part, staging_bytes: int) -> bool:
    """Whether a part may follow those before it in one piece."""
    begin = part.start - run[0].start
    neighbour = part.start == run[-1].start + run[-1].nbytes
    aligned = begin % part.dtype.itemsize == 0
    return neighbour and aligned and begin + part.nbytes <= staging_bytes


def _piece(run: list[Part]) -> list[Piece]:
    if not run:
        return []
    start, stop = run[0].start, run[-1].start + run[-1].nbytes
    return [Piece(start=start, nbytes=stop - start, parts=tuple(run))]


def _part(
    copy: DeviceCopy,
    index: Index | None = None,
    shape: tuple[int, ...] | None = None,
    begin: int = 0,
    nbytes: int | None = None,
) -> Part:
    recast = None if copy.dtype in _EXACT else _INTEGER[copy.dtype.itemsize]
    return Part(
        start=copy.start + begin,
        nbytes=copy.nbytes if nbytes is None else nbytes,
        leaf=copy.leaf,
        dtype=recast or copy.dtype,
        shape=copy.shape if shape is None else shape,
        view=copy.view,
        index=index,
        recast=recast,
        resolve=copy.resolve,
        dense=copy.as_it_lies,
    )


def _parts(copy: DeviceCopy, limit_bytes: int) -> Iterator[Part]:
    """The copy in parts of at most so many bytes; none for an empty one."""
    item_bytes = copy.dtype.itemsize
    if not copy.nbytes:
        return
    if copy.nbytes <= limit_bytes:
        yield _part(copy)
        return
    for index, shape, begin in split(copy.shape, item_bytes, limit_bytes):
        yield _part(copy, index, shape, begin, prod(shape) * item_bytes)


def split(
    shape: tuple[int, ...], item_bytes: int, limit_bytes: int
) -> Iterator[tuple[Index, tuple[int, ...], int]]:
    """Cut a tensor into blocks of at most ``limit_bytes``: (index, shape, first byte in C order).

    In that order the blocks' bytes are the tensor's, one after another. No dimension goes away.
    """
    dim = next((dim for dim, size in enumerate(shape) if size > 1), len(shape))
    if dim == len(shape) or prod(shape) * item_bytes <= limit_bytes:
        yield (slice(None),) * len(shape), shape, 0
        return
    row_bytes = prod(shape[dim + 1 :]) * item_bytes
    rows = max(1, limit_bytes // row_bytes)
    for first in range(0, shape[dim], rows):
        count = min(rows, shape[dim] - first)
        # Only a single row can still be too large.
        for index, inner, begin in split(shape[dim + 1 :], item_bytes, limit_bytes // count):
            block = (*(slice(None),) * dim, slice(first, first + count), *index)
            yield block, (*shape[:dim], count, *inner), first * row_bytes + begin


def on_host(value: torch.Tensor) -> bool:
    """Whether a tensor's memory is the processor's own."""
    return value.is_cpu


class Seen(Protocol):
    """A tensor's values as they are copied: ``view`` of leaf number ``leaf`` has that geometry."""

    @property
    def nbytes(self) -> int: ...
    @property
    def leaf(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> View | None: ...


def device_copy(value: torch.Tensor, start: int, seen: Seen) -> DeviceCopy:
    """The copy of a tensor that lies on a device to byte ``start`` of the buffer."""
    shown = value if seen.view is None else seen.view(value)
    resolve = shown.is_conj() or shown.is_neg()
    return DeviceCopy(
        device=value.device,
        start=start,
        nbytes=seen.nbytes,
        leaf=seen.leaf,
        dtype=seen.dtype,
        shape=seen.shape,
        view=seen.view,
        as_it_lies=shown.is_contiguous() and not resolve,
        resolve=resolve,
    )
