"""What a plan was made for, compared with the leaves of a later walk in a few passes.

A pass (`map` over a getter) costs 30 to 100 ns per tensor. A tuple of everything per tensor costs
ten times that, and wakes the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch

from replica.leaves import LeafList
from replica.torch_private import SPEC_FIELDS, likeness, specs_of

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
_inside = attrgetter(*SPEC_FIELDS)
_is_nested = attrgetter("is_nested")
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
        self._specs = _Specs(specs_of(wholes))

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
        try:
            if not self._locals.hold(leaves.tensor_values(), pointers):
                return None
        except RuntimeError:
            # A wrapper of torch.func has no memory; the walk says so by its name.
            return None
        return pointers if self._wholes.hold(wholes) else None

    def _specs_hold(self, specs: list[object]) -> bool:
        known = self._specs
        if not all(map(is_, specs, known.all)):
            # Each is held against what its predecessor was made of: that one may have been changed.
            if not known.hold(specs):
                return False
            known = self._specs = _Specs(specs)
        return known.unchanged()


class _Specs:
    """The specs of some DTensors, and what they are made of: a spec can be changed in place."""

    def __init__(self, specs: list[object]) -> None:
        self.all = specs
        # Many tensors have one spec: it is looked into once.
        distinct = {id(spec): spec for spec in specs}
        self._distinct = list(distinct.values())
        self._made_of = [_inside(spec) for spec in self._distinct]
        number = {one: at for at, one in enumerate(distinct)}
        self._number = [number[id(spec)] for spec in specs]

    def unchanged(self) -> bool:
        """Whether they are still made of that."""
        found = list(map(_inside, self._distinct))
        same = all(map(is_, chain(*found), chain(*self._made_of)))
        # Equal ones take long to compare, and are mostly the same.
        return same or found == self._made_of

    def hold(self, others: Sequence[object]) -> bool:
        """Whether as many others are made of the same."""
        return [self._made_of[at] for at in self._number] == list(map(_inside, others))


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
            # Those of a nested tensor would end the process where the guards ask for its strides.
            if any(map(_is_nested, some)):
                return False
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
