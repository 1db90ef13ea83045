"""An image back into live objects, in two phases.

A `Loader` compares the saved tree with the live state and notes what is wrong and what is to be
done; it changes nothing. The noted actions then run in the order of the state, those of generators
after all others.

Rules for containers. Tensors that are there are copied into, so that whoever else holds them sees
the saved values; so are arrays of the same shape and dtype. Dicts, lists, sets and deques keep
their identity and get the saved items. A saved value whose key is not there yet is put in. What has
no counterpart (a live tensor or state object that was not saved, a saved state object that is not
there, a key of a module) and what has another dtype or shape is an error in the strict mode, and is
left as it is in the lenient one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from replica.errors import StateError
from replica.fresh import LeafReader, TensorFacts
from replica.image import ImageError
from replica.live import (
    LiveMeshes,
    copy_into,
    holds_live,
    live_tensors,
    tensor_mismatch,
)
from replica.objects import prepare_object
from replica.sharing import Target, compare_sharing
from replica.state import kind_of, written_kind
from replica.torch_private import local_of
from replica.tree import (
    MAPPING_START,
    MAPPING_TAGS,
    MAX_DEPTH,
    SEQUENCE_START,
    Node,
)
from replica.tree_reader import Decoder, check_mapping, check_sequence, empty_mapping, tag_of
from replica.unsupported import Unsupported, path_text

Keys = tuple[object, ...]
Action = Callable[[], None]

ABSENT = object()
"""Stands for a live value that is not there."""

_MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What a lenient restore did not load, each as a key path with a word why."""

    missing: tuple[str, ...] = ()
    """Saved and not in the live state."""
    extra: tuple[str, ...] = ()
    """In the live state and not saved: left as it is."""
    unfit: tuple[str, ...] = ()
    """In both, with another dtype, shape or number of parameters, of another class of torch's, or
    with elements in common with itself or others in another way: left as it is."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.unfit)

    def lists(self) -> dict[str, list[str]]:
        """The three lists by their names."""
        return {"missing": [*self.missing], "extra": [*self.extra], "unfit": [*self.unfit]}

    def describe(self) -> str:
        """The lists in one line, each cut where it is long."""
        lists = (
            ("saved but not in the live state", self.missing),
            ("in the live state but not saved", self.extra),
            ("different", self.unfit),
        )
        return "; ".join(f"{title}: {_listed(lines)}" for title, lines in lists if lines)


class Findings:
    """What does not fit between a saved and a live state."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        """Saved and not in the live state."""
        self.extra: list[str] = []
        """In the live state and not saved."""
        self.unfit: list[str] = []
        """In both, and what `LeftOut.unfit` has of it."""
        self.different: list[str] = []
        """In both, and another thing: no mode takes that for the same."""

    def check(self, rank: int, *, strict: bool) -> LeftOut:
        """Raise one `StateError` that lists everything, if there is anything.

        Not strict: only for what is different; the rest is returned.
        """
        left = LeftOut(
            missing=tuple(self.missing), extra=tuple(self.extra), unfit=tuple(self.unfit)
        )
        if not self.different and (not strict or not left):
            return left
        everything = replace(left, unfit=(*self.unfit, *self.different))
        raise StateError(
            f"rank {rank}: the saved and the live state do not match; nothing was changed. "
            f"{everything.describe()}. To begin anew, use another job= name, or "
            "`planaria clean --job NAME` first"
            + ("" if self.different else "; to load what fits, restore(strict=False)")
        )


def _listed(lines: Sequence[str]) -> str:
    shown = ", ".join(lines[:_MAX_SHOWN])
    more = len(lines) - _MAX_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


class Loader:
    """One comparison of an image with a live state."""

    def __init__(self, reader: LeafReader, state: MutableMapping[str, object]) -> None:
        self._reader = reader
        self._state = state
        self.findings = Findings()
        self.actions: list[Action] = []
        self.late_actions: list[Action] = []
        """Generators: what the others do may draw from them."""
        self.generators: list[object] = []
        """The live ones that those are about."""
        self.targets: list[Target] = []
        self.left: dict[int, torch.Tensor] = {}
        """Live tensors that get no saved values, by id: optimizers drop their saved state too."""
        self.unfilled: set[int] = set()
        """Ids of those among them whose filling was planned before that was known."""
        self.decoder = Decoder(self)
        try:
            self.meshes = LiveMeshes(live_tensors({**state}))
        except Unsupported as fault:
            raise StateError(fault.describe()) from fault

    def value(self, index: int) -> torch.Tensor | np.ndarray[Any, Any] | bytes:
        """A leaf in new memory; a DTensor on the live mesh that has the recorded signature."""
        facts = self._reader.take(index)
        if not isinstance(facts, TensorFacts):
            return self._reader.plain(facts)
        local = self._reader.local(facts, facts.device)
        return local if facts.spec is None else self.meshes.rebuild(local, facts.spec)

    def load(self, node: Node) -> None:
        """Compare the whole state: the objects at its root, then each with its own."""
        if tag_of(node) != "dict":
            raise ImageError("shard image: the root of the tree is no dict")
        saved = dict(self.decoder.pairs(node))
        self.findings.missing += [
            path_text([key]) + _saved_kind(value)
            for key, value in saved.items()
            if key not in self._state
        ]
        for key, live in self._state.items():
            if key not in saved:
                self.leave(live, (key,))
            else:
                value = self.merge(live, saved[key], (key,))
                if value is not live:
                    self.actions.append(partial(self._state.__setitem__, key, value))
        self._compare_sharing()

    def merge(self, live: object, node: Node, keys: Keys) -> object:
        """The value that stands in place of `live` after the restore; `live` itself if it can."""
        tag = tag_of(node)
        if len(keys) > MAX_DEPTH:
            raise ImageError("shard image: the tree is nested too deeply")
        kind = kind_of(live)
        if tag == "object" or kind is not None:
            return self._object(live, kind, node, keys)
        if isinstance(live, torch.Tensor):
            return self.tensor(live, node, keys)
        if tag in MAPPING_START:
            return self._mapping(live, node, keys)
        if tag in {"list", "tuple", "deque"}:
            return self._sequence(live, node, keys)
        if self._has_live(live, keys):
            return live
        value = self.decoder.decode(node)
        return self._refilled(live, value)

    def leave(self, live: object, keys: Keys) -> None:
        """Note something live that was not saved, and the tensors in it."""
        kind = kind_of(live)
        self.findings.extra.append(path_text(keys) + (f" ({kind})" if kind else ""))
        self.left.update((id(value), value) for value in live_tensors(live))

    def tensor(self, live: torch.Tensor, node: Node, keys: Keys) -> torch.Tensor:
        """Plan the copy of a saved tensor into a live one."""
        facts = self.tensor_facts(live, node, keys)
        if facts is not None:
            self.fill(live, facts)
        return live

    def fill(self, live: torch.Tensor, facts: TensorFacts) -> None:
        """Plan the copy of saved values that fit into a live tensor."""
        saved = self._reader.local(facts, "cpu")
        self.actions.append(partial(_fill, live, saved, self.unfilled))

    def tensor_facts(self, live: torch.Tensor, node: Node, keys: Keys) -> TensorFacts | None:
        """What is to be loaded into a live tensor; None, and a finding, if it does not fit."""
        path = path_text(keys)
        is_leaf = tag_of(node) == "leaf" and len(node) == 2
        facts = self._reader.take(node[1]) if is_leaf else None
        if not isinstance(facts, TensorFacts):
            self.findings.different.append(f"{path} is a tensor and was not saved as one")
            return None
        mismatch = tensor_mismatch(live, facts)
        if mismatch is not None:
            why, tolerable = mismatch
            noted = self.findings.unfit if tolerable else self.findings.different
            noted.append(f"{path} {why}")
            self.left[id(live)] = live
            return None
        self.targets.append(Target(path=path, live=live, facts=facts))
        return facts

    def saved_local(self, facts: TensorFacts) -> torch.Tensor:
        """The saved local values of a tensor, on the CPU, in new memory."""
        return self._reader.local(facts, "cpu")

    def _compare_sharing(self) -> None:
        """Note what shares memory otherwise than when saved."""
        misfits = compare_sharing(self.targets)
        self.findings.different += misfits.different
        for target, why in misfits.relaid:
            self.findings.unfit.append(f"{target.path} {why}")
            self.left[id(target.live)] = target.live
            self.unfilled.add(id(target.live))

    def _object(self, live: object, kind: str | None, node: Node, keys: Keys) -> object:
        path = path_text(keys)
        if tag_of(node) != "object":
            self.leave(live, keys)
        elif len(node) != 3 or type(node[1]) is not str:
            raise ImageError("shard image: a damaged object node")
        elif kind is None:
            self.findings.missing.append(f"{path} ({node[1]})")
        elif (ours := written_kind(live, kind)) != node[1]:
            # Of another class of torch's only: it may go on without what was saved.
            tolerable = ours.partition(" ")[0] == node[1].partition(" ")[0]
            noted = self.findings.unfit if tolerable else self.findings.different
            noted.append(f"{path} saved as {node[1]}, is {ours}")
        else:
            prepare_object(self, kind, live, node[2], keys)
        return live

    def _mapping(self, live: object, node: Node, keys: Keys) -> object:
        check_mapping(node)
        old: dict[Any, Any] = {}
        same = MAPPING_TAGS.get(type(live)) == node[0]
        if same:
            old = live  # type: ignore[assignment]
        elif self._has_live(live, keys):
            return live
        made = empty_mapping(node)
        for key, value in self.decoder.pairs(node):
            found = self.merge(old.get(key, ABSENT), value, (*keys, key))
            if found is not ABSENT:
                made[key] = found
        for key in old:
            if key not in made and self._has_live(old[key], (*keys, key)):
                made[key] = old[key]
        if not same:
            return made
        self.actions.append(partial(_refill_mapping, old, made))
        return live

    def _sequence(self, live: object, node: Node, keys: Keys) -> object:
        check_sequence(node)
        tag, nodes = node[0], node[SEQUENCE_START[node[0]] :]
        old: list[Any] = []
        if type(live).__name__ == tag and isinstance(live, list | tuple | deque):
            old = list(live)
        elif self._has_live(live, keys):
            return live
        made = []
        # A loop, since a comprehension would take a stack frame of its own per level.
        for index, item in enumerate(nodes):
            known = old[index] if index < len(old) else ABSENT
            made.append(self.merge(known, item, (*keys, index)))
        if any(item is ABSENT for item in made):
            return live  # without that item the others would move up
        tail = range(len(made), len(old))
        if any([self._has_live(old[index], (*keys, index)) for index in tail]):  # noqa: C419 - all
            made += old[len(made) :]
        if tag == "tuple":
            kept = len(made) == len(old) and all(map(_is, made, old))
            return live if kept and type(live) is tuple else tuple(made)
        return self._refilled(live, made if tag == "list" else deque(made, node[1]))

    def _refilled(self, live: Any, value: Any) -> object:
        """Keep a mutable live container of the same type, and fill it at commit."""
        if type(live) is not type(value):
            return value
        if isinstance(live, list | bytearray):
            self.actions.append(partial(_refill_slice, live, value))
        elif isinstance(live, set) or (isinstance(live, deque) and live.maxlen == value.maxlen):
            self.actions.append(partial(_refill, live, value))
        elif isinstance(live, np.ndarray) and _same_form(live, value):
            self.actions.append(partial(np.copyto, live, value))
        else:
            return value
        return live

    def _has_live(self, live: object, keys: Keys) -> bool:
        """Whether a live tensor or state object has no place in the saved state: it stays."""
        found = live is not ABSENT and holds_live(live)
        if found:
            self.leave(live, keys)
        return found


def _fill(live: torch.Tensor, saved: torch.Tensor, unfilled: set[int]) -> None:
    if id(live) not in unfilled:
        copy_into(local_of(live), saved)


def _saved_kind(node: Node) -> str:
    return f" ({node[1]})" if tag_of(node) == "object" and len(node) == 3 else ""


def _is(left: object, right: object) -> bool:
    return left is right


def _same_form(live: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return live.flags.writeable and live.dtype == value.dtype and live.shape == value.shape


def _refill_mapping(live: dict[Any, Any], items: dict[Any, Any]) -> None:
    live.clear()
    # Item by item: Counter.update would add. OrderedDict must see each of them too.
    for key, value in items.items():
        live[key] = value  # noqa: PERF403


def _refill_slice(live: Any, items: Any) -> None:
    live[:] = items


def _refill(live: Any, items: Any) -> None:
    kept = list(items)
    live.clear()
    for item in kept:
        if isinstance(live, set):
            live.add(item)
        else:
            live.append(item)
