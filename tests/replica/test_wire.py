"""What a trainer and its background process say: whole frames, bounded, and errors by name."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from erasure.errors import PlanariaError
from recovery.session import RestoreHalfDone
from replica.errors import ArenaFull, PeerError, StateError
from replica.mappings import Mappings
from replica.source import NeedCapacity
from replica.wire import FRAME_BYTES_MAX, Wire, WireLost, error_of, error_word, field, ours


@pytest.fixture
def ends():
    """Yield both ends of a wire."""
    pair = [Wire(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def raw(text: bytes) -> bytes:
    """Frame a text as it travels."""
    return struct.pack("<I", len(text)) + text


def test_frames_arrive_whole_and_in_order(ends):
    """Three frames, numpy's numbers among them, are received as they were said; then the end."""
    one, other = ends
    said = [{"a": 1}, {"text": "ü" * 20_000, "list": [None, True, 0.5]}, {}]
    for frame in said:
        one.send(frame)
    heard = []
    while len(heard) < len(said):
        heard += other.receive()
    assert heard == said
    one.close()
    assert other.receive() is None


def test_a_frame_in_pieces_is_put_together(ends):
    """Byte by byte nothing is heard before the last one."""
    one, other = ends
    for byte in (data := raw(b'{"a":[1,2]}')):
        one._socket.sendall(bytes([byte]))
        heard = other.receive()
        data = data[1:]
        assert heard == ([] if data else [{"a": [1, 2]}])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<I", FRAME_BYTES_MAX + 1), "at most"),
        (raw(b"[1]"), "expected an object"),
        (raw(b"{"), "a frame"),
        (raw(b'{"a":NaN}'), "a frame"),
        (raw(b'{"a":1,"a":2}'), "doubled"),
        (raw(b"\xff\xfe"), "a frame"),
    ],
)
def test_what_is_no_frame_is_refused(ends, data, why):
    """Too long, no object, cut, a constant that is no JSON, a doubled key, no text."""
    one, other = ends
    one._socket.sendall(data)
    with pytest.raises(WireLost, match=why):
        other.receive()


def test_nobody_takes_what_is_said(ends):
    """To a closed end: WireLost, and no signal."""
    one, other = ends
    other.close()
    with pytest.raises(WireLost, match="nobody takes"):
        one.send({})


def test_errors_keep_their_type_and_text():
    """Ours come back as themselves; what is none of ours keeps its name, and is told as ours."""
    for error in (ArenaFull("no room"), RestoreHalfDone("half"), StateError("bad")):
        again = error_of(error_word(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert ours(again) is again
    again = error_of(error_word(NeedCapacity(capacity_bytes=7, have_bytes=3)))
    assert (again.capacity_bytes, again.have_bytes) == (7, 3)
    foreign = error_of(error_word(ZeroDivisionError("by zero")))
    assert (type(foreign).__name__, str(foreign)) == ("ZeroDivisionError", "by zero")
    assert not isinstance(foreign, PlanariaError)
    assert str(ours(foreign)) == "ZeroDivisionError: by zero"
    for word in (None, 7, {}, {"kind": "ArenaFull"}, {"kind": "x", "text": 1}):
        assert isinstance(error_of(word), PeerError)
    assert type(error_of({"kind": "no name", "text": "t"})).__name__ == "Exception"
    # Numbers that no buffer has: an error all the same, but not one that makes memory.
    assert not isinstance(
        error_of({"kind": "NeedCapacity", "text": "t", "bytes": [-1, 0]}), NeedCapacity
    )


def test_a_field_is_of_its_kind():
    """A field that is missing or of another kind: WireLost with what it is."""
    assert field({"a": 1}, "a", int) == 1
    for frame in ({}, {"a": "1"}):
        with pytest.raises(WireLost, match=r"a is .*expected"):
            field(frame, "a", int)


def test_only_slots_of_this_user_are_mapped(arena_dir):
    """A slot as it was named is mapped once; other names, sizes, inodes and links are refused."""
    path = arena_dir / "slot-3.safetensors"
    path.write_bytes(b"abcd")
    facts = path.stat()
    named = {"path": str(path), "capacity": 4, "device": facts.st_dev, "inode": facts.st_ino}
    mappings = Mappings(os.getpid())
    view = mappings.view(named)
    assert bytes(view) == b"abcd"
    assert mappings.view(named) is view
    other = arena_dir / "other"
    other.write_bytes(b"abcd")
    link = arena_dir / "slot-4.safetensors"
    link.symlink_to(path)
    for wrong in (
        {"capacity": 5},
        {"inode": facts.st_ino + 1},
        {"path": str(other), "inode": other.stat().st_ino},
        {"path": "/proc/1/fd/3"},
        {"capacity": "4"},
    ):
        with pytest.raises(WireLost):
            Mappings(os.getpid()).view(named | wrong)
    with pytest.raises(OSError, match="symbolic"):
        Mappings(os.getpid()).view(named | {"path": str(link)})
    path.unlink()
    mappings.purge()
    with pytest.raises(FileNotFoundError):
        mappings.view(named)
