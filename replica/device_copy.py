"""Copies from GPUs into the arena: few large ones, on a stream of their own.

::

    training thread    save ----- issue ----- copies of CPU tensors ----- wait ---- returns
    current stream     kernels before | event                                       kernels after
    side stream                       wait -> gather, fetch, gather, fetch ... | event

The side stream waits for what the current stream of its device had been given when ``save`` was
called; the training thread waits for the side stream alone. So a save sees what a kernel launched
in its place would see, no kernel that comes after it is seen on any stream, and no other stream is
waited for. Who works on several streams joins them before ``save``, as before any other read.

Tensors that are small, or do not lie in memory as they go into the image, are gathered on the
device into one staging buffer, and that is fetched in one piece. One staging buffer is enough: the
stream fetches it before it gathers the next piece. Neither ``record_stream`` nor a second copy of a
tensor is needed, for sources and buffer are held until the wait is over.

There is no deadline here: a device that hangs stops the training thread at its next step as well,
and it is the other ranks, which have deadlines, that tell of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from replica.bound import Bound
from replica.device_pieces import (
    DIRECT_BYTES,
    STAGING_BYTES,
    DeviceCopy,
    Part,
    Piece,
    plan_pieces,
)
from replica.errors import StateError
from replica.pinned import CudaRuntime, PageLocks

Bytes = npt.NDArray[np.uint8]


class Mark(Protocol):
    """A point on a lane."""

    def synchronize(self) -> None:
        """Return when all that was given to the lane before the point has been done."""
        ...


class Lane(Protocol):
    """The side stream of one device. What it is given it does in that order, later."""

    def capturing(self) -> bool:
        """Whether the current stream of the device is being captured into a graph."""
        ...

    def follow(self) -> None:
        """Do nothing before the current stream of the device has done what it was given so far."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Inside it, work of this thread goes to the lane."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] on the device, for use on the lane alone."""
        ...

    def gather(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy on the device."""
        ...

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to host memory."""
        ...

    def mark(self) -> Mark:
        """A point behind all that was given so far."""
        ...


class CudaLane:
    """A Lane of CUDA (or of ROCm, which torch calls so)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda
        self._device = device
        self._stream = self._cuda.Stream(device)

    def capturing(self) -> bool:
        with self._cuda.device(self._device):
            return bool(self._cuda.is_current_stream_capturing())

    def follow(self) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def active(self) -> AbstractContextManager[object]:
        lane: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return lane

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def gather(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        # The thread sleeps instead of spinning: ranks of one node share its cores.
        event: Mark = self._cuda.Event(blocking=True)
        self._stream.record_event(event)
        return event


class Pending:
    """Copies under way. Keeps sources and buffer until ``wait`` has returned."""

    def __init__(self, marks: Sequence[Mark], keep: object) -> None:
        self._marks, self._keep = list(marks), keep

    def wait(self) -> None:
        """Return when every byte is in the buffer; at once, the second time. Any thread may.

        Raises what the device has to say (RuntimeError) when it could not carry the copies out.
        """
        for mark in list(self._marks):
            mark.synchronize()
        self._marks, self._keep = [], None


class DeviceCopies:
    """The copies from devices of one plan. Keeps no tensor of the state.

    It keeps a staging buffer and a stream per device, and views of the last buffers until
    ``forget_buffers``. One thread at a time may ``issue``.
    """

    def __init__(
        self,
        copies: Sequence[DeviceCopy],
        *,
        make_lane: Callable[[torch.device], Lane] | None = None,
        locks: PageLocks | None = None,
        staging_bytes: int = STAGING_BYTES,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        self._make_lane = make_lane or CudaLane
        self._locks = locks or LOCKS
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for copy in copies:
            by_device.setdefault(copy.device, []).append(copy)
        self._pieces = {
            device: plan_pieces(some, staging_bytes=staging_bytes, direct_bytes=direct_bytes)
            for device, some in by_device.items()
        }
        self._lanes: dict[torch.device, Lane] = {}
        self._stagings: dict[torch.device, _Staging] = {}
        self._bound: Bound[dict[torch.device, list[torch.Tensor]]] = Bound()
        self._last = Pending((), None)

    @property
    def pieces(self) -> int:
        """How many copies from devices one save takes."""
        return sum(map(len, self._pieces.values()))

    def issue(self, values: Sequence[Any], buffer: Bytes) -> Pending:
        """Start every copy of the leaves ``values`` into ``buffer``, as of now.

        The caller waits for what is returned before it lets anybody change the tensors, read the
        buffer or unmap it. When this raises, nothing is under way any more.
        """
        if not self._pieces:
            return self._last
        # An interrupt may have kept the caller before from waiting.
        self._last.wait()
        for device in self._pieces:
            if self._lane(device).capturing():
                raise StateError(
                    f"save() was called while a CUDA graph is captured on {device}: its kernels "
                    "have not run and there is no state to save; call it after the capture"
                )
        self._locks.lock(buffer)
        # What is made in inference mode could never be written to outside of it.
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._start(values, buffer, self._bound.get(buffer, partial(self._bind, buffer)))

    def _start(
        self, values: Sequence[Any], buffer: Bytes, targets: dict[torch.device, list[torch.Tensor]]
    ) -> Pending:
        started: list[Lane] = []
        try:
            for device, pieces in self._pieces.items():
                lane = self._lane(device)
                lane.follow()
                started.append(lane)
                with lane.active():
                    self._run(lane, self._staging(device, lane), pieces, targets[device], values)
            self._last = Pending([lane.mark() for lane in started], (values, buffer))
            return self._last
        except BaseException:
            for lane in started:
                lane.mark().synchronize()
            raise

    def forget_buffers(self) -> None:
        """Drop the views of buffers, so that their mappings can go."""
        self._last.wait()
        self._bound.clear()

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._make_lane(device)
        return self._lanes[device]

    def _run(
        self,
        lane: Lane,
        staging: _Staging,
        pieces: list[Piece],
        targets: list[torch.Tensor],
        values: Sequence[Any],
    ) -> None:
        for piece, groups, target in zip(pieces, staging.groups, targets, strict=True):
            if piece.whole is not None:
                lane.fetch(target, piece.whole.source(values[piece.whole.leaf]))
                continue
            for group in groups:
                sources = [part.source(values[part.leaf]) for part in group.parts]
                lane.gather(group.targets, sources)
            lane.fetch(target, staging.memory[: piece.nbytes])

    def _staging(self, device: torch.device, lane: Lane) -> _Staging:
        if device not in self._stagings:
            self._stagings[device] = _Staging(lane, self._pieces[device])
        return self._stagings[device]

    def _bind(self, buffer: Bytes) -> dict[torch.device, list[torch.Tensor]]:
        whole = torch.from_numpy(buffer)
        return {
            device: [_target(whole, piece) for piece in pieces]
            for device, pieces in self._pieces.items()
        }


def _target(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    run = whole[piece.start : piece.start + piece.nbytes]
    return run if piece.whole is None else run.view(piece.whole.dtype).view(piece.whole.shape)


@dataclass(frozen=True)
class _Group:
    """Parts of a piece that one call gathers: of one dtype, so that it takes one kernel for many.

    Those that do not lie densely are apart: one of them would have all copied one by one.
    """

    parts: list[Part]
    targets: list[torch.Tensor]


class _Staging:
    """Device memory for one piece, and where in it the parts of each piece go."""

    def __init__(self, lane: Lane, pieces: Sequence[Piece]) -> None:
        self.memory = lane.empty(max((piece.nbytes for piece in pieces if piece.parts), default=0))
        self.groups = [self._grouped(piece) for piece in pieces]

    def _grouped(self, piece: Piece) -> list[_Group]:
        groups: dict[tuple[torch.dtype, bool], _Group] = {}
        for part in piece.parts:
            group = groups.setdefault((part.dtype, part.dense), _Group([], []))
            begin = part.start - piece.start
            run = self.memory[begin : begin + part.nbytes]
            group.parts.append(part)
            group.targets.append(run.view(part.dtype).view(part.shape))
        return list(groups.values())


LOCKS = PageLocks(CudaRuntime())
"""Those of this process: what could not be locked once is not tried for another plan."""
