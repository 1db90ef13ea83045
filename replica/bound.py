"""Views of the last few buffers, made once for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from replica.image import Bytes

T = TypeVar("T")
_MAX_BOUND = 4


class Bound(Generic[T]):
    """What was made of a buffer, by its address and size. It holds the last buffers' memory."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], T] = {}

    def get(self, buffer: Bytes, make: Callable[[], T]) -> T:
        """What was made of this buffer, made now if it is a new one."""
        key = (buffer.__array_interface__["data"][0], buffer.nbytes)
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _MAX_BOUND:
                self._made.pop(next(iter(self._made)))
            made = self._made[key] = make()
        return made

    def clear(self) -> None:
        """Let go of all, so that their mappings can go."""
        self._made.clear()
