"""The state of one rank as the engine needs it: in its own process, or in the trainer's.

Nothing here imports what walks a state: a background process starts without it, in half the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from erasure.errors import PlanariaError
from replica.image import Bytes, ShardHeader

if TYPE_CHECKING:
    from replica.late_copy import LateCopy


class NeedCapacity(PlanariaError):
    """The state does not fit the buffer; nothing was written. `capacity_bytes` is what to bring."""

    def __init__(self, *, capacity_bytes: int, have_bytes: int) -> None:
        super().__init__(
            f"the shard needs a buffer of {capacity_bytes} bytes, this one has {have_bytes}"
        )
        self.capacity_bytes = capacity_bytes
        self.have_bytes = have_bytes


class Captured:
    """A state that is captured, but for ``late_bytes`` of the image's ``nbytes``.

    ``start`` is called once, ``finish`` before anything reads the buffer.
    """

    def __init__(self, nbytes: int, late: LateCopy | None = None) -> None:
        self.nbytes = nbytes
        self.late_bytes = late.nbytes if late is not None else 0
        self._late = late

    def start(self, on_ended: Callable[[], None]) -> None:
        """Begin the late copy; ``on_ended`` is called when nothing writes to the buffer any more.

        It may be called in another thread, or at once.
        """
        if self._late is None:
            on_ended()
        else:
            self._late.start(on_ended)

    def finish(self, timeout_s: float) -> None:
        """Return when every byte is in the buffer.

        Raises StateError, which names rank and key path, when a late leaf was changed before it
        was copied, and SaveFailed when it was not copied in time. The buffer is free only after
        ``on_ended``, also then.
        """
        if self._late is not None:
            self._late.finish(timeout_s)


class Prepared(Protocol):
    """A restore that was checked and is ready to run."""

    @property
    def header(self) -> ShardHeader:
        """Whose bytes these are."""
        ...

    def commit(self) -> None:
        """Change the live state; once only."""
        ...


class StateSource(Protocol):
    """``Snapshot``, which says what each of these does and raises, or a stand-in for it."""

    def plan(self, rank: int, *, self_check: bool = False) -> object:
        """Walk the state; StateError for what cannot be carried."""
        ...

    def estimate_bytes(self, rank: int = 0) -> int:
        """Buffer size to reserve before the first step."""
        ...

    def begin_capture(self, buffer: Bytes, header: ShardHeader) -> Captured:
        """Capture the state as of now into ``buffer``, but for what may be late."""
        ...

    def prepare(self, buffer: Bytes) -> Prepared:
        """Check an image against the live state; changes nothing."""
        ...

    def forget_buffers(self) -> None:
        """Let go of the buffers used before."""
        ...
