"""The one kind of buffer that this package reads and writes, and its checks.

Kernels get raw addresses and cannot check anything: a wrong length there is a corrupted process. So
everything is checked here, in Python, before each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from erasure.errors import CodeError

ByteArray = npt.NDArray[np.uint8]
"""uint8[n], contiguous; the caller owns the memory."""

_UINT8 = np.dtype(np.uint8)


class Block(NamedTuple):
    """A checked buffer and its address, which is asked for once: numpy takes a microsecond."""

    start: int
    """Address of the first byte."""

    size: int
    """Bytes."""

    array: ByteArray
    """uint8[size]; keeps the memory alive."""

    def part(self, start: int, stop: int) -> Block:
        """Return the bytes from `start` to `stop`, without a copy."""
        if start == 0 and stop == self.size:
            return self
        return Block(self.start + start, stop - start, self.array[start:stop])


def check_buffer(buffer: ByteArray, name: str, *, write: bool = False) -> None:
    """Raise CodeError, naming the buffer, unless it is a contiguous uint8[n] (and writable)."""
    if not isinstance(buffer, np.ndarray):
        raise CodeError(f"{name}: expected a numpy array of uint8, got {type(buffer).__name__}")
    if buffer.dtype != _UINT8 or buffer.ndim != 1:
        raise CodeError(f"{name}: expected uint8[n], got {buffer.dtype} of shape {buffer.shape}")
    if not buffer.flags.c_contiguous:
        raise CodeError(f"{name}: expected contiguous bytes, got a stride of {buffer.strides[0]}")
    if write and not buffer.flags.writeable:
        raise CodeError(f"{name}: it is to be written, but it is read-only")


def blocks_of(
    indices: Sequence[int], buffers: Sequence[ByteArray], *, write: bool = False
) -> list[Block]:
    """Return the buffers of these fragments as blocks. Raises CodeError like `check_buffer`."""
    what = "wanted fragment" if write else "fragment"
    for index, buffer in zip(indices, buffers, strict=True):
        check_buffer(buffer, f"{what} {index}", write=write)
    return [Block(buffer.ctypes.data, buffer.size, buffer) for buffer in buffers]


def check_no_overlap(sources: Sequence[Block], outputs: Sequence[Block]) -> None:
    """Raise CodeError if memory that is written is also read, or written twice.

    Sources may overlap each other. One sweep over the blocks in the order of their addresses.
    """
    ranges = [(block.start, block.size, False) for block in sources if block.size]
    ranges += [(block.start, block.size, True) for block in outputs if block.size]
    read_until = written_until = 0
    for start, size, is_output in sorted(ranges):
        if start < written_until or (is_output and start < read_until):
            raise CodeError(
                "an output overlaps a source or another output: give it memory of its own"
            )
        if is_output:
            written_until = start + size
        else:
            read_until = max(read_until, start + size)
