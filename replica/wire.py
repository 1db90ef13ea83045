"""What a trainer and its background process say to each other: bounded JSON frames, never pickle.

A frame is a length of four bytes, little endian, and one JSON object. Errors travel as their type's
name and their text, and become one of ours again by a fixed table.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import threading
from typing import Any

from erasure.errors import ErasureError, PlanariaError
from recovery.errors import (
    FormatVersionError,
    LayoutError,
    ManifestError,
    RecoveryError,
    Unrecoverable,
)
from recovery.session import RestoreAborted, RestoreHalfDone
from replica import errors
from replica.image import ImageError
from replica.jsontext import JsonError, parse_bounded
from replica.source import NeedCapacity

Frame = dict[str, Any]

FRAME_BYTES_MAX = 1 << 28
"""The words of all ranks of a large world, at most; most frames have some hundred bytes."""
_NODES_MAX = 1 << 22
_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 15
"""A frame of so many bytes is taken by a socket at once, or not at all."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

_RAISABLE = {
    kind.__name__: kind
    for kind in (
        PlanariaError,
        ErasureError,
        RecoveryError,
        LayoutError,
        ManifestError,
        FormatVersionError,
        Unrecoverable,
        RestoreAborted,
        RestoreHalfDone,
        errors.ConfigError,
        errors.StateError,
        ImageError,
        errors.ArenaError,
        errors.ArenaFull,
        errors.ArenaBusy,
        errors.PeerError,
        errors.StoreError,
        errors.SaveFailed,
    )
}


class WireLost(Exception):
    """The other process is gone, or said what it cannot have meant."""


class Wire:
    """One end of a socket pair. Any thread may send, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # A signal handler may come with something to send while this thread sends.
        self._sending = threading.RLock()
        self._buffer = bytearray()
        self._torn = False

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._socket.fileno()

    def send(self, frame: Frame) -> None:
        """Send one frame. Raises WireLost when nobody takes it."""
        text = json.dumps(frame, default=_plain, allow_nan=False).encode()
        if len(text) > FRAME_BYTES_MAX:
            raise WireLost(f"a frame of {len(text)} bytes, at most {FRAME_BYTES_MAX} are allowed")
        with self._sending:
            if self._torn:
                raise WireLost("a frame was broken off in the middle")
            # Begun and ended in one step as a rule; a signal can come in between if it is large.
            self._torn = len(text) > _WHOLE_BYTES
            try:
                self._socket.sendall(_LENGTH.pack(len(text)) + text)
            except (OSError, ValueError) as error:
                raise WireLost(f"nobody takes what is said: {error}") from error
            self._torn = False

    def receive(self) -> list[Frame] | None:
        """Wait for something and return the frames that are whole by then; None at the end.

        Raises WireLost for what is no frame.
        """
        try:
            some = self._socket.recv(_RECEIVE_BYTES)
        except (ConnectionError, TimeoutError):
            some = b""
        if not some:
            return None
        self._buffer += some
        found = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise WireLost(f"a frame of {length} bytes, at most {FRAME_BYTES_MAX} are allowed")
            if len(self._buffer) < _LENGTH.size + length:
                break
            found.append(_parsed(bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])))
            del self._buffer[: _LENGTH.size + length]
        return found

    def wait(self, other: int, timeout_s: float | None = None) -> tuple[bool, bool]:
        """Wait until something can be received or descriptor ``other`` is readable; which of both.

        A descriptor of a process is readable once that has ended.
        """
        waiter = select.poll()
        waiter.register(self._socket, select.POLLIN)
        waiter.register(other, select.POLLIN)
        ready = {fd for fd, _ in waiter.poll(None if timeout_s is None else timeout_s * 1000)}
        return self._socket.fileno() in ready, other in ready

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def error_word(error: BaseException) -> Frame:
    """An error as it travels."""
    word: Frame = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, NeedCapacity):
        word["bytes"] = [error.capacity_bytes, error.have_bytes]
    return word


def error_of(word: object) -> Exception:
    """The error that a word stands for; what is none of ours keeps its name and text."""
    if not isinstance(word, dict) or not isinstance(word.get("text"), str):
        return errors.PeerError(f"the background process and its trainer disagree: {word!r}"[:500])
    kind, text = word.get("kind"), word["text"]
    if kind == NeedCapacity.__name__:
        numbers = word.get("bytes")
        if isinstance(numbers, list) and len(numbers) == 2 and all(map(_is_size, numbers)):
            return NeedCapacity(capacity_bytes=numbers[0], have_bytes=numbers[1])
    known = _RAISABLE.get(kind) if isinstance(kind, str) else None
    if known is not None:
        return known(text)
    name = kind if isinstance(kind, str) and _NAME.fullmatch(kind) else "Exception"
    foreign: type[Exception] = type(name, (Exception,), {"__doc__": "An error of another process."})
    return foreign(text)


def ours(error: Exception) -> Exception:
    """An error of a call as the caller gets it: what is none of ours is told in a StateError."""
    if isinstance(error, PlanariaError):
        return error
    return errors.StateError(f"{type(error).__name__}: {error}")


def field(frame: Frame, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a frame, which must be of ``kind``. Raises WireLost."""
    value = frame.get(name)
    if not isinstance(value, kind):
        raise WireLost(f"{name} is {value!r:.100}, expected {kind}")
    return value


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _parsed(text: bytes) -> Frame:
    try:
        frame = parse_bounded(text, FRAME_BYTES_MAX, _NODES_MAX)
    except JsonError as error:
        raise WireLost(f"a frame {error}") from error
    if not isinstance(frame, dict):
        raise WireLost(f"a frame is {frame!r:.100}, expected an object")
    found: Frame = frame
    return found


def _plain(value: Any) -> Any:
    """Numbers of numpy's as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be said in a frame")
