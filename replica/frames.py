"""A small file that always holds a whole value: two frames, written in turns, each with a checksum.

::

    frame     8 bytes magic | 8 bytes sequence | 4 bytes length | 16 bytes digest | payload | unused
    file      the frame with even sequence numbers, then, at half the size, the one with odd

A writer that dies in the middle tears the frame that it was writing; the other one, one number
older, is whole. Readers take no lock: a frame that is being written while they read fails its
digest.
"""

from __future__ import annotations

import os
import struct

from erasure.digest import digest
from replica.errors import ArenaError
from replica.folder import Folder

_MAGIC = b"PLNFRAME"
_HEADER = struct.Struct("<8sQI16s")
_FRAME_BYTES_MAX = 1 << 29
_READ_TRIES = 5


def encode_frame(sequence: int, payload: bytes) -> bytes:
    """Return the bytes of one frame."""
    check = digest(struct.pack("<Q", sequence) + payload)
    return _HEADER.pack(_MAGIC, sequence, len(payload), check) + payload


def decode_frame(raw: bytes) -> tuple[int, bytes] | None:
    """Return (sequence, payload) of the frame at the start of ``raw``; None if it is damaged."""
    if len(raw) < _HEADER.size:
        return None
    magic, sequence, length, check = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size : _HEADER.size + length]
    if magic != _MAGIC or len(payload) != length:
        return None
    if digest(struct.pack("<Q", sequence) + payload) != check:
        return None
    return sequence, payload


class FrameFile:
    """An open file of two frames. It owns ``descriptor``; one writer, any number of readers."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path
        self.frame_bytes = min(os.fstat(descriptor).st_size // 2, _FRAME_BYTES_MAX)
        self._sequence = (self._newest() or (0, b""))[0]

    @property
    def payload_bytes_max(self) -> int:
        """How large a value it takes."""
        return self.frame_bytes - _HEADER.size

    @classmethod
    def create(cls, folder: Folder, name: str, payload_bytes_max: int) -> FrameFile:
        """Make or open the file with room for payloads of that size, all of it allocated now.

        Raises OSError (ENOSPC) when the file system has no room; the file may then be left behind.
        """
        size = 2 * (_HEADER.size + payload_bytes_max)
        descriptor = folder.file(name, create=True)
        try:
            # A file of another size has its frames elsewhere: it starts anew.
            if os.fstat(descriptor).st_size not in (0, size):
                os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, f"{folder.path}/{name}")
        except BaseException:
            os.close(descriptor)
            raise

    def read(self) -> bytes | None:
        """Return the newest whole payload; None if no frame is whole."""
        for _ in range(_READ_TRIES):
            # The writer may replace the older frame while we read the newer one: look again.
            newest = self._newest()
            if newest is not None:
                return newest[1]
        return None

    def maimed(self) -> bool:
        """Whether the other place than that which is read was written, and holds no whole frame.

        Damage leaves that. So does a writer that was killed in the middle of a frame, and nobody
        can tell which. What is read may be older than what was written last.
        """
        newest = self._newest()
        if newest is None:
            return False
        other = 1 - newest[0] % 2
        if self._frame(other) is not None:
            return False
        header = os.pread(self.descriptor, _HEADER.size, other * self.frame_bytes)
        return newest[0] > 1 or any(header)

    def write(self, payload: bytes) -> None:
        """Replace the value. Until this returns, the former one is still what a reader finds."""
        sequence = self._sequence + 1
        frame = encode_frame(sequence, payload)
        if len(frame) > self.frame_bytes:
            raise ArenaError(
                f"{self.path}: {len(payload)} bytes do not fit into {self.payload_bytes_max}"
            )
        offset, view = sequence % 2 * self.frame_bytes, memoryview(frame)
        while view:
            written = os.pwrite(self.descriptor, view, offset)
            offset, view = offset + written, view[written:]
        self._sequence = sequence

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _newest(self) -> tuple[int, bytes] | None:
        found = [frame for frame in (self._frame(0), self._frame(1)) if frame is not None]
        return max(found, key=lambda frame: frame[0], default=None)

    def _frame(self, place: int) -> tuple[int, bytes] | None:
        offset = place * self.frame_bytes
        header = os.pread(self.descriptor, min(_HEADER.size, self.frame_bytes), offset)
        if len(header) < _HEADER.size:
            return None
        length = _HEADER.unpack(header)[2]
        if length > self.payload_bytes_max:
            return None
        # Header and payload in one read: the header above was only asked for the length.
        frame = decode_frame(os.pread(self.descriptor, _HEADER.size + length, offset))
        return frame if frame is not None and frame[0] % 2 == place else None
