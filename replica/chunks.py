"""The chunks of a slot's payload beside the digests that its record has of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from erasure.digest import DIGEST_BYTES, digest
from recovery.manifest import WHOLE, SlotRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def digested_chunks(record: SlotRecord) -> Iterator[tuple[int, int, bytes]]:
    """(start, stop, digest) of every chunk of a slot's payload, in the order of its digests.

    A whole shard has the chunks of its data fragments, one fragment after another.
    """
    spans = [(0, record.length)]
    if record.fragment == WHOLE:
        spans = [record.code.span(index, record.shard_bytes) for index in range(record.k)]
    place = 0
    for begin, end in spans:
        for start in range(begin, end, record.chunk_bytes):
            expected = record.chunk_digests[place : place + DIGEST_BYTES]
            yield start, min(start + record.chunk_bytes, end), expected
            place += DIGEST_BYTES


def damaged_chunks(record: SlotRecord, data: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    """Return the numbers of the record's chunks that differ in ``data``, uint8[capacity].

    They are numbered as their digests stand in the record. When none differs the shard digest, or
    the fragment's part in it, holds too: a record whose own digests disagree is not readable.
    """
    return tuple(
        number
        for number, (start, stop, expected) in enumerate(digested_chunks(record))
        if digest(data[start:stop]) != expected
    )
