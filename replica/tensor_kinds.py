"""Which tensors are carried as dense bytes, and why the others are not: for code and docs.

Reading a tensor that has no memory of its own would end the process, so whatever is not known to
be dense memory is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from replica.device_pieces import CARRIED
from replica.dtypes import DTYPES
from replica.image import MAX_DIMS, MAX_NODES

PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})
SIZE_LIMIT = 1 << 48
"""Sizes and strides are below it: the reader takes no more."""
ELEMENTS_LIMIT = 1 << 60

NODES_PER_TENSOR = 15
"""Values of JSON that a tensor takes in the structure, at least."""
MAX_TENSORS = MAX_NODES // NODES_PER_TENSOR
"""More are refused while they are walked over, long before their structure is too long to read."""
TOO_MANY = (
    "an image describes no more; join small tensors that belong together into one "
    "(torch.stack, torch.cat) before the first save"
)

REORDERED = (
    "whose shards are dealt out in another order than that of the mesh's dimensions, in which a "
    "restore could not build it; redistribute it to that order before the first save"
)
"""A rule for the whole of a DTensor; those below are for local tensors."""

MISALIGNED = (
    "share memory, one of them at a part of an element of the other, which no new memory could "
    "have again; carry a clone() of one"
)
"""A rule for two of them. Goes on after "state['a'] and state['b']"."""

QUANTIZED = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith("q"))
"""The scales of these are not in their bytes."""


def is_wrapper(value: torch.Tensor) -> bool:
    """Whether a tensor is made of others by torch's flattening protocol. A DTensor is one too."""
    kind = type(value)
    return (
        kind not in PLAIN_TENSORS
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and not value.is_nested
    )


@dataclass(frozen=True)
class Refusal:
    """One kind of tensor that is refused."""

    kind: str
    found: Callable[[torch.Tensor], bool]
    why: str
    """Goes on after "state['a'] is a torch.Tensor, "."""


REFUSALS = (
    Refusal(
        "parameters that are not initialised yet",
        lambda value: isinstance(value, UninitializedParameter | UninitializedBuffer),
        "which has no values yet; run one forward pass before the first save",
    ),
    Refusal(
        "nested tensors",
        lambda value: value.is_nested,
        "a nested tensor; carry its values() and offsets(), or the list of its unbind()",
    ),
    Refusal(
        "wrapper subclasses that are no parameter or buffer of a module",
        is_wrapper,
        "a tensor subclass, which is carried only as a parameter or buffer of a module that is "
        "there when it is restored",
    ),
    Refusal(
        "other tensor subclasses",
        lambda value: type(value) not in PLAIN_TENSORS,
        "a tensor subclass, which could not come back as itself; carry as_subclass(torch.Tensor)",
    ),
    Refusal(
        "sparse and mkldnn layouts",
        lambda value: value.layout is not torch.strided,
        "whose layout is not dense; carry its indices and values, or to_dense()",
    ),
    Refusal(
        "the meta device",
        lambda value: value.is_meta,
        "on the meta device, which has no values; materialise it before the first save",
    ),
    Refusal(
        "devices other than the processor and CUDA (with ROCm, which torch calls CUDA)",
        lambda value: value.device.type not in CARRIED,
        "on a device whose copies cannot be ordered here; carry its cpu()",
    ),
    Refusal(
        "quantized dtypes",
        lambda value: value.dtype in QUANTIZED,
        "quantized: its scales would be lost; carry int_repr() and the scales",
    ),
    Refusal(
        f"more than {MAX_DIMS} dimensions",
        lambda value: value.dim() > MAX_DIMS,
        f"with more than {MAX_DIMS} dimensions",
    ),
    Refusal(
        "sizes or strides beyond any memory",
        lambda value: not _in_range(value),
        "with a size or stride beyond what an image describes",
    ),
    Refusal(
        "tensors without memory of their own",
        lambda value: not _has_memory(value),
        "which has no memory of its own: a zero or traced tensor, or one whose storage was freed",
    ),
)
"""In the order in which they are looked for."""


def refusal(value: torch.Tensor) -> str | None:
    """Why a tensor cannot be carried, None if it can."""
    if (
        type(value) in PLAIN_TENSORS
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type in CARRIED
        and value.dtype not in QUANTIZED
        and value.dim() <= MAX_DIMS
        and _in_range(value)
        and _has_memory(value)
    ):
        return None
    return next(rule.why for rule in REFUSALS if rule.found(value))


def _in_range(value: torch.Tensor) -> bool:
    sizes = (*value.shape, *value.stride())
    return max(sizes, default=0) < SIZE_LIMIT and value.numel() < ELEMENTS_LIMIT


def _has_memory(value: torch.Tensor) -> bool:
    try:
        return value.data_ptr() != 0 or not value.numel()
    except RuntimeError:
        # How functorch's and other wrappers say that there is nothing to read.
        return False
