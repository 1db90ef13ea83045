"""What a plan was made for, compared with the leaves of a later walk in a few passes.

A pass (`map` over a getter) costs 30 to 100 ns per tensor. A tuple of everything per tensor costs
ten times that, and wakes the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch

from replica.leaves import LeafList
from replica.torch_private import DTensor, local_and_spec

Getter = Callable[[Any], object]

# In this order: a tensor that has no strides is found out before it is asked for them.
_LOCAL: tuple[Getter, ...] = (
    attrgetter("dtype"),
    attrgetter("layout"),
    attrgetter("device"),
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)
_WHOLE: tuple[Getter, ...] = (torch.Tensor.size, torch.Tensor.stride)
# A spec can be changed in place: what it is made of is kept beside it.
_SPEC: tuple[Getter, ...] = (
    attrgetter("mesh"),
    attrgetter("placements"),
    attrgetter("tensor_meta"),
)
_BLOCK = 256


class Facts:
    """Everything about the leaves of one walk but addresses and values. Holds no tensor."""

    def __init__(self, leaves: LeafList) -> None:
        self._where = list(leaves.tensors)
        self._others = dict(leaves.keys)
        tensors = leaves.tensor_values()
        # Nothing but complex numbers is ever conjugate.
        any_complex = any(value.is_complex() for value in tensors)
        self._getters = (*_LOCAL, torch.Tensor.is_conj) if any_complex else _LOCAL
        self._local = _columns(self._getters, tensors)
        self._whole_at = list(leaves.wholes)
        wholes = list(leaves.wholes.values())
        self._whole = _columns(_WHOLE, wholes)
        self._specs = _specs(wholes)
        self._spec = _columns(_SPEC, self._specs)

    def hold(self, leaves: LeafList) -> list[int] | None:
        """The addresses of the tensors if these leaves are alike, in number and order too."""
        if (
            leaves.tensors != self._where
            or leaves.keys != self._others
            or list(leaves.wholes) != self._whole_at
        ):
            return None
        tensors, wholes = leaves.tensor_values(), list(leaves.wholes.values())
        specs = _specs(wholes)
        # Equal ones take long to compare, and are mostly the same.
        if not all(map(is_, specs, self._specs)) and specs != self._specs:
            return None
        pointers: list[int] = []
        for block in _blocks(tensors):
            if not _same(self._getters, tensors, self._local, block):
                return None
            pointers += map(torch.Tensor.data_ptr, tensors[block])
        for block in _blocks(wholes):
            if not _same(_WHOLE, wholes, self._whole, block):
                return None
            if not _same(_SPEC, specs, self._spec, block):
                return None
        return pointers


def pointers_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of the first elements."""
    return list(map(torch.Tensor.data_ptr, tensors))


def _specs(wholes: Sequence[DTensor]) -> list[Any]:
    return [local_and_spec(whole)[1] for whole in wholes]


def _columns(getters: tuple[Getter, ...], values: Sequence[object]) -> list[list[object]]:
    return [_shared(map(get, values)) for get in getters]


def _shared(column: Iterable[object]) -> list[object]:
    """The column with equal values made one object: they are few, and the tensors many."""
    known: dict[object, object] = {}
    return [known.setdefault(value, value) for value in column]


def _blocks(values: Sequence[object]) -> Iterator[slice]:
    """All of them in parts that stay in the cache from the first getter to the last.

    Memory that a step has touched is cold, and 100,000 tensors are four times as slow pass by pass.
    """
    return (slice(at, at + _BLOCK) for at in range(0, len(values), _BLOCK))


def _same(
    getters: tuple[Getter, ...],
    values: Sequence[object],
    columns: list[list[object]],
    block: slice,
) -> bool:
    some = values[block]
    return all(
        all(map(eq, map(get, some), column[block]))
        for get, column in zip(getters, columns, strict=True)
    )
