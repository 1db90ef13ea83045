"""What of a module decides the text that is kept for it, looked at again in a few passes.

The same facts mean the same keys in the same order as `state_dict()` has. A module that says its
state by code of its own, or that somebody hooked into, is left to the whole walk, which asks. A
loop over the modules takes several times as long as passes over lists of what they have.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import contains, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

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
_BOXES: frozenset[type] = frozenset({dict, OrderedDict})


class ModuleShape:
    """The names of a module and of all below it. Holds no module and no tensor."""

    def __init__(self, root: nn.Module) -> None:
        """Raises `Changed` for modules that are not looked at here."""
        modules = _walk(root)
        self._refs = [weakref.ref(module) for module in modules]
        self._kinds = list(map(type, modules))
        self._groups = [at for at, kind in enumerate(self._kinds) if issubclass(kind, FSDPModule)]
        parts = self._look(modules)
        self._names = parts.names()
        self._hidden = list(map(frozenset, parts.hidden))
        where = {id(module): at for at, module in enumerate(modules)}
        # None, too, may stand for a child; it is found behind the last module.
        self._children = [where.get(id(child), -1) for child in _inside(parts.children)]
        values = parts.values()
        self._nones = list(map(is_, values, repeat(None)))
        persistent: frozenset[str] = frozenset()
        self._shown = [
            value is not None and name not in hidden
            for params, buffers, hides in zip(
                parts.params, parts.buffers, self._hidden, strict=True
            )
            for box, hidden in ((params, persistent), (buffers, hides))
            for name, value in box.items()
        ]

    def tensors(self, root: nn.Module) -> list[torch.Tensor]:
        """The values of `state_dict()`, in its order. Raises `Changed` if its keys may differ."""
        modules: list[Any] = [ref() for ref in self._refs]
        if modules[0] is not root or any(map(is_, modules, repeat(None))):
            raise Changed
        if list(map(type, modules)) != self._kinds:
            raise Changed
        parts = self._look(modules)
        if parts.names() != self._names or list(parts.hidden) != self._hidden:
            raise Changed
        expected = [*modules, None]
        if not all(map(is_, _inside(parts.children), [expected[at] for at in self._children])):
            raise Changed
        values = parts.values()
        if list(map(is_, values, repeat(None))) != self._nones:
            raise Changed
        return list(compress(values, self._shown))

    def _look(self, modules: Sequence[nn.Module]) -> _Parts:
        """What the modules have; `Changed` where it does not say all that `state_dict()` would."""
        # Classes are judged each time, for they too can be changed.
        if not all(map(_is_stock, set(self._kinds))):
            raise Changed
        owns = list(map(vars, modules))
        if any(any(map(contains, owns, repeat(name))) for name in _ASKED):
            raise Changed
        parts = _Parts(*zip(*map(_PARTS, owns), strict=True))
        if not _BOXES.issuperset(map(type, chain(parts.params, parts.buffers, parts.children))):
            raise Changed
        if any(parts.after) or foreign_hooks(_inside(filter(None, parts.before))):
            raise Changed
        if unsharded_groups(modules[at] for at in self._groups):
            raise Changed
        return parts


class _Parts(NamedTuple):
    """Columns of some attributes, a row for each module."""

    params: tuple[dict[str, Any], ...]
    buffers: tuple[dict[str, Any], ...]
    children: tuple[dict[str, nn.Module | None], ...]
    hidden: tuple[set[str], ...]
    before: tuple[dict[int, Any], ...]
    after: tuple[dict[int, Any], ...]

    def boxes(self) -> list[dict[str, Any]]:
        """Parameters and buffers of the first module, of the second, and so on."""
        return list(chain.from_iterable(zip(self.params, self.buffers, strict=True)))

    def names(self) -> list[object]:
        """How many parameters, buffers and children each has, and all their names."""
        boxes = [*self.boxes(), *self.children]
        return [list(map(len, boxes)), list(chain.from_iterable(boxes))]

    def values(self) -> list[Any]:
        """All parameters and buffers, in that order."""
        return _inside(self.boxes())


# In one go: what lies in a module's dict is cold, and 1,400 of them are more than the cache keeps.
_PART_NAMES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
)
_PARTS = itemgetter(*_PART_NAMES)


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


def _inside(boxes: Iterable[Mapping[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, boxes)))


def _is_stock(kind: type[nn.Module]) -> bool:
    """Whether a class saves itself by code of torch alone, from a plain module's attributes."""
    return (
        all(getattr(kind, name) is getattr(nn.Module, name) for name in _ASKED)
        and not issubclass(kind, FullyShardedDataParallel | torch.jit.ScriptModule)
        and kind.__getattribute__ is object.__getattribute__
        and not any(hasattr(kind, name) for name in _PART_NAMES)
    )
