"""One warning when `save` comes between a backward pass and the step that uses it up.

Gradients are not carried: a restore begins the accumulation anew, so what was added up before the
save would be missing from the next step. No tensor is looked at in the usual case. Of each
registered optimizer a few parameters are sampled; torch's hook after every optimizer step notes
their gradients with their versions. A gradient that stands there at a save and was not noted has
been written to since.

Meant to be silent rather than to cry wolf. Gradients that were used up and not yet cleared, that
were set to zero in place, or that are not finite (whose step a GradScaler left out) do not count;
nor do those of an optimizer whose steps the hook does not see, as in a compiled step.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from replica.predict import optimizers_of
from replica.torch_private import FSDPModule, local_of, unreduced_gradients
from replica.unsupported import path_text

log = logging.getLogger("planaria")

T = TypeVar("T")

_SAMPLES = 8
"""So many groups of an optimizer, parameters of a group, FSDP2 modules of a model are looked at."""
_CORNER = 8
"""Of a gradient that was not noted, so many values in each dimension decide whether it is zero."""


class _Used:
    """The gradients of an optimizer's sampled parameters that a step has used up."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped = False
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.note(optimizer)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        self._noted = {
            id(param): (weakref.ref(grad), local_of(grad)._version)  # noqa: SLF001 - torch's own docs name it
            for param, grad in _gradients(optimizer)
        }

    def new(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Sampled gradients that were written to since the last note."""
        if not self.stepped and optimizer.state:
            return []  # its steps are not seen
        found = []
        for param, grad in _gradients(optimizer):
            noted = self._noted.get(id(param))
            same = noted is not None and noted[0]() is grad
            if not same or noted is None or noted[1] != local_of(grad)._version:  # noqa: SLF001
                found.append(grad)
        return found


_used: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Used] = weakref.WeakKeyDictionary()
_said: set[str] = set()
"""What this process has done once for all its Checkpointers: the hook, the warning."""


class PendingGradients:
    """Watches the optimizers and FSDP2 modules of a state; for the training thread."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._optimizers: list[tuple[str, weakref.ref[torch.optim.Optimizer]]] = []
        self._modules: list[tuple[str, weakref.ref[nn.Module]]] = []
        self.watch()

    def watch(self) -> None:
        """Look through the state for optimizers and modules; those known stay known."""
        self._optimizers, self._modules = [], []
        for key, value in dict(self._state).items():
            path = path_text([key])
            for optimizer in optimizers_of(value, set()):
                if optimizer not in _used:
                    _used[optimizer] = _Used(optimizer)
                    _register_once()
                self._optimizers.append((path, weakref.ref(optimizer)))
            if isinstance(value, nn.Module):
                sharded = [one for one in value.modules() if isinstance(one, FSDPModule)]
                for module in _spread(sharded):
                    self._modules.append((path, weakref.ref(module)))

    def check(self, step: int, rank: int) -> None:
        """Warn, once per process, if gradients wait for their step."""
        if "pending" in _said:
            return
        path = self._found()
        if path is None:
            return
        _said.add("pending")
        log.warning(
            "rank %d: step %d is saved while gradients wait: backward has run since the last "
            "optimizer step (%s). Gradients are not carried, so after a restore they start from "
            "none: save right after optimizer.step(), or keep them in the state yourself. "
            "Said once",
            rank,
            step,
            path,
        )

    def _found(self) -> str | None:
        for path, watched in self._optimizers:
            optimizer = watched()
            used = None if optimizer is None else _used.get(optimizer)
            if optimizer is not None and used is not None and _weighty(used.new(optimizer)):
                return path
        for path, reference in self._modules:
            module = reference()
            if module is not None and unreduced_gradients(module):
                return path
        return None


def _register_once() -> None:
    if "hook" not in _said:
        _said.add("hook")
        register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiler reads no further, so nothing of this is in the compiled step
    used = _used.get(optimizer)
    if used is not None:
        used.stepped = True
        used.note(optimizer)


def _gradients(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group in _spread(optimizer.param_groups):
        for param in _spread(group["params"]):
            if param.grad is not None:
                yield param, param.grad


def _spread(items: Sequence[T]) -> list[T]:
    """At most ``_SAMPLES`` of the items, evenly spread, the first and the last among them."""
    if len(items) <= _SAMPLES:
        return list(items)
    return [items[(len(items) - 1) * place // (_SAMPLES - 1)] for place in range(_SAMPLES)]


def _weighty(grads: Sequence[torch.Tensor]) -> bool:
    """Whether some gradient has a value other than zero, and all are finite."""
    sums = []
    for grad in grads:
        values = local_of(grad).detach()
        values = values._values() if values.is_sparse else values  # noqa: SLF001 - no copy
        corner = values[(slice(_CORNER),) * values.dim()]
        sums.append(float(corner.abs().sum()))
    return all(map(math.isfinite, sums)) and any(sums)
