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
from replica.torch_private import likeness, specs_of

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
        getters = (*_LOCAL, torch.Tensor.is_conj) if any_complex else _LOCAL
        self._locals = _Columns(getters, tensors)
        self._whole_at = list(leaves.wholes)
        wholes = list(leaves.wholes.values())
        self._wholes = _Columns(_WHOLE, wholes)
        self._take_specs(specs_of(wholes))

    def hold(self, leaves: LeafList) -> list[int] | None:
        """The addresses of the tensors if these leaves are alike, in number and order too."""
        if (
            leaves.tensors != self._where
            or leaves.keys != self._others
            or list(leaves.wholes) != self._whole_at
        ):
            return None
        wholes = list(leaves.wholes.values())
        if not self._specs_hold(specs_of(wholes)):
            return None
        pointers: list[int] = []
        if not self._locals.hold(leaves.tensor_values(), pointers):
            return None
        return pointers if self._wholes.hold(wholes) else None

    def _take_specs(self, specs: list[object]) -> None:
        self._specs = specs
        # Many tensors have one spec: it is looked into once.
        self._distinct = list({id(spec): spec for spec in specs}.values())
        self._spec = [list(map(get, self._distinct)) for get in _SPEC]

    def _specs_hold(self, specs: list[object]) -> bool:
        if not all(map(is_, specs, self._specs)):
            # Equal ones take long to compare, and are mostly the same.
            if specs != self._specs:
                return False
            self._take_specs(specs)
        inside = [list(map(get, self._distinct)) for get in _SPEC]
        if any(not all(map(is_, *both)) for both in zip(inside, self._spec, strict=True)):
            return inside == self._spec
        return True


class _Columns:
    """What tensors say to each of some getters."""

    def __init__(self, getters: tuple[Getter, ...], values: Sequence[torch.Tensor]) -> None:
        self._getters = getters
        self._columns = _columns(getters, values)
        self._alike = [likeness(values[block]) for block in _blocks(values)]

    def hold(self, values: Sequence[torch.Tensor], pointers: list[int] | None = None) -> bool:
        """Whether as many others say the same; their addresses are added to ``pointers``."""
        for block, alike in zip(_blocks(values), self._alike, strict=True):
            some = values[block]
            if alike is None or not alike(*some):
                columns = [column[block] for column in self._columns]
                if not _same(self._getters, some, columns):
                    return False
            if pointers is not None:
                pointers += map(torch.Tensor.data_ptr, some)
        return True


def pointers_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of the first elements."""
    return list(map(torch.Tensor.data_ptr, tensors))


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
    getters: tuple[Getter, ...], values: Sequence[object], columns: Sequence[list[object]]
) -> bool:
    return all(
        all(map(eq, map(get, values), column)) for get, column in zip(getters, columns, strict=True)
    )
