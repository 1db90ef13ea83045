"""Which steps of torch optimizers are under way: begun, with their hooks called, and not ended.

What runs inside of one, a closure or a hook, comes before changes that nobody will wait for. A step
of the calling thread is seen on its stack, begun before anything was hooked or ended by an error as
it may be. The hooks note the others: those of other threads, and those whose frame is not torch's
own, compiled ones say. Of these one that an error ended counts as under way for longer than it is:
until its thread steps again or ends; a compiled one for as long as its optimizer lives.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from replica.torch_private import HOOKED_STEP, untraced

_UNKNOWN = 0


@dataclass(frozen=True)
class _Step:
    optimizer: weakref.ref[Any]
    depth: int
    """Of torch's frame in its thread's stack; `_UNKNOWN` where another one called the hook."""


class OpenSteps:
    """The steps under way in this process. Each thread writes to its own list, and to no other.

    No lock: a signal may interrupt the hook, and step or save itself.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[_Step]] = {}

    @untraced
    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step; for the function that torch calls before it, and for no other."""
        depths = dict(_hooked(frame := sys._getframe(2)))  # noqa: SLF001 - documented
        depth = depths.pop(frame, _UNKNOWN)
        thread = threading.get_ident()
        on_stack = {_UNKNOWN, *depths.values()}
        older = [step for step in self._of.get(thread, ()) if step.depth in on_stack]
        self._of[thread] = [*older, _Step(weakref.ref(optimizer), depth)]

    @untraced
    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of the step of this optimizer that was begun last."""
        thread = threading.get_ident()
        steps = self._of.get(thread, [])
        for index in reversed(range(len(steps))):
            if steps[index].optimizer() is optimizer:
                del steps[index:]  # those begun inside of it have ended, by an error
                break
        if not steps:
            self._of.pop(thread, None)

    @untraced
    def any(self) -> bool:
        """Whether one is under way, in this thread or in another."""
        # The caller's: one that held its own frame would keep all that it holds from being freed.
        if next(_hooked(sys._getframe(1)), None) is not None:  # noqa: SLF001 - documented
            return True
        if not self._of:
            return False
        thread, alive = threading.get_ident(), set(sys._current_frames())  # noqa: SLF001
        return any(
            step.optimizer() is not None
            for of, steps in list(self._of.items())
            if of in alive
            for step in list(steps)
            if of != thread or step.depth == _UNKNOWN
        )


def _hooked(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Frames of torch's steps at and below this one of the calling thread, each with its depth."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    for above, one in enumerate(frames):
        if one.f_code is HOOKED_STEP:
            yield one, len(frames) - above
