"""A shard image is a valid safetensors file, and bytes that are none are refused by name."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import StateError
from replica.image import (
    ALIGN_BYTES,
    Entry,
    ImageError,
    Layout,
    ShardHeader,
    raw_entry,
    read_image,
)
from tests.replica.snapshot_tools import HEADER, header_of, with_header

ENTRIES = [
    Entry(name="w", code="F32", shape=(2, 3), nbytes=24),
    Entry(name="none", code="F32", shape=(0, 3), nbytes=0),
    raw_entry("bytes", 5),
]
TREE = b'{"any":"text"}'


def image(entries=ENTRIES, *, capacity=1 << 14, header=HEADER):
    """Return a whole buffer with entries of rising bytes, and its shard_bytes."""
    layout = Layout(entries)
    buffer = np.full(capacity, 0xEE, np.uint8)
    for start, entry in zip(layout.starts, entries, strict=True):
        buffer[start : start + entry.nbytes] = np.arange(entry.nbytes, dtype=np.uint8)
    return buffer, layout.write_frame(buffer, header, TREE)


def test_reads_back_what_it_wrote():
    """Header, entries, their bytes and the tree come back: one image written and parsed."""
    buffer, shard_bytes = image()
    found = read_image(buffer)
    assert found.header == HEADER
    assert list(found.entries) == ENTRIES
    assert found.shard_bytes == shard_bytes
    assert found.tree_bytes() == TREE
    assert found.entry_bytes(2).tobytes() == bytes(range(5))
    assert found.entry_bytes(1).nbytes == 0


@pytest.mark.parametrize("slack", [0, 1, 777])
def test_safetensors_reads_the_whole_buffer(tmp_path, slack):
    """Any safetensors reader opens a slot, whatever the pad: written, opened, compared."""
    _, shard_bytes = image()
    buffer, _ = image(capacity=shard_bytes + slack)
    path = tmp_path / "slot.safetensors"
    path.write_bytes(buffer.tobytes())
    with safetensors.safe_open(path, "pt") as opened:
        assert set(opened.keys()) == {"w", "none", "bytes", "planaria.tree", "planaria.pad"}
        assert opened.get_tensor("w").view(torch.uint8).flatten().tolist() == list(range(24))
        assert opened.get_tensor("planaria.pad").numel() == slack
        assert ShardHeader.from_metadata(opened.metadata()["planaria"]) == HEADER


def test_layout_is_aligned_and_constant():
    """Entries start at multiples of 64 after a header of constant size: two very unlike headers."""
    layout = Layout(ENTRIES)
    long = ShardHeader(
        job="\U0001f9a0" * 256,
        epoch=(1 << 62) - 1,
        step=(1 << 62) - 1,
        generation="f" * 32,
        owner=(1 << 62) - 2,
        world=(1 << 62) - 1,
    )
    assert layout.data_start % ALIGN_BYTES == 0
    for header in (HEADER, long):
        buffer, _ = image(header=header)
        assert read_image(buffer).starts == layout.starts
        assert read_image(buffer).header == header


def test_the_pad_may_be_missing_and_nothing_else():
    """A receiver has the shard without the pad: parsed at that length, refused one byte short."""
    buffer, shard_bytes = image()
    assert read_image(buffer[:shard_bytes]).shard_bytes == shard_bytes
    with pytest.raises(ImageError, match="are here"):
        read_image(buffer[: shard_bytes - 1])


@pytest.mark.parametrize(
    "length", [2**64 - 1, 2**63, 2**63 - 1, 100_000_001, 1 << 14, (1 << 14) - 7, 0]
)
def test_header_length_is_bounded(length):
    """A header length of -1, 2**63, more than the file or nothing is refused before any parse."""
    buffer, _ = image()
    buffer[:8] = np.frombuffer(struct.pack("<Q", length), np.uint8)
    with pytest.raises(ImageError):
        read_image(buffer)


def mutated(change):
    """Return an image whose parsed header was changed by a function."""
    buffer, _ = image()
    members = header_of(buffer)
    change(members)
    return with_header(buffer, members)


def put(name, **facts):
    """Return a change that overwrites facts of one entry."""
    return lambda members: members[name].update(facts)


DAMAGE = {
    "hole": put("w", data_offsets=[0, 20], shape=[5, 1]),
    "overlap": put("bytes", data_offsets=[20, 25]),
    "begins late": lambda members: members.pop("w"),
    "negative": put("w", data_offsets=[-24, 0]),
    "reversed": put("w", data_offsets=[24, 0]),
    "huge offset": put("planaria.pad", data_offsets=[43, 1 << 70]),
    "past the end": put("planaria.tree", data_offsets=[29, 1 << 40], shape=[(1 << 40) - 29]),
    "float offset": put("w", data_offsets=[0.0, 24.0]),
    "one offset": put("w", data_offsets=[0]),
    "bool offset": put("none", data_offsets=[False, False]),
    "wrong dtype": put("w", dtype="F33"),
    "dtype of a list": put("w", dtype=["F32"]),
    "shape too large": put("w", shape=[1 << 61, 1 << 61]),
    "shape does not fit": put("w", shape=[2, 4]),
    "negative shape": put("w", shape=[-2, -3]),
    "shape of text": put("w", shape=["2", 3]),
    "too many dimensions": put("w", shape=[1] * 65),
    "unknown fact": put("w", color="red"),
    "missing fact": lambda members: members["w"].pop("shape"),
    "no tree": lambda members: members.pop("planaria.tree"),
    "no pad": lambda members: members.pop("planaria.pad"),
    "entry of a list": lambda members: members.update(w=[]),
    "no metadata": lambda members: members.pop("__metadata__"),
    "metadata of a list": lambda members: members.update(__metadata__=[]),
    "foreign metadata": lambda members: members.update(__metadata__={"format": "pt"}),
    "metadata not JSON": lambda members: members["__metadata__"].update(planaria="{"),
    "metadata of a number": lambda members: members["__metadata__"].update(planaria="7"),
    "another format": lambda members: members["__metadata__"].update(planaria='{"format":2}'),
    "metadata too long": lambda members: members["__metadata__"].update(planaria=" " * 70_000),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_header_is_refused(name):
    """Each way to damage a header ends in ImageError: one member changed at a time."""
    with pytest.raises(ImageError):
        read_image(mutated(DAMAGE[name]))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"w":NaN}',
        b'{"a":1,"a":2}',
        b'{"w":' + b"[" * 100_000,
        b'{"w":' + b"9" * 5000 + b"}",
        b'{"w":[' + b"0," * 9_000_000 + b"0]}",
    ],
    ids=[
        "empty",
        "list",
        "null",
        "no UTF-8",
        "NaN",
        "doubled key",
        "deep",
        "long number",
        "many",
    ],
)
def test_header_that_is_no_object_is_refused(text):
    """Text that is no JSON object, a bomb too, is refused: put where the header stands."""
    buffer, _ = image()
    with pytest.raises(ImageError, match="header"):
        read_image(with_header(buffer, text))


@pytest.mark.parametrize("field", ["job", "epoch", "step", "generation", "owner", "world"])
@pytest.mark.parametrize("value", [None, -1, 1.5, True, "x" * 300, "", [], 1 << 62])
def test_header_fields_are_checked(field, value):
    """No field of the shard header takes a wrong type or range: each tried with eight values."""
    facts = {name: getattr(HEADER, name) for name in HEADER.__dataclass_fields__}
    with pytest.raises(StateError):
        ShardHeader(**facts | {field: value})


def test_header_job_must_be_text_that_can_be_written():
    """A job with half a surrogate pair would make the file unreadable: refused at construction."""
    with pytest.raises(ImageError, match="Unicode"):
        ShardHeader(job="\ud800", epoch=0, step=0, generation="0" * 32, owner=0, world=1)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(data):
    """No byte string does anything but raise ImageError: arbitrary bytes as an image."""
    with pytest.raises(ImageError):
        read_image(np.frombuffer(data, np.uint8))


@given(st.integers(0, 700), st.integers(0, 255))
def test_one_changed_byte_never_crashes(place, byte):
    """A flipped byte anywhere in prefix and header is refused or read, nothing else."""
    buffer, _ = image()
    buffer[place] = byte
    try:
        found = read_image(buffer)
    except ImageError:
        return
    assert found.shard_bytes <= buffer.nbytes


def test_wrong_arrays_are_refused():
    """A buffer of another dtype or shape is the caller's mistake and is named."""
    with pytest.raises(ImageError, match="uint8"):
        read_image(np.zeros(100, np.int8))
    with pytest.raises(ImageError, match="uint8"):
        read_image(np.zeros((10, 10), np.uint8))


def test_too_many_entries_are_refused_when_written():
    """The format's header limit holds for the writer: names that make 100 MB of it."""
    with pytest.raises(StateError, match="header"):
        Layout([raw_entry("x" * 1_000_000 + str(index), 0) for index in range(100)])
