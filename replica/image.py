"""A shard as one valid safetensors file image in a buffer that the caller owns.

Layout of a buffer of `capacity` bytes::

    8 bytes    header length, little endian
    header     JSON, padded with spaces: 8 + header is a multiple of 64 and constant for a layout
    entries    tensor bytes by falling item size, then entries of raw bytes
    tree       the structure as JSON text, an entry of bytes; its length varies from save to save
    pad        an entry of bytes that ends exactly where the buffer ends

`shard_bytes` is everything before the pad: what is sent and digested. The pad exists because the
format refuses bytes after its last tensor, while a slot's size stays the same.

Whatever is read here may be damaged or hostile: every length is checked against a bound or against
the buffer before it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from replica.dtypes import CODES, RAW_CODE, code_bytes
from replica.errors import StateError
from replica.jsontext import JsonError, count_nodes, parse_bounded

Bytes = npt.NDArray[np.uint8]

FORMAT = 1
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 100_000_000
"""The reader of the safetensors library refuses longer headers."""
MAX_HEADER_NODES = 1 << 23
MAX_TREE_BYTES = 1 << 28
MAX_NODES = 1 << 23
"""Values of JSON in the tree, by its separators."""
MAX_DIMS = 64
MAX_JOB_CHARS = 256
TREE_NAME = "planaria.tree"
PAD_NAME = "planaria.pad"
METADATA_KEY = "planaria"

_PREFIX_BYTES = 8
# Room for what changes from save to save: the metadata and the offsets of tree and pad.
_VARYING_BYTES = 4096


class ImageError(StateError):
    """Bytes that should be a shard image are damaged, truncated or of another format."""


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """Whose bytes these are; stands as text in the `__metadata__` of the image."""

    job: str
    """Name of the job, 1 to 256 characters."""
    epoch: int
    step: int
    generation: str
    """32 hexadecimal digits."""
    owner: int
    """Rank at save time."""
    world: int
    """Number of ranks at save time."""

    def __post_init__(self) -> None:
        if type(self.job) is not str or not 1 <= len(self.job) <= MAX_JOB_CHARS:
            raise ImageError(f"shard header: job must have 1 to {MAX_JOB_CHARS} characters")
        if any("\ud800" <= char <= "\udfff" for char in self.job):
            raise ImageError("shard header: job must be valid Unicode text")
        if type(self.generation) is not str or not re.fullmatch("[0-9a-f]{32}", self.generation):
            raise ImageError("shard header: generation must be 32 hexadecimal digits")
        for name in ("epoch", "step", "owner", "world"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << 62:
                raise ImageError(f"shard header: {name} must be an int from 0, got {value!r}")
        if self.owner >= self.world:
            raise ImageError(f"shard header: owner {self.owner} is outside world {self.world}")

    def metadata(self) -> str:
        """The text under the key `planaria` of `__metadata__`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False)

    @staticmethod
    def from_metadata(text: object) -> ShardHeader:
        """Read the text back; `ImageError` if it is not exactly what `metadata` writes."""
        if type(text) is not str:
            raise ImageError("shard image: no planaria metadata; this file is not a shard of ours")
        try:
            found = parse_bounded(text.encode("utf-8", "surrogatepass"), 1 << 16, 1 << 8)
        except JsonError as fault:
            raise ImageError(f"shard image: metadata {fault}") from fault
        got = found.get("format") if type(found) is dict else None
        if type(got) is not int or got != FORMAT:
            raise ImageError(f"shard image: format {got!r}; this version reads format {FORMAT}")
        names = {field.name for field in fields(ShardHeader)}
        if set(found) - {"format"} != names:
            raise ImageError(f"shard image: metadata must have exactly {sorted(names)}")
        del found["format"]
        return ShardHeader(**found)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One named run of bytes of the image."""

    name: str
    code: str
    """Element type in the format's own words, a key of `replica.dtypes.CODES`."""
    shape: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ImageError(f"entry {self.name!r}: dtype {self.code!r} is not one of the format's")
        if len(self.shape) > MAX_DIMS:
            raise ImageError(f"entry {self.name!r}: {len(self.shape)} dimensions")
        if any(type(size) is not int or not 0 <= size < 1 << 62 for size in self.shape):
            raise ImageError(f"entry {self.name!r}: shape must be ints from 0")
        if math.prod(self.shape) * code_bytes(self.code) != self.nbytes:
            raise ImageError(
                f"entry {self.name!r}: {self.nbytes} bytes do not make {self.code}{self.shape}"
            )

    def text(self, start: int) -> str:
        """This entry's member of the header, with its bytes beginning at `start`."""
        facts = {
            "dtype": self.code,
            "shape": list(self.shape),
            "data_offsets": [start, start + self.nbytes],
        }
        return f"{json.dumps(self.name)}:{json.dumps(facts, separators=(',', ':'))}"


def raw_entry(name: str, nbytes: int) -> Entry:
    """An entry of bytes without an element type."""
    return Entry(name=name, code=RAW_CODE, shape=(nbytes,), nbytes=nbytes)


class Layout:
    """Where every entry lies; constant while the plan of a shard does.

    `starts[i]` is the offset of entry i in the buffer, `tree_start` that of the tree.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        sizes = [entry.nbytes for entry in self.entries]
        offsets: list[int] = [0, *accumulate(sizes)]
        self._fixed = "".join(
            "," + entry.text(start) for entry, start in zip(self.entries, offsets, strict=False)
        )
        used = _PREFIX_BYTES + len(self._fixed) + _VARYING_BYTES
        self.data_start = -(-used // ALIGN_BYTES) * ALIGN_BYTES
        nodes = count_nodes(self._fixed.encode()) + _VARYING_BYTES
        if self.data_start - _PREFIX_BYTES > MAX_HEADER_BYTES or nodes > MAX_HEADER_NODES:
            raise StateError(
                f"state with {len(self.entries)} tensors, arrays and long values needs a header of "
                f"{self.data_start} bytes and about {nodes} values of JSON, and readers of the "
                f"format take {MAX_HEADER_BYTES} and {MAX_HEADER_NODES}: join small tensors into "
                "larger ones"
            )
        self.starts = tuple(self.data_start + offset for offset in offsets[:-1])
        self._tree_offset = offsets[-1]
        self.tree_start = self.data_start + self._tree_offset

    def write_frame(self, buffer: Bytes, header: ShardHeader, tree: bytes) -> int:
        """Write header and tree, declare the pad, return `shard_bytes`.

        The caller has made sure that `tree_start + len(tree)` fits into the buffer, and writes
        the entries itself, before or after.
        """
        shard_bytes = self.tree_start + len(tree)
        head = self.head(header, len(tree), buffer.nbytes)
        buffer[: self.data_start] = np.frombuffer(head, np.uint8)
        buffer[self.tree_start : shard_bytes] = np.frombuffer(tree, np.uint8)
        return shard_bytes

    def head(self, header: ShardHeader, tree_bytes: int, file_bytes: int) -> bytes:
        """All that stands before the entries, for a tree and a file of these sizes."""
        tree_end = self._tree_offset + tree_bytes
        metadata = json.dumps({"__metadata__": {METADATA_KEY: header.metadata()}})
        text = (
            metadata[:-1]
            + self._fixed
            + ","
            + raw_entry(TREE_NAME, tree_bytes).text(self._tree_offset)
            + ","
            + raw_entry(PAD_NAME, file_bytes - self.data_start - tree_end).text(tree_end)
            + "}"
        )
        header_bytes = self.data_start - _PREFIX_BYTES
        return header_bytes.to_bytes(_PREFIX_BYTES, "little") + text.encode().ljust(header_bytes)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A parsed image: facts only, and the caller's buffer by reference."""

    header: ShardHeader
    entries: tuple[Entry, ...]
    """In file order, without tree and pad."""
    starts: tuple[int, ...]
    """Offset in the buffer of each entry."""
    tree_start: int
    shard_bytes: int
    buffer: Bytes

    def entry_bytes(self, index: int) -> Bytes:
        """uint8[nbytes] of one entry: a view of the caller's buffer, to be copied from."""
        start = self.starts[index]
        return self.buffer[start : start + self.entries[index].nbytes]

    def tree_bytes(self) -> bytes:
        """A copy of the tree's text."""
        return self.buffer[self.tree_start : self.shard_bytes].tobytes()


def read_image(buffer: Bytes, *, nbytes: int | None = None) -> Image:
    """Parse and check an image; nothing is copied but the header.

    `buffer` is uint8[n] with n from `shard_bytes` to the file size: the pad may be missing. With
    `nbytes` it is the header alone, of an image of so many bytes.
    Raises `ImageError` unless the entries lie end to end from the header to the pad.
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise ImageError(f"shard image: need uint8[n], got {buffer.dtype}{buffer.shape}")
    members, data_start = _read_header(buffer)
    metadata = members.pop("__metadata__", None)
    header = ShardHeader.from_metadata(
        metadata.get(METADATA_KEY) if type(metadata) is dict else None
    )
    found = sorted((_read_entry(name, facts) for name, facts in members.items()), key=_place)
    _check_tiling(found)
    names = [entry.name for entry, _ in found]
    if names[-2:] != [TREE_NAME, PAD_NAME]:
        raise ImageError(f"shard image: must end with {TREE_NAME} and {PAD_NAME}")
    tree, tree_offset = found[-2]
    shard_bytes = data_start + tree_offset + tree.nbytes
    here = buffer.nbytes if nbytes is None else nbytes
    if shard_bytes > here:
        raise ImageError(f"shard image: needs {shard_bytes} bytes, {here} are here")
    if tree.nbytes > MAX_TREE_BYTES:
        raise ImageError(f"shard image: tree of {tree.nbytes} bytes, at most {MAX_TREE_BYTES}")
    return Image(
        header=header,
        entries=tuple(entry for entry, _ in found[:-2]),
        starts=tuple(data_start + start for _, start in found[:-2]),
        tree_start=data_start + tree_offset,
        shard_bytes=shard_bytes,
        buffer=buffer,
    )


def _read_header(buffer: Bytes) -> tuple[dict[str, object], int]:
    if buffer.nbytes < _PREFIX_BYTES:
        raise ImageError(f"shard image: {buffer.nbytes} bytes are too few for a header")
    length = int.from_bytes(buffer[:_PREFIX_BYTES].tobytes(), "little")
    limit = min(MAX_HEADER_BYTES, buffer.nbytes - _PREFIX_BYTES)
    if length > limit:
        raise ImageError(f"shard image: header length {length} is above {limit}")
    data_start = _PREFIX_BYTES + length
    text = buffer[_PREFIX_BYTES:data_start].tobytes()
    try:
        found = parse_bounded(text, MAX_HEADER_BYTES, MAX_HEADER_NODES)
    except JsonError as fault:
        raise ImageError(f"shard image: header {fault}") from fault
    if type(found) is not dict:
        raise ImageError("shard image: header is not a JSON object")
    return found, data_start


def _read_entry(name: str, facts: object) -> tuple[Entry, int]:
    if type(facts) is not dict or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise ImageError(f"entry {name!r}: must have dtype, shape and data_offsets")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if type(code) is not str or type(shape) is not list or type(offsets) is not list:
        raise ImageError(f"entry {name!r}: dtype, shape or data_offsets of a wrong type")
    if len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise ImageError(f"entry {name!r}: data_offsets must be two ints")
    start, stop = offsets
    if not 0 <= start <= stop < 1 << 62:
        raise ImageError(f"entry {name!r}: data_offsets {start}, {stop} are out of range")
    return Entry(name=name, code=code, shape=tuple(shape), nbytes=stop - start), start


def _place(item: tuple[Entry, int]) -> tuple[int, int, bool]:
    entry, start = item
    return start, entry.nbytes, entry.name == PAD_NAME


def _check_tiling(found: Sequence[tuple[Entry, int]]) -> None:
    end = 0
    for entry, start in found:
        if start != end:
            kind = "overlaps the one before" if start < end else "leaves a hole before itself"
            raise ImageError(f"entry {entry.name!r}: starts at {start}, which {kind} ({end})")
        end = start + entry.nbytes
