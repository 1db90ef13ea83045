"""Which leaves of a state may be copied late, and why the others may not. It copies nothing.

Late may be what nothing but the step of a torch optimizer changes: the hook that waits for the copy
is called before every such step in the process. Of an optimizer in the state that is its parameters
and what it keeps for each of them. All else is copied before ``save`` returns, and so is what only
looks like that:

- everything, while a step is under way: what that changes it no longer waits for;
- what an optimizer owns of which no step was seen since the save before: its step is compiled,
  replayed as a CUDA graph or called by another name, or it is no torch optimizer at all;
- a parameter with a hook behind its gradient, which may step in the middle of backward;
- a parameter of no module in the state, which nobody can judge, or of an embedding with
  ``max_norm``, which forward changes;
- a frozen parameter: whoever changes it is no optimizer;
- what lies on a GPU, and is fetched in another way;
- a parameter on a GPU, which is copied by the device itself and waited for;
- memory that an array in the state shares.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch import nn

from replica.device_pieces import on_host
from replica.leaves import LeafList, span
from replica.torch_private import calls_step_hooks, in_backward, local_of

LATE_BYTES_MIN = 1 << 16
"""Smaller leaves are copied at once: that takes less than to hand them over one by one."""

UNOWNED = "it is of no optimizer in the state"
NO_MODULE = "it is of no module in the state"
FROZEN = "it is frozen"
ON_DEVICE = "it lies on a GPU, whose copies are waited for (docs/performance.md)"
IN_BACKWARD = "a hook on its gradient may step in backward"
IN_FORWARD = "its max_norm changes it in forward"
ARRAY = "an array in the state shares its memory"

_OUTSIDE_STEP = ("train", "eval", "first_step")
"""Methods that change parameters and are no step: of schedule-free and sharpness-aware kinds."""

Optimizer = torch.optim.Optimizer
Unseen = Callable[[Optimizer], str]
"""Why an optimizer's next step may not wait, by what the hook has seen of it; "" if it will."""


@dataclass(frozen=True)
class Choice:
    """``late``: numbers of leaves. ``at_once``: bytes of parameters that are not, by the reason."""

    late: frozenset[int]
    at_once: Mapping[str, int]


@dataclass(frozen=True)
class _Owned:
    """One parameter: its own leaves, and those of what its optimizers keep for it."""

    param: torch.Tensor
    owners: tuple[object, ...]
    own: tuple[int, ...]
    kept: tuple[int, ...]
    nbytes: int
    """Of its own leaf, all its names counted once."""
    unfit: str
    """Why its own leaves are copied at once, whatever its optimizers do; "" if they need not."""


class LateLeaves:
    """What a save of this state can leave for later, for as long as ``fits`` says so.

    ``arrays``: the leaves that are no tensors.
    """

    def __init__(self, state: Mapping[str, object], leaves: LeafList, arrays: list[int]) -> None:
        self._objects = list(map(id, state.values()))
        modules, self._owners = _members(state)
        large = _large(leaves)
        self._groups = _members_of_groups(self._owners)
        self._owned = list(_owned(modules, self._owners, large))
        numbers = {number for one in self._owned for number in (*one.own, *one.kept)}
        self._arrays = arrays
        self._reaches = {number: _reach(leaves.values[number]) for number in numbers}
        self._refs = [(number, weakref.ref(leaves.values[number])) for number in sorted(numbers)]

    def fits(self, state: Mapping[str, object], leaves: LeafList) -> bool:
        """Whether the state still has the tensors and the owners that this was made from."""
        values = leaves.values
        return (
            list(map(id, state.values())) == self._objects
            and _members_of_groups(self._owners) == self._groups
            and all(number < len(values) and ref() is values[number] for number, ref in self._refs)
        )

    def choose(self, leaves: LeafList, unseen: Unseen) -> Choice:
        """What may be late at this save."""
        doubts = {id(owner): _doubt(owner, unseen) for owner in self._owners}
        at_once: Counter[str] = Counter()
        late: list[int] = []
        for one in self._owned:
            why = next(filter(None, (doubts[id(owner)] for owner in one.owners)), "")
            why = why or ("" if one.owners else UNOWNED) or _doubt_parameter(one.param)
            if not why:
                late += one.kept
            why = why or one.unfit
            if not why:
                late += one.own
            else:
                at_once[why] += one.nbytes
        shared = set(_shared_with_arrays(leaves, self._arrays, late, self._reaches))
        at_once[ARRAY] += sum(_nbytes(leaves.values[number]) for number in shared)
        return Choice(frozenset(late) - shared, +at_once)


def _large(leaves: LeafList) -> dict[int, list[int]]:
    """Leaves by the id of their local tensor, those that are worth it."""
    found: dict[int, list[int]] = {}
    values = leaves.values
    for number in leaves.tensors:
        value = values[number]
        if _nbytes(value) >= LATE_BYTES_MIN:
            found.setdefault(id(value), []).append(number)
    return found


def _members(state: Mapping[str, object]) -> tuple[list[nn.Module], list[object]]:
    """Modules of the state, and what has groups of parameters in it, torch's own kind or not."""
    modules: list[nn.Module] = []
    owners: list[object] = []
    seen: set[int] = set()
    left: deque[object] = deque(state.values())
    while left:
        value = left.popleft()
        if isinstance(value, dict | list | tuple | deque):
            if id(value) not in seen:
                seen.add(id(value))
                left.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(getattr(value, "param_groups", None), list) and id(value) not in seen:
            seen.add(id(value))
            owners.append(value)
    return modules, owners


def _groups(owner: object) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = owner.param_groups  # type: ignore[attr-defined]
    return [group for group in groups if isinstance(group, dict)]


def _members_of_groups(owners: Iterable[object]) -> list[list[list[int]]]:
    """Which parameters each owner has, by id: those that matter are held by weak references too."""
    return [
        [list(map(id, group.get("params", ()))) for group in _groups(owner)] for owner in owners
    ]


def _owned(
    modules: list[nn.Module], owners: list[object], large: dict[int, list[int]]
) -> Iterator[_Owned]:
    """Every large parameter of the modules and of the optimizers."""
    params: dict[int, torch.Tensor] = {}
    unfit: dict[int, str] = {}
    for module in (inner for root in modules for inner in root.modules()):
        renorms = getattr(module, "max_norm", None) is not None
        for weight in module.parameters(recurse=False):
            params[id(weight)] = weight
            unfit[id(weight)] = IN_FORWARD if renorms else unfit.get(id(weight), "")
    owned_by: dict[int, list[object]] = {}
    for owner in owners:
        for param in (one for group in _groups(owner) for one in group.get("params", ())):
            if isinstance(param, torch.Tensor):
                params[id(param)] = param
                owned_by.setdefault(id(param), []).append(owner)
    for number, param in params.items():
        own = tuple(large.get(id(local_of(param)), ()))
        mine = owned_by.get(number, [])
        kept = {leaf for owner in mine for leaf in _kept(owner, param, large)}
        if own or kept:
            why = unfit.get(number, NO_MODULE) if on_host(local_of(param)) else ON_DEVICE
            nbytes = _nbytes(local_of(param)) if own else 0
            yield _Owned(param, tuple(mine), own, tuple(sorted(kept)), nbytes, why)


def _kept(owner: object, param: torch.Tensor, large: dict[int, list[int]]) -> Iterator[int]:
    """Leaves of what an optimizer keeps for a parameter."""
    if isinstance(owner, Optimizer):
        # A defaultdict: to ask for what is not there would make it.
        for value in owner.state.get(param, {}).values():
            if isinstance(value, torch.Tensor):
                yield from large.get(id(local_of(value)), ())


def _doubt(owner: object, unseen: Unseen) -> str:
    """Why the steps of an optimizer cannot be trusted to wait, "" if they can."""
    name = type(owner).__name__
    if not isinstance(owner, Optimizer):
        return f"{name} is no torch.optim.Optimizer"
    if not calls_step_hooks(owner):
        return f"the step of {name} is not torch's, so that hooks are not called"
    outside = [one for one in _OUTSIDE_STEP if callable(getattr(owner, one, None))]
    if outside:
        return f"{name} has {outside[0]}(), which may change parameters outside of its step"
    if getattr(owner, "_overlap_with_ddp", False):
        return f"{name} steps in backward"
    return unseen(owner)


def _doubt_parameter(param: torch.Tensor) -> str:
    if param.device.type != "cpu":
        return ON_DEVICE
    if not param.requires_grad:
        return FROZEN
    return IN_BACKWARD if in_backward(param) else ""


def _reach(value: Any) -> int:
    return span(value.shape, value.stride()) * int(value.itemsize)


def _nbytes(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, torch.Tensor) else 0


def _shared_with_arrays(
    leaves: LeafList, arrays: list[int], late: list[int], reaches: Mapping[int, int]
) -> Iterator[int]:
    """The late leaves in whose memory, of so many bytes, an array or a bytearray lies."""
    spans = []
    for number in arrays:
        value: Any = leaves.values[number]
        if getattr(value, "nbytes", 1):
            array = np.frombuffer(value, np.uint8) if isinstance(value, bytearray) else value
            spans += [byte_bounds(array)] if isinstance(array, np.ndarray) else []
    if not spans or not late:
        return
    begins, ends = np.array(sorted(spans), np.uint64).T
    furthest = np.maximum.accumulate(ends)
    tensors: list[Any] = [leaves.values[number] for number in late]
    first = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    last = first + np.array([reaches[number] for number in late], np.uint64)
    # Of the arrays that begin before a tensor ends, does any end after that begins?
    before = np.searchsorted(begins, last)
    touched = (before > 0) & (furthest[np.maximum(before, 1) - 1] > first)
    for index in np.flatnonzero(touched):
        yield late[index]
