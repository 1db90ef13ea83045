"""How live tensors share memory, compared with how the saved ones did.

Tensors that share memory are filled one after another, each over what the others have put there.
That gives every one of them its own saved values only if they lie in one another as the saved ones
lay. Whether they share at all is not enough: a weight that was tied to the transpose of another,
and now is tied to it as it is, would leave that other one transposed without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from replica.fresh import TensorFacts
from replica.leaves import find_homes, span
from replica.tables import CONJ, NEG
from replica.torch_private import local_of


@dataclass(frozen=True, kw_only=True)
class Target:
    """A live tensor and what is to be loaded into it."""

    path: str
    live: torch.Tensor
    facts: TensorFacts

    @property
    def local(self) -> torch.Tensor:
        """What is filled."""
        return local_of(self.live)


@dataclass(frozen=True, kw_only=True)
class Misfits:
    """What `compare_sharing` found."""

    different: list[str]
    """Pairs of which only the live or only the saved tensors share memory."""
    relaid: list[tuple[Target, str]]
    """Targets that share memory in both, with a word on those that lie otherwise in one another."""


@dataclass(frozen=True)
class _Place:
    """How one tensor lies in the memory that it shares with others."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: int
    itemsize: int

    @property
    def steps(self) -> list[int]:
        """Strides that an element is reached by."""
        return [step for size, step in zip(self.shape, self.strides, strict=True) if size > 1]

    @property
    def view(self) -> object:
        """Equal for two that are one view of the memory."""
        return self.begin, self.shape, self.steps, self.flags, self.itemsize


def compare_sharing(targets: Sequence[Target]) -> Misfits:
    """Find targets that share memory now and did not when saved, the reverse, or in another way.

    The first would silently lose one of the two values, the second would train on untied weights,
    the third would mix the values of both.
    """
    filled = [target for target in targets if target.local.numel()]
    homes = find_homes([target.local for target in filled]).homes
    now = [home.block for home in homes]
    then = _saved_labels([target.facts for target in filled])
    different = [
        *_split(filled, now, then, "shares memory with {}, and did not when saved"),
        *_split(filled, then, now, "shared memory with {} when saved, and does not now"),
    ]
    groups: dict[int, list[int]] = {}
    for index, label in enumerate(now):
        groups.setdefault(label, []).append(index)
    relaid: list[tuple[Target, str]] = []
    for group in groups.values():
        if len(group) > 1 and len({then[index] for index in group}) == 1:
            members = [filled[index] for index in group]
            relaid += _relaid(members, [homes[index].offset_bytes for index in group])
    return Misfits(different=different, relaid=relaid)


def _saved_labels(facts: Sequence[TensorFacts]) -> list[int]:
    """Equal numbers for tensors whose bytes overlap in the image."""
    labels = [0] * len(facts)
    label, entry, stop = -1, -1, 0
    order = sorted(range(len(facts)), key=lambda i: (facts[i].entry, facts[i].offset_bytes))
    for index in order:
        part = facts[index]
        start = max(part.offset_bytes, 0)
        reach = span(part.shape, part.strides) * part.dtype.itemsize
        if part.entry != entry or start >= stop:
            label, entry, stop = label + 1, part.entry, 0
        stop = max(stop, start + reach)
        labels[index] = label
    return labels


def _split(
    targets: Sequence[Target], one: Sequence[int], other: Sequence[int], sentence: str
) -> Iterator[str]:
    first: dict[int, int] = {}
    for index, label in enumerate(one):
        leader = first.setdefault(label, index)
        if other[leader] != other[index]:
            yield f"{targets[index].path} {sentence.format(targets[leader].path)}"


def _relaid(members: Sequence[Target], offsets: Sequence[int]) -> Iterator[tuple[Target, str]]:
    """Every member, if one of them lies otherwise by the first one than when saved.

    All of them, since what one is given the others change by.
    """
    now = [
        _live_place(member.local, offset) for member, offset in zip(members, offsets, strict=True)
    ]
    then = [_saved_place(member.facts) for member in members]
    moved = [
        index
        for index in range(len(members))
        if not _alike((now[0], now[index]), (then[0], then[index]))
    ]
    for index, member in enumerate(members if moved else ()):
        if index in moved:
            was, is_now = _text(then[0], then[index]), _text(now[0], now[index])
            why = f"shares memory with {members[0].path}, saved {was}, is {is_now}"
        else:
            why = f"shares memory with {members[moved[0]].path}, which lay otherwise in it then"
        yield member, f"{why}; share it as it was when saved"


def _live_place(local: torch.Tensor, offset: int) -> _Place:
    flags = CONJ * local.is_conj() + NEG * local.is_neg()
    shape, strides = tuple(local.shape), tuple(local.stride())
    return _Place(max(offset, 0), shape, strides, flags, local.itemsize)


def _saved_place(facts: TensorFacts) -> _Place:
    # Flags of a packed entry are not kept: all that share it had the same, which is what counts.
    begin = max(facts.offset_bytes, 0)
    return _Place(begin, facts.shape, facts.strides, facts.flags, facts.dtype.itemsize)


def _alike(now: tuple[_Place, _Place], then: tuple[_Place, _Place]) -> bool:
    """Whether two tensors have the same elements in common now as when saved."""
    if now[0].view == now[1].view and then[0].view == then[1].view:
        return True  # one and the same view, whatever its strides
    steps = all(here.steps == there.steps for here, there in zip(now, then, strict=True))
    return steps and _apart(*now) == _apart(*then)


def _apart(first: _Place, place: _Place) -> tuple[int, int]:
    return place.begin - first.begin, place.flags ^ first.flags


def _text(first: _Place, place: _Place) -> str:
    distance, flags = _apart(first, place)
    bits = ", conjugated" * bool(flags & CONJ) + ", negated" * bool(flags & NEG)
    return (
        f"{distance:+d} bytes from it with strides {list(place.strides)} to its "
        f"{list(first.strides)}{bits}"
    )
