"""The fake memory: nodes, the arenas on them, and the slots, which outlive processes.

Every change goes through a method that is told which process makes it, so that a checker sees a
write by somebody whose arena it no longer is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recovery.manifest import ArenaHead, SlotRecord
from recovery.slots import SlotFacts

if TYPE_CHECKING:
    from simulations.process import Process
    from simulations.world import World

JOB = "job"


class ArenaFull(Exception):
    """The node's tmpfs has no room."""


class Slot:
    """One slot; ``holds`` counts receives into it that have not returned (P22).

    ``taken``: somebody fills it, or has filled it with what has no record yet.
    """

    __slots__ = ("capacity", "data", "holds", "kind", "number", "record", "taken")

    def __init__(self, number: int, kind: str, capacity: int) -> None:
        self.number, self.kind, self.capacity = number, kind, capacity
        self.data = bytearray(capacity)
        self.record: SlotRecord | None = None
        self.holds = 0
        self.taken = False

    @property
    def facts(self) -> SlotFacts:
        """What decisions need to know of it."""
        return SlotFacts(
            number=self.number,
            kind=self.kind,
            capacity=self.capacity,
            generation=self.record.generation if self.record else None,
            busy=self.taken or self.holds > 0,
        )

    @property
    def payload(self) -> bytes:
        """The bytes that the record speaks of."""
        return bytes(self.data[: self.record.length]) if self.record else b""


class Arena:
    """The memory of one position of a node; ``owner`` is the process that has claimed it."""

    def __init__(self, world: World, node: Node, head: ArenaHead) -> None:
        self._world, self.node, self.head = world, node, head
        self.slots: dict[int, Slot] = {}
        self.owner: Process | None = None
        self._next = 0

    @property
    def bytes_allocated(self) -> int:
        return sum(slot.capacity for slot in self.slots.values())

    def facts(self) -> tuple[SlotFacts, ...]:
        """The slots as decisions see them, by number."""
        return tuple(slot.facts for _, slot in sorted(self.slots.items()))

    def update_head(self, process: Process, **changes: Any) -> None:
        self._world.checker.touched(process, self)
        self.head = replace(self.head, **changes)

    def allocate(self, process: Process, nbytes: int, kind: str) -> Slot:
        """Make a slot; ArenaFull when the node has no room."""
        self._world.checker.touched(process, self)
        if self.node.full or self.node.bytes_allocated + nbytes > self.node.capacity:
            self._world.faults.effect("full", self.node.name)
            raise ArenaFull(f"{self.node.name}: {nbytes} bytes needed, none free")
        self._next += 1
        slot = self.slots[self._next] = Slot(self._next, kind, nbytes)
        return slot

    def drop(self, process: Process, slot: Slot) -> None:
        """Give a slot's memory back."""
        self._world.checker.overwrites(process, self, slot)
        del self.slots[slot.number]

    def invalidate(self, process: Process, slot: Slot) -> None:
        """Declare that the slot holds nothing."""
        self._world.checker.overwrites(process, self, slot)
        slot.record = None

    def write(self, process: Process, slot: Slot, payload: bytes, start: int = 0) -> None:
        """Overwrite some of the slot's bytes."""
        self._world.checker.wrote(process, self, slot)
        slot.data[start : start + len(payload)] = payload

    def write_record(self, process: Process, slot: Slot, record: SlotRecord) -> None:
        """Declare what the slot holds now."""
        self._world.checker.touched(process, self)
        slot.record = record


class Node:
    """One host: its arenas, and what is the matter with it."""

    def __init__(self, world: World, name: str, capacity: int) -> None:
        self._world, self.name, self.capacity = world, name, capacity
        self.alive = True
        self.partitioned = False
        self.store_cut = False
        self.full = False
        self.slow = 1.0
        self.load_errors = 0
        """So many loads to come fail here, for a reason of the script's own."""
        self.arenas: dict[tuple[int, int], Arena] = {}
        """By position and by the number of the sibling."""

    @property
    def bytes_allocated(self) -> int:
        return sum(arena.bytes_allocated for arena in self.arenas.values())

    def newest(self, position: int) -> int:
        """The number of the newest sibling of a position's arena; -1: there is none."""
        return max((n for p, n in self.arenas if p == position), default=-1)

    def make_arena(self, position: int, number: int, incarnation: str) -> Arena:
        """An empty arena."""
        head = ArenaHead(job=JOB, node_id=self.name, position=position, incarnation=incarnation)
        arena = self.arenas[position, number] = Arena(self._world, self, head)
        return arena

    def die(self) -> None:
        """The host is lost, with all its memory."""
        self.alive = False
        self.arenas.clear()
