"""Overlap mode: what ``save`` leaves to be copied behind forward and backward.

::

    training thread  save: all but the late leaves | forward, backward | step: hook, then the update
    late copy             the late leaves, piece by piece  ............| helps, waits
    background                                                           digests, sends

One hook for the process, called before the step of every torch optimizer and before hooks of the
optimizer's own, does the waiting: whatever an optimizer changes, in the state or not, it changes
after it. Another one, called after each step, notes that it has ended: inside of a step nothing is
late. Which leaves may be late is decided in ``late_leaves.py``, on evidence: an optimizer counts as
hooked while the hook sees it step between two saves. Why it is done so:
``docs/adr/0007-overlap.md``.
"""

from __future__ import annotations

import logging
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from replica.copies import CopyPlan, LateCopies
from replica.image import Bytes
from replica.late_copy import LateCopy, LateTensor
from replica.late_leaves import LATE_BYTES_MIN, Choice, LateLeaves
from replica.leaves import LeafList
from replica.open_steps import OpenSteps
from replica.torch_private import DTensor, in_compiled_code, local_and_spec

log = logging.getLogger("planaria")

UNSEEN = "no step was seen"
INSIDE = "save() was called while an optimizer's step was under way, which may change it"

_open: list[Overlap] = []
_steps = OpenSteps()
_handles: list[RemovableHandle] = []


class Overlap:
    """Decides at each save what may be late, and has optimizers wait for it. Until ``close``.

    For one training thread; the hook may be called in any.
    """

    def __init__(self, *, rank: int, timeout_s: float, check: bool) -> None:
        self._rank, self._timeout_s, self._check = rank, timeout_s, check
        self._current: LateCopy | None = None
        self._leaves: LateLeaves | None = None
        self._plan: Callable[[], CopyPlan | None] = lambda: None
        self._steps: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._saves = 0
        self._said: set[str] = set()
        _register(self)

    def close(self, timeout_s: float) -> None:
        """Have the late copy end, whole or given up after ``timeout_s``; nobody waits any more."""
        self.wait(timeout_s)
        _unregister(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no late copy is under way any more; help with it meanwhile.

        One that does not end in time (None: the option's) is given up, and its save aborted.
        """
        late = self._current
        if late is not None:
            late.help(self._timeout_s if timeout_s is None else timeout_s)

    def before_step(self, optimizer: torch.optim.Optimizer, *, compiled: bool) -> None:
        """For the hook: an optimizer is about to change what it owns."""
        self._steps[id(optimizer)] = (weakref.ref(optimizer), compiled)
        self.wait()

    def late(self, state: Mapping[str, object], leaves: LeafList, plan: CopyPlan) -> frozenset[int]:
        """Numbers of the leaves that this save may leave for later."""
        # Only one late copy at a time: an aborted save's may still be under way.
        self.wait()
        if self._plan() is not plan or self._leaves is None or not self._leaves.fits(state, leaves):
            arrays = [leaf for _, leaf in plan.plain]
            self._leaves, self._plan = LateLeaves(state, leaves, arrays), weakref.ref(plan)
        # Inside of whichever step: it may own the same memory, in the state or not.
        unseen = _inside if _steps.any() else self._unseen
        told = choice = self._leaves.choose(leaves, unseen)
        if not self._saves:
            # Before the first one no step can have been seen; said is what is so for all that.
            told = self._leaves.choose(leaves, lambda owner: _but_unseen(unseen(owner)))
        if any(why.startswith(UNSEEN) for why in choice.at_once):
            self._leaves = None  # perhaps the state has another optimizer by now
        self._say(told, state, leaves)
        self._steps.clear()
        self._saves += 1
        return choice.late

    def begin(self, rest: LateCopies, leaves: LeafList, plan: CopyPlan, buffer: Bytes) -> LateCopy:
        """Watch what a capture has left to be copied; the caller starts it."""
        base = buffer.__array_interface__["data"][0]
        starts, entries = plan.layout.starts, plan.layout.entries
        number: dict[int, int] = {}
        tensors: list[LateTensor] = []
        for (target, _, _), leaf in zip(rest.pieces, rest.leaves, strict=True):
            if leaf not in number:
                number[leaf] = len(tensors)
                name = entries[bisect_right(starts, target - base) - 1].name
                tensors.append(_watched(name, leaf, leaves))
        self._current = LateCopy(
            rest.pieces,
            [number[leaf] for leaf in rest.leaves],
            tensors,
            keep=rest.keep,
            rank=self._rank,
            check=self._check,
        )
        return self._current

    def _unseen(self, optimizer: torch.optim.Optimizer) -> str:
        ref, compiled = self._steps.get(id(optimizer), (lambda: None, False))
        name = type(optimizer).__name__
        if ref() is not optimizer:
            return f"{UNSEEN} of {name} since the save before: it may be compiled, or a CUDA graph"
        return f"the step of {name} is compiled" if compiled else ""

    def _say(self, choice: Choice, state: Mapping[str, object], leaves: LeafList) -> None:
        """One line for what is new: nobody would see why save() takes longer than it could."""
        new = {why: size for why, size in choice.at_once.items() if why not in self._said}
        if new:
            # Where a part of them was told before, it is not known which are new.
            names = _at_once(choice, state, leaves) if len(new) == len(choice.at_once) else []
            self._said.update(new)
            because = "because" if len(names) == 1 else "each because"
            told = "; ".join(f"{size} bytes, {because} {why}" for why, size in new.items())
            level = logging.WARNING if self._rank == 0 else logging.INFO
            log.log(level, "overlap=True, but save() copies %s itself: %s", _some(names), told)


def _inside(_optimizer: torch.optim.Optimizer) -> str:
    return INSIDE


def _but_unseen(why: str) -> str:
    return "" if why.startswith(UNSEEN) else why


def _at_once(choice: Choice, state: Mapping[str, object], leaves: LeafList) -> list[str]:
    """Names of the large parameters that are not late, of the modules that the state names."""
    copied = {id(leaves.values[number]) for number in leaves.tensors if number not in choice.late}
    named = (
        (f"{key}.{name}", local_and_spec(param)[0] if isinstance(param, DTensor) else param)
        for key, value in state.items()
        if isinstance(value, nn.Module)
        for name, param in value.named_parameters()
    )
    return [name for name, one in named if id(one) in copied and one.nbytes >= LATE_BYTES_MIN]


def _some(names: list[str]) -> str:
    if len(names) > 1:
        return f"{len(names)} parameters, {names[0]} the first of them,"
    return f"the parameter {names[0]}" if names else "parameters"


def _watched(name: str, leaf: int, leaves: LeafList) -> LateTensor:
    local: Any = leaves.values[leaf]
    storage = local.untyped_storage()
    watched = leaves.wholes.get(leaf, local)
    return LateTensor(name, watched, storage, storage.data_ptr(), watched._version)  # noqa: SLF001


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    # Traced or not: where the locks below are reached tracing breaks off, so that they are taken.
    compiled = torch.compiler.is_compiling() or in_compiled_code()
    _steps.begin(optimizer)
    for one in tuple(_open):
        one.before_step(optimizer, compiled=compiled)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    _steps.end(optimizer)


def _register(one: Overlap) -> None:
    _open.append(one)
    if not _handles:  # one of each per process, as torch's lists of them are
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))


def _unregister(one: Overlap) -> None:
    if one in _open:
        _open.remove(one)
    if not _open:
        while _handles:
            _handles.pop().remove()


# In a forked child there is no late copy: its threads are the parent's.
os.register_at_fork(after_in_child=_open.clear)
