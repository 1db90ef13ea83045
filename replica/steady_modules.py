"""What of a module decides the text that is kept for it, looked at again in a few passes.

The same facts mean the same keys in the same order as `state_dict()` has. A module that says its
state by code of its own, or that somebody hooked into, is left to the whole walk, which asks. A
loop over the modules takes several times as long as passes over lists of what they have.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain, compress, repeat
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn

from replica.steady_objects import Changed
from replica.torch_private import (
    FSDPModule,
    FullyShardedDataParallel,
    foreign_hooks,
    unsharded_groups,
)

_ASKED = ("state_dict", "_save_to_state_dict", "get_extra_state")
_VALUES = methodcaller("values")
_Owns = Sequence[Mapping[str, Any]]
"""The attributes of each module."""


class ModuleShape:
    """The names of a module and of all below it. Holds no module and no tensor."""

    def __init__(self, root: nn.Module) -> None:
        """Raises `Changed` for modules that are not looked at here."""
        modules = _walk(root)
        self._refs = [weakref.ref(module) for module in modules]
        self._kinds = list(map(type, modules))
        self._groups = [at for at, kind in enumerate(self._kinds) if issubclass(kind, FSDPModule)]
        owns = list(map(vars, modules))
        self._check(modules, owns)
        self._names = _names(owns)
        self._hidden = [frozenset(own["_non_persistent_buffers_set"]) for own in owns]
        where = {id(module): at for at, module in enumerate(modules)}
        # None, too, may stand for a child; it is found behind the last module.
        self._children = [where.get(id(child), -1) for child in _children(owns)]
        values = _values(owns)
        self._nones = list(map(is_, values, repeat(None)))
        self._shown = [
            value is not None and name not in hidden
            for own, hides in zip(owns, self._hidden, strict=True)
            for box, hidden in ((own["_parameters"], ()), (own["_buffers"], hides))
            for name, value in box.items()
        ]

    def tensors(self, root: nn.Module) -> list[torch.Tensor]:
        """The values of `state_dict()`, in its order. Raises `Changed` if its keys may differ."""
        modules: list[Any] = [ref() for ref in self._refs]
        if modules[0] is not root or any(map(is_, modules, repeat(None))):
            raise Changed
        if list(map(type, modules)) != self._kinds:
            raise Changed
        owns = list(map(vars, modules))
        self._check(modules, owns)
        if _names(owns) != self._names:
            raise Changed
        if [own["_non_persistent_buffers_set"] for own in owns] != self._hidden:
            raise Changed
        expected = [*modules, None]
        if not all(map(is_, _children(owns), [expected[at] for at in self._children])):
            raise Changed
        values = _values(owns)
        if list(map(is_, values, repeat(None))) != self._nones:
            raise Changed
        return list(compress(values, self._shown))

    def _check(self, modules: Sequence[nn.Module], owns: _Owns) -> None:
        # Classes are judged each time, for they too can be changed.
        if not all(map(_is_stock, set(self._kinds))):
            raise Changed
        if any(own["_state_dict_hooks"] for own in owns):
            raise Changed
        if any(name in own for name in _ASKED for own in owns):
            raise Changed
        before = [own["_state_dict_pre_hooks"] for own in owns]
        if foreign_hooks(chain.from_iterable(map(_VALUES, before))):
            raise Changed
        if unsharded_groups(modules[at] for at in self._groups):
            raise Changed


def _walk(root: nn.Module) -> list[nn.Module]:
    """In the order of `state_dict()`, one that stands at two places twice."""
    modules: list[nn.Module] = []
    left = [root]
    while left:
        module = left.pop()
        modules.append(module)
        children = vars(module)["_modules"].values()
        left += reversed([child for child in children if child is not None])
    return modules


def _names(owns: _Owns) -> list[object]:
    """How many parameters, buffers and children each has, and all their names."""
    boxes = _boxes(owns)
    boxes += [own["_modules"] for own in owns]
    return [list(map(len, boxes)), list(chain.from_iterable(boxes))]


def _boxes(owns: _Owns) -> list[dict[str, Any]]:
    return [own[name] for own in owns for name in ("_parameters", "_buffers")]


def _values(owns: _Owns) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, _boxes(owns))))


def _children(owns: _Owns) -> list[nn.Module | None]:
    return list(chain.from_iterable(map(_VALUES, [own["_modules"] for own in owns])))


def _is_stock(kind: type[nn.Module]) -> bool:
    """Whether a class saves itself by code of torch alone, from a plain module's attributes."""
    return all(
        getattr(kind, name) is getattr(nn.Module, name) for name in _ASKED
    ) and not issubclass(kind, FullyShardedDataParallel | torch.jit.ScriptModule)
