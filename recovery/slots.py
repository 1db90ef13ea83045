"""Which slot takes what: no choice here may cost a generation that has to be kept.

An arena has own slots, each for a whole shard, and held slots, each for one fragment. In the steady
state there are two own slots and two held ones for each fragment: one set holds the base, the other
takes the next generation. After a renumbering or a mend the base may lie in more slots than that;
then slots are added for a while, and given back once they are neither base nor in use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recovery.errors import RecoveryError
from recovery.ledger import Ledger
from recovery.manifest import Generation

OWN, HELD = "own", "held"


class NoSlot(RecoveryError):
    """Every slot is needed; nothing may be overwritten now."""


@dataclass(frozen=True, order=True, kw_only=True)
class SlotFacts:
    """One slot: what it holds (None: nothing valid) and how many bytes it can take.

    ``busy``: somebody is filling it, or a receive into it has not returned, so nobody else may
    reuse or unmap it (P22).
    """

    number: int
    kind: str
    capacity: int
    generation: Generation | None = None
    busy: bool = False


@dataclass(frozen=True)
class Take:
    """Use slot ``number``; None: allocate one, after giving ``drop`` back."""

    number: int | None = None
    drop: int | None = None


def own_slot(slots: Collection[SlotFacts], ledger: Ledger) -> Take:
    """The own slot for a new shard: neither base nor kept nor anything undecided."""
    free = [slot for slot in _of(slots, OWN) if not slot.busy and ledger.reusable(slot.generation)]
    if not free:
        return Take()
    return Take(max(free, key=lambda slot: (slot.capacity, -slot.number)).number)


def empty_own_slot(slots: Collection[SlotFacts], need: int) -> int | None:
    """An own slot with nothing valid in it and room for ``need`` bytes: a restore's target."""
    empty = [
        slot
        for slot in _of(slots, OWN)
        if slot.generation is None and not slot.busy and slot.capacity >= need
    ]
    return min(empty, key=lambda slot: (slot.capacity, slot.number)).number if empty else None


def held_slot(
    slots: Collection[SlotFacts],
    ledger: Ledger,
    need: int,
    *,
    taken: Collection[int],
    expected: int,
) -> Take:
    """The held slot for a fragment of ``need`` bytes, one of ``expected`` that this rank takes.

    ``taken``: slots chosen for the others before. A slot that is too small makes room for a larger
    one (P8). Raises NoSlot when as many slots as are expected exist beside the base and none is
    free.
    """
    held = _of(slots, HELD)
    free = [
        slot
        for slot in held
        if slot.number not in taken and not slot.busy and ledger.reusable(slot.generation)
    ]
    fitting = [slot for slot in free if slot.capacity >= need]
    if fitting:
        return Take(min(fitting, key=lambda slot: (slot.capacity, slot.number)).number)
    if free:
        return Take(drop=max(free, key=lambda slot: (slot.capacity, -slot.number)).number)
    needed = {ledger.base, ledger.kept} - {None}
    beside = [slot for slot in held if slot.generation not in needed]
    if len(beside) >= expected:
        raise NoSlot("every slot is base or under a receive that has not returned")
    return Take()


def surplus_slots(slots: Collection[SlotFacts], ledger: Ledger, expected: int) -> tuple[int, ...]:
    """Slots to give back: beyond two own ones and two for each of ``expected`` fragments."""
    found: list[int] = []
    for kind, wanted in ((OWN, 2), (HELD, 2 * expected)):
        some = _of(slots, kind)
        stale = [slot for slot in some if not slot.busy and ledger.reusable(slot.generation)]
        stale.sort(key=lambda slot: (slot.capacity, slot.number))
        found += [slot.number for slot in stale[: max(0, len(some) - wanted)]]
    return tuple(found)


def _of(slots: Collection[SlotFacts], kind: str) -> Sequence[SlotFacts]:
    return [slot for slot in slots if slot.kind == kind]
