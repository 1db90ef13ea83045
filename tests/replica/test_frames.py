"""A frame file always holds one whole value, whatever tears it and whatever is written over it."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import ArenaError
from replica.folder import open_arena_dir
from replica.frames import FrameFile, decode_frame, encode_frame


@pytest.fixture
def folder(arena_dir):
    """Yield an open directory that is removed afterwards."""
    with open_arena_dir(arena_dir) as base, base.child("frames", create=True) as child:
        yield child


def torn(frames: FrameFile, payload: bytes, cut: int) -> None:
    """Do what a writer does that is killed after ``cut`` bytes of its next frame."""
    sequence = frames._sequence + 1
    frame = encode_frame(sequence, payload)[:cut]
    os.pwrite(frames.descriptor, frame, sequence % 2 * frames.frame_bytes)


def reopened(folder, frames: FrameFile) -> FrameFile:
    """Open the same file as the next process would."""
    frames.close()
    return FrameFile(folder.file("f"), "f")


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_torn_write_leaves_the_value_before_it(folder, written):
    """Cutting the next write after any number of its bytes leaves the last whole value readable."""
    frames = FrameFile.create(folder, "f", 64)
    for number in range(written):
        frames.write(b"value %d" % number)
    for cut in range(len(encode_frame(1, b"x" * 40))):
        torn(frames, b"x" * 40, cut)
        frames = reopened(folder, frames)
        assert frames.read() == b"value %d" % (written - 1)
    frames.write(b"after")
    assert reopened(folder, frames).read() == b"after"


def test_a_new_file_is_whole_nowhere_and_allocated_everywhere(folder):
    """An unwritten file reads as None; its blocks are there, so that no write finds it full."""
    frames = FrameFile.create(folder, "f", 10_000)
    info = os.fstat(frames.descriptor)
    assert frames.read() is None
    assert info.st_blocks * 512 >= info.st_size >= 20_000


def test_a_value_that_does_not_fit_changes_nothing(folder):
    """The largest payload fits; one byte more is refused, with both sizes; the old value stays."""
    frames = FrameFile.create(folder, "f", 100)
    frames.write(b"a" * 100)
    with pytest.raises(ArenaError, match="101 bytes do not fit into 100"):
        frames.write(b"b" * 101)
    assert frames.read() == b"a" * 100


def test_a_file_made_for_another_size_starts_anew(folder):
    """Frames lie elsewhere in a file of another size: nothing stale is found in a resized one."""
    frames = FrameFile.create(folder, "f", 100)
    frames.write(b"old")
    frames.close()
    assert FrameFile.create(folder, "f", 100).read() == b"old"
    assert FrameFile.create(folder, "f", 200).read() is None


def test_a_frame_in_the_wrong_place_is_not_taken(folder):
    """A frame copied over its elder is refused: else the next write would tear the only one."""
    frames = FrameFile.create(folder, "f", 64)
    frames.write(b"first")
    odd = encode_frame(1, b"first")
    os.pwrite(frames.descriptor, odd, 0)
    os.pwrite(frames.descriptor, b"\0" * len(odd), frames.frame_bytes)
    assert reopened(folder, frames).read() is None


KILLER = """
import random, signal, time
from replica.folder import open_arena_dir
from replica.frames import FrameFile
rng, rounds = random.Random(ARGS[0]), ARGS[1]
SIZE = 1 << 20
folder = open_arena_dir(DIR).child("frames", create=True)
FrameFile.create(folder, "f", SIZE).write((1).to_bytes(4, "little") * (SIZE // 4))
def write_for_ever(ready):
    frames = FrameFile(folder.file("f"), "f")
    step = int.from_bytes(frames.read()[:4], "little")
    while True:
        step += 1
        frames.write(step.to_bytes(4, "little") * (SIZE // 4))
        os.pwrite(ready, step.to_bytes(4, "little"), 0)
for number in range(rounds):
    ready = os.memfd_create("ready")
    os.write(ready, bytes(4))
    pid = os.fork()
    if pid == 0:
        write_for_ever(ready)
    while os.pread(ready, 4, 0) == bytes(4):
        if os.waitpid(pid, os.WNOHANG)[0]:
            sys.exit("the writer has failed")
    time.sleep(rng.uniform(0, 0.005))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    done = int.from_bytes(os.pread(ready, 4, 0), "little")
    frames = FrameFile(folder.file("f"), "f")
    value = frames.read()
    whole = sum(frames._frame(place) is not None for place in (0, 1))
    step = int.from_bytes(value[:4], "little")
    say([value == value[:4] * (SIZE // 4), step, done, whole])
"""


def test_one_frame_is_whole_after_every_kill(arena_dir, children, rng):
    """A writer of 1 MiB values is killed 25 times: the last it finished, or the next, is there."""
    child = children.start(KILLER, arena_dir, int(rng.integers(1 << 30)), 25)
    torn_frames = 0
    for _ in range(25):
        consistent, step, acknowledged, whole = child.hear()
        assert consistent
        assert acknowledged <= step <= acknowledged + 1
        torn_frames += whole == 1
    if not torn_frames:
        pytest.skip("no kill fell into a write, so this run has shown nothing")


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_do_not_but_never_crash(raw):
    """Random bytes are no frame."""
    assert decode_frame(raw) is None


@given(st.integers(0, 2**64 - 1), st.binary(max_size=100), st.binary(max_size=8), st.data())
def test_a_frame_decodes_and_any_flipped_bit_is_noticed(sequence, payload, after, data):
    """Encode, decode with bytes behind it, then flip one drawn bit of the frame: it is refused."""
    frame = bytearray(encode_frame(sequence, payload))
    assert decode_frame(bytes(frame) + after) == (sequence, payload)
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    assert decode_frame(bytes(frame)) is None


@given(st.binary(max_size=300))
def test_a_file_of_any_bytes_reads_as_nothing(tmp_path_factory, raw):
    """A file of random bytes and size opens, reads as None, and is not read beyond its end."""
    path = tmp_path_factory.mktemp("frames") / "f"
    path.write_bytes(raw)
    frames = FrameFile(os.open(path, os.O_RDONLY), str(path))
    assert frames.read() is None
    frames.close()
