"""Reading a state again that was read before: a stored recipe instead of a whole walk.

A walk makes a node for every value and JSON of every node. Most of it is the same save after save:
the names of parameters, the numbers of leaves. A recipe keeps that text. To read by it, everything
that the walk would read is looked at again but for values: the same containers, keys, modules and
hooks in the same places give the same text, and tensors are only picked up. Python values, and
whatever says its state by its own code, are read anew by the walk's own `Encoder`, between the
pieces of text that are kept.

What is found changed, or is not known here, ends the reading (`None`), and the whole walk takes
over. A recipe is checked when it is made: it must give what the walk gave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn

from replica.leaves import LeafList
from replica.random_states import capture_random_states
from replica.state import MODULE, Live
from replica.steady_modules import ModuleShape
from replica.steady_objects import Changed, look_at_optimizer
from replica.tensor_kinds import PLAIN_TENSORS
from replica.torch_private import DTensor, locals_of
from replica.tree import Encoder, Node, items, leaf_names, node_text, pairs
from replica.unsupported import Unsupported

_TENSORS = PLAIN_TENSORS | {DTensor}
_MAPPINGS: frozenset[type] = frozenset({dict, OrderedDict})
_SEQUENCES: frozenset[type] = frozenset({list, tuple})
_CONTAINERS = _MAPPINGS | _SEQUENCES
_KEYS: frozenset[type] = frozenset({str, int})
"""Equal keys of one of these types have equal text."""
_PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, complex, str, bytes})


class Asked:
    """Asks objects for their state, each once in a save: two walks of one save hear the same."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._said: dict[int, tuple[object, tuple[str, object] | None]] = {}

    def __call__(self, value: object) -> tuple[str, object] | None:
        found = self._said.get(id(value))
        if found is None:
            # The object too, for its number must not be given to another one.
            found = self._said[id(value)] = value, self._live(value)
        return found[1]


class _Reading:
    """What one reading gathers: the leaves, and the text of what was read anew."""

    def __init__(self, live: Live) -> None:
        self.leaves = LeafList()
        self.encoder = Encoder(self.leaves, live)
        self.said: list[str] = []

    def say(self, node: Node, count: int, names: list[tuple[int, str]]) -> None:
        """Take a value's node, made when there were `count` leaves; `Changed` for other leaves."""
        found = len(self.leaves.values) > count
        if (found or names) and list(leaf_names(node)) != names:
            raise Changed
        self.said.append(node_text(node))


class _Part(Protocol):
    def read(self, value: Any, reading: _Reading) -> None:
        """Read one value that stands where the part was made; `Changed` if it is not as then."""
        ...


@dataclass(frozen=True)
class _Value:
    """Any value that is read anew. It may have other leaves than before only if they are alike."""

    names: list[tuple[int, str]]
    """Numbers of its leaves, and their names from here on."""
    inside: bool = False
    """It lies in the state of an object, where there can be no further object."""

    def read(self, value: Any, reading: _Reading) -> None:
        encoder = reading.encoder
        count = len(reading.leaves.values)
        reading.say(
            encoder.inner(value) if self.inside else encoder.encode(value), count, self.names
        )


@dataclass
class _Row:
    """Values side by side: tensors, and other parts between them by their positions."""

    count: int = 0
    others: list[tuple[int, _Part]] = field(default_factory=list)

    def read_inside(self, members: Collection[Any], reading: _Reading) -> None:
        """Read what lies in a container."""
        values = list(members)
        self.read(values, reading)
        # An object in it that is asked for its state may put others in the places beside it.
        if self.others and not all(map(is_, members, values)):
            raise Changed

    def read(self, values: Sequence[Any], reading: _Reading) -> None:
        if len(values) != self.count:
            raise Changed
        start, leaves = 0, reading.leaves.values
        for position, part in self.others:
            leaves += values[start:position]
            part.read(values[position], reading)
            start = position + 1
        leaves += values[start:]


@dataclass(frozen=True)
class _Mapping:
    kind: type[Any]
    keys: list[object]
    key_types: list[type]
    row: _Row

    def read(self, value: Any, reading: _Reading) -> None:
        if type(value) is not self.kind:
            raise Changed
        keys = list(value)
        if keys != self.keys or list(map(type, keys)) != self.key_types:
            raise Changed
        reading.encoder.open(value)
        self.row.read_inside(value.values(), reading)
        reading.encoder.close(value)


@dataclass(frozen=True)
class _Sequence:
    kind: type[Any]
    row: _Row

    def read(self, value: Any, reading: _Reading) -> None:
        if type(value) is not self.kind:
            raise Changed
        reading.encoder.open(value)
        self.row.read_inside(value, reading)
        reading.encoder.close(value)


@dataclass(frozen=True)
class _Module:
    shape: ModuleShape

    def read(self, value: Any, reading: _Reading) -> None:
        if not isinstance(value, nn.Module):
            raise Changed
        reading.leaves.values += self.shape.tensors(value)


@dataclass(frozen=True)
class _Optimizer:
    numbers: list[int]
    keys: list[tuple[str, ...]]
    row: _Row
    group_names: list[tuple[int, str]]

    def read(self, value: Any, reading: _Reading) -> None:
        if not isinstance(value, torch.optim.Optimizer):
            raise Changed
        seen = look_at_optimizer(value)
        if seen.numbers != self.numbers or seen.keys != self.keys:
            raise Changed
        encoder = reading.encoder
        # As deep as in the walk: state_dict(), its "state", the dict of one parameter.
        levels = (value, value.state, value.param_groups)
        for level in levels:
            encoder.open(level)
        self.row.read(seen.values, reading)
        for level in levels[1:]:
            encoder.close(level)
        count = len(reading.leaves.values)
        reading.say(encoder.inner(seen.groups), count, self.group_names)
        encoder.close(value)


class Recipe:
    """How to read one state again. Holds keys, types and text; no value and no tensor of it."""

    def __init__(
        self, state: Mapping[str, object], node: Node, random_node: Node, leaves: LeafList
    ) -> None:
        """`node`, `random_node` and `leaves` are what `capture_state` just gave for `state`."""
        maker = _Maker()
        maker.text('["tuple",')
        self._top = maker.part({**state}, node)
        maker.text(",")
        self._random = None
        if random_node is not None:
            maker.gap()
            self._random = _Value(list(leaf_names(random_node)))
        maker.text("null]" if random_node is None else "]")
        self._texts = ["".join(pieces) for pieces in maker.texts]
        self._tensors, self._others = list(leaves.tensors), list(leaves.keys)
        self._wholes = list(leaves.wholes)
        picked = maker.picked
        self._picked_wholes = [at for at in self._wholes if at in picked]
        self._read_tensors = [at for at in self._tensors if at not in picked]
        self._read_wholes = [at for at in self._wholes if at not in picked]
        self._kinds = list(map(type, leaves.values))
        for at in self._picked_wholes:
            self._kinds[at] = DTensor

    def read(self, state: Mapping[str, object], live: Live) -> tuple[LeafList, str] | None:
        """Leaves and root text as `capture_state` would give them now; None when only it can tell.

        Of the leaves the geometry has not been looked at.
        """
        reading = _Reading(live)
        try:
            if self._top is not None:  # a dict is no tensor
                self._top.read({**state}, reading)
            if self._random is not None:
                self._random.read(capture_random_states(), reading)
            self._settle(reading.leaves)
        except (Changed, Unsupported):
            return None
        texts = chain.from_iterable(zip_longest(self._texts, reading.said, fillvalue=""))
        return reading.leaves, "".join(texts)

    def _settle(self, leaves: LeafList) -> None:
        """Enter the tensors that were only picked up; `Changed` when they are of other classes."""
        values: list[Any] = leaves.values
        if (
            list(map(type, values)) != self._kinds
            or leaves.tensors != self._read_tensors
            or list(leaves.keys) != self._others
            or list(leaves.wholes) != self._read_wholes
        ):
            raise Changed
        picked = {at: values[at] for at in self._picked_wholes}
        locals_ = locals_of(picked.values())
        if not PLAIN_TENSORS.issuperset(map(type, locals_)):
            raise Changed
        for at, local in zip(picked, locals_, strict=True):
            values[at] = local
        wholes = leaves.wholes | picked
        leaves.wholes = {at: wholes[at] for at in self._wholes} if self._read_wholes else wholes
        leaves.tensors = self._tensors


def recipe_for(
    state: Mapping[str, object], node: Node, random_node: Node, leaves: LeafList, live: Live
) -> Recipe | None:
    """A recipe for what `capture_state` just gave, if it gives the same: text and very tensors.

    `live` is what that walk asked; an object is not asked again.
    """
    recipe = Recipe(state, node, random_node, leaves)
    found = recipe.read(state, live)
    if found is None or found[1] != node_text(["tuple", node, random_node]):
        return None
    given, wanted = found[0].tensor_values(), leaves.tensor_values()
    return recipe if len(given) == len(wanted) and all(map(is_, given, wanted)) else None


class _Maker:
    """Makes the parts of a recipe and its text from a state and the node that a walk made of it."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = [[]]
        """Pieces that stay; what is read anew goes between two lists of them."""
        self.picked: set[int] = set()
        """Numbers of the leaves that are picked up."""

    def text(self, text: str) -> None:
        """Add text that stays."""
        self.texts[-1].append(text)

    def gap(self) -> None:
        """Leave room for a value that is read anew."""
        self.texts.append([])

    def part(self, value: Any, node: Node, *, inside: bool = False) -> _Part | None:
        """How to read one value; None for a tensor that is only picked up."""
        kind = type(value)
        if kind in _TENSORS and type(node) is list and node[0] == "leaf":
            self.picked.add(node[1])
            self.text(node_text(node))
            return None
        if kind in _CONTAINERS and _pays(value) and _has_plain_keys(value):
            return self._container(kind, value, node, inside=inside)
        try:
            if isinstance(value, nn.Module):
                return self._module(value, node)
            if isinstance(value, torch.optim.Optimizer):
                return self._optimizer(value, node)
        except Changed:
            pass  # it says its state by other code than torch's
        self.gap()
        return _Value(list(leaf_names(node)), inside)

    def _container(self, kind: type, value: Any, node: Node, *, inside: bool) -> _Part:
        row = _Row()
        self.text(f'["{node[0]}"')
        if kind in _SEQUENCES:
            self._row(row, value, [(",", item) for item in items(node)], inside=inside)
            self.text("]")
            return _Sequence(kind, row)
        members = [(f",{node_text(key)},", item) for key, item in pairs(node)]
        self._row(row, list(value.values()), members, inside=inside)
        self.text("]")
        return _Mapping(kind, list(value), list(map(type, value)), row)

    def _row(
        self, row: _Row, values: Sequence[Any], nodes: list[tuple[str, Node]], *, inside: bool
    ) -> None:
        """Add values to a row; before the node of each stands some text."""
        # Were they not as many, the text would not be the walk's, and the recipe not be taken.
        for value, (before, node) in zip(values, nodes, strict=False):
            self.text(before)
            part = self.part(value, node, inside=inside)
            if part is not None:
                row.others.append((row.count, part))
            row.count += 1

    def _module(self, module: nn.Module, node: Node) -> _Part:
        shape = ModuleShape(module)
        tensors = shape.tensors(module)
        rows = [child for _, child in pairs(node[2])] if node[1] == MODULE else []
        if len(rows) != len(tensors) or not _TENSORS.issuperset(map(type, tensors)):
            raise Changed
        self.picked.update(child[1] for child in rows)
        self.text(node_text(node))
        return _Module(shape)

    def _optimizer(self, optimizer: torch.optim.Optimizer, node: Node) -> _Part:
        seen = look_at_optimizer(optimizer)
        match node:
            case ["object", kind, ["dict", "state", ["dict", *_] as state, "param_groups", groups]]:
                params = list(pairs(state))
            case _:
                raise Changed
        self.text(f'["object","{kind}",["dict","state",["dict"')
        row, start = _Row(), 0
        for keys, (number, inner) in zip(seen.keys, params, strict=False):
            self.text(f',{node_text(number)},["dict"')
            values = seen.values[start : start + len(keys)]
            members = [(f",{node_text(key)},", item) for key, item in pairs(inner)]
            self._row(row, values, members, inside=True)
            self.text("]")
            start += len(keys)
        self.text('],"param_groups",')
        self.gap()
        self.text("]]")
        return _Optimizer(seen.numbers, seen.keys, row, list(leaf_names(groups)))


def _has_plain_keys(value: Any) -> bool:
    return type(value) in _SEQUENCES or _KEYS.issuperset(map(type, value))


def _pays(value: Any) -> bool:
    """Whether members are better read one by one, most of them being tensors, than by a walk."""
    members = value.values() if type(value) in _MAPPINGS else value
    kinds = set(map(type, members))
    if kinds <= _PLAIN:
        return False
    tensors = others = 0
    for member in members:
        if type(member) in _TENSORS:
            tensors += 1
        elif isinstance(member, nn.Module | torch.optim.Optimizer) or (
            type(member) in _CONTAINERS and _pays(member)
        ):
            return True
        else:
            others += 1
    return 0 < tensors >= others // 2
