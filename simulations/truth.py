"""What the bytes ought to be, by arithmetic of its own: no code of the sessions is used here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from erasure import field as gf
from erasure.code import Code
from recovery.manifest import Generation
from simulations.memory import Arena, Node, Slot

Item = tuple[str, int]
"""(node, fragment or -1 for the whole shard)."""
WHOLE = -1


@dataclass
class Truth:
    """One generation as its owners staged it.

    ``damage``: by owner, the items that faults took away since it was staged. ``owed``: how many
    nodes may be lost from there on before it may be missing.
    """

    generation: Generation
    code: Code
    fragments: int
    world: int
    shards: dict[int, bytes] = field(default_factory=dict)
    damage: dict[int, set[Item]] = field(default_factory=dict)
    _parts: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def survives(self) -> int:
        """So many nodes may be lost at once when it is fully protected."""
        return self.code.m + 1 if self.fragments else 0

    def hit(self, owner: int, item: Item) -> None:
        """A fault has taken an item."""
        self.damage.setdefault(owner, set()).add(item)

    def nodes_hit(self, owner: int) -> set[str]:
        return {node for node, _ in self.damage.get(owner, ())}

    def part(self, owner: int, index: int) -> bytes:
        """The true bytes of a fragment, or of the whole shard."""
        shard = self.shards[owner]
        if index == WHOLE:
            return shard
        found = self._parts.get((owner, index))
        if found is None:
            found = self._parts[owner, index] = _part(self.code, shard, index)
        return found

    def is_true(self, slot: Slot) -> bool:
        """Whether a slot holds what its record says, by the truth."""
        record = slot.record
        if record is None or record.owner not in self.shards:
            return False
        if record.fragment >= self.code.n:
            return False
        return slot.payload == self.part(record.owner, record.fragment)


def _part(code: Code, shard: bytes, index: int) -> bytes:
    width = -(-len(shard) // code.k)
    rows = np.zeros((code.k, width), np.uint8)
    for row in range(code.k):
        piece = shard[row * width : (row + 1) * width]
        rows[row, : len(piece)] = np.frombuffer(piece, np.uint8)
    if index < code.k:
        return shard[index * width : (index + 1) * width]
    if code.k == 1:
        return shard
    return bytes(gf.matmul(code.parity_rows[index - code.k : index - code.k + 1], rows).tobytes())


def sealed_slots(nodes: Iterable[Node]) -> Iterator[tuple[Node, Arena, Slot]]:
    """Every slot with a record in the newest arena of every position of living nodes."""
    for node in nodes:
        if not node.alive:
            continue
        for (position, number), arena in node.arenas.items():
            if number != node.newest(position):
                continue
            for slot in arena.slots.values():
                if slot.record is not None:
                    yield node, arena, slot


def holdings(truth: Truth, nodes: Iterable[Node]) -> dict[int, set[Item]]:
    """By owner, the items of a generation that are there and true."""
    found: dict[int, set[Item]] = {owner: set() for owner in range(truth.world)}
    identity = truth.generation.id
    for node, _, slot in sealed_slots(nodes):
        record = slot.record
        if record is not None and record.generation.id == identity and truth.is_true(slot):
            found[record.owner].add((node.name, record.fragment))
    return found


def claims(truth: Truth, nodes: Iterable[Node]) -> dict[int, set[Item]]:
    """By owner, the items that records claim and that are not what they should be."""
    found: dict[int, set[Item]] = {owner: set() for owner in range(truth.world)}
    identity = truth.generation.id
    for node, _, slot in sealed_slots(nodes):
        record = slot.record
        if record is not None and record.generation.id == identity and not truth.is_true(slot):
            found[record.owner].add((node.name, record.fragment))
    return found


def recoverable(truth: Truth, items: set[Item]) -> bool:
    """A whole copy, or k distinct fragments."""
    fragments = {fragment for _, fragment in items}
    return WHOLE in fragments or len(fragments) >= truth.code.k


def tolerance(truth: Truth, items: set[Item]) -> int:
    """How many nodes may still be lost without losing the owner, whichever they are; -1: it is."""
    nodes = sorted({node for node, _ in items})
    if not recoverable(truth, items):
        return -1
    for lost in range(1, len(nodes) + 1):
        if any(not recoverable(truth, left) for left in _without(items, nodes, lost)):
            return lost - 1
    return len(nodes)


def _without(items: set[Item], nodes: list[str], lost: int) -> Iterator[set[Item]]:
    from itertools import combinations  # noqa: PLC0415

    for gone in combinations(nodes, lost):
        yield {item for item in items if item[0] not in gone}
