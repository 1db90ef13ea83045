"""How much state an optimizer that has not stepped yet will keep, from its options alone.

A real step would be exact, but it would change the run (Adam's step counter) or need gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from replica.scalars import only_scalars
from replica.torch_private import local_of

# Per tensor of optimizer state: its row in the tree, its member of the header, its step counter.
_PER_TENSOR_BYTES = 256


def predicted_state_bytes(state: MutableMapping[str, object]) -> int:
    """Bytes that optimizers with empty state will add to the image."""
    return sum(_optimizer_bytes(found) for found in optimizers_of(dict(state), set()))


def optimizers_of(value: object, seen: set[int]) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of a state; `seen` has the ids of what was looked through."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from optimizers_of(item, seen)
    elif isinstance(value, list | tuple) and not only_scalars(value):
        for item in value:
            yield from optimizers_of(item, seen)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    if optimizer.state:
        return 0
    total = 0
    for group in optimizer.param_groups:
        copies = _copies_per_parameter(group)
        for param in group["params"]:
            if param.requires_grad:
                local = local_of(param)
                nbytes = local.numel() * local.itemsize
                total += copies * (nbytes + _PER_TENSOR_BYTES) + _PER_TENSOR_BYTES
    return total


def _copies_per_parameter(group: dict[str, Any]) -> int:
    """Tensors of the parameter's size that torch's optimizers keep, told by their options."""
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    if "centered" in group:
        return 1 + bool(group.get("momentum")) + bool(group["centered"])
    if "momentum" in group:
        return int(bool(group["momentum"]))
    return 2
