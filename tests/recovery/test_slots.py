"""Which slot takes what: against the rules, over random arenas, and the tie-breaks one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.ledger import ABORTED, COMMITTED, HELD, Ledger
from recovery.manifest import Generation
from recovery.slots import (
    HELD as HELD_SLOT,
)
from recovery.slots import (
    OWN,
    NoSlot,
    SlotFacts,
    Take,
    empty_own_slot,
    held_slot,
    own_slot,
    surplus_slots,
)

KEPT, BASE, CURRENT, STALE = (Generation(1, step, f"{step:032x}") for step in (1, 2, 3, 4))
ledgers = st.builds(
    Ledger,
    base=st.sampled_from([None, BASE]),
    current=st.sampled_from([None, CURRENT]),
    state=st.sampled_from([ABORTED, COMMITTED, HELD]),
    kept=st.sampled_from([None, KEPT]),
)


@st.composite
def arenas(draw):
    """Draw up to eight slots of both kinds."""
    return tuple(
        SlotFacts(
            number=number,
            kind=draw(st.sampled_from([OWN, HELD_SLOT])),
            capacity=draw(st.integers(0, 4)),
            generation=draw(st.sampled_from([None, KEPT, BASE, CURRENT, STALE])),
            busy=draw(st.integers(0, 3)) == 0,
        )
        for number in range(1, 1 + draw(st.integers(0, 8)))
    )


def own(number, capacity=1, generation=None, busy=False):
    """Return an own slot."""
    return SlotFacts(number=number, kind=OWN, capacity=capacity, generation=generation, busy=busy)


def held(number, capacity=1, generation=None, busy=False):
    """Return a held slot."""
    return SlotFacts(
        number=number, kind=HELD_SLOT, capacity=capacity, generation=generation, busy=busy
    )


def may_go(slot, ledger, kind):
    """Say whether a slot of that kind may be overwritten, by the rules themselves."""
    needed = {ledger.base, ledger.kept} - {None}
    if ledger.state == HELD:
        needed.add(ledger.current)
    return slot.kind == kind and not slot.busy and slot.generation not in (needed - {None})


@given(slots=arenas(), ledger=ledgers)
def test_an_own_slot_is_the_largest_that_may_be_overwritten(slots, ledger):
    """Neither base nor kept nor undecided nor busy nor of the other kind; else a new one."""
    free = [slot for slot in slots if may_go(slot, ledger, OWN)]
    take = own_slot(slots, ledger)
    assert take.drop is None
    if not free:
        assert take == Take()
        return
    (chosen,) = [slot for slot in free if slot.number == take.number]
    assert chosen.capacity == max(slot.capacity for slot in free)
    assert chosen.number == min(s.number for s in free if s.capacity == chosen.capacity)


@given(slots=arenas(), need=st.integers(0, 4))
def test_a_restore_takes_the_smallest_empty_own_slot_that_fits(slots, need):
    """Nothing valid may be in it, whatever that is worth: the choice is before any decision."""
    free = [
        slot
        for slot in slots
        if slot.kind == OWN and slot.generation is None and not slot.busy and slot.capacity >= need
    ]
    number = empty_own_slot(slots, need)
    if not free:
        assert number is None
        return
    (chosen,) = [slot for slot in free if slot.number == number]
    assert chosen.capacity == min(slot.capacity for slot in free)
    assert chosen.number == min(s.number for s in free if s.capacity == chosen.capacity)


@given(
    slots=arenas(),
    ledger=ledgers,
    need=st.integers(0, 4),
    taken=st.sets(st.integers(1, 8), max_size=3),
    expected=st.integers(1, 4),
)
def test_a_held_slot_fits_or_makes_room_or_is_new_or_there_is_none(
    slots, ledger, need, taken, expected
):
    """The four answers in their order: the smallest that fits, the largest too small, new, NoSlot.

    Never what must be kept, what is busy or what another fragment of this save has taken.
    """
    free = [s for s in slots if may_go(s, ledger, HELD_SLOT) and s.number not in taken]
    fitting = [slot for slot in free if slot.capacity >= need]
    needed = {ledger.base, ledger.kept} - {None}
    beside = [s for s in slots if s.kind == HELD_SLOT and s.generation not in needed]
    if not free and len(beside) >= expected:
        with pytest.raises(NoSlot, match="every slot is base or under a receive"):
            held_slot(slots, ledger, need, taken=taken, expected=expected)
        return
    take = held_slot(slots, ledger, need, taken=taken, expected=expected)
    if fitting:
        best = min(fitting, key=lambda slot: (slot.capacity, slot.number))
        assert take == Take(number=best.number)
    elif free:
        best = max(free, key=lambda slot: (slot.capacity, -slot.number))
        assert take == Take(drop=best.number)
    else:
        assert take == Take()


@given(slots=arenas(), ledger=ledgers, expected=st.integers(0, 3))
def test_surplus_is_given_back_smallest_first_and_never_what_is_needed(slots, ledger, expected):
    """Beyond two own slots and two for each fragment, as far as slots may be given back."""
    gone = surplus_slots(slots, ledger, expected)
    assert len(set(gone)) == len(gone)
    for kind, wanted in ((OWN, 2), (HELD_SLOT, 2 * expected)):
        some = [slot for slot in slots if slot.kind == kind]
        stale = [slot for slot in some if may_go(slot, ledger, kind)]
        count = min(len(stale), max(0, len(some) - wanted))
        first = sorted(stale, key=lambda slot: (slot.capacity, slot.number))[:count]
        assert {s.number for s in first} == {n for n in gone if n in {s.number for s in some}}


def test_an_arena_in_the_steady_state_uses_the_other_set():
    """Two own slots and two held ones: the base in one set, the next generation in the other."""
    slots = (own(1, generation=BASE), own(2, generation=KEPT), held(3, generation=BASE), held(4))
    ledger = Ledger(BASE, CURRENT, COMMITTED)
    assert own_slot(slots, ledger) == Take(number=2)
    assert held_slot(slots, ledger, 1, taken=(), expected=1) == Take(number=4)
    assert surplus_slots(slots, ledger, 1) == ()


def test_with_something_kept_there_is_no_slot_until_it_is_free():
    """Base and kept fill the arena: an own slot has to be added, a held one is refused or added."""
    slots = (own(1, generation=BASE), own(2, generation=KEPT), held(3, generation=BASE))
    ledger = Ledger(BASE, None, ABORTED, KEPT, 1)
    assert own_slot(slots, ledger) == Take()
    assert held_slot(slots, ledger, 1, taken=(), expected=1) == Take()
    busy = (*slots, held(4, busy=True))
    with pytest.raises(NoSlot):
        held_slot(busy, ledger, 1, taken=(), expected=1)
    assert held_slot(busy, ledger, 1, taken=(), expected=2) == Take()


def test_slots_added_after_a_renumbering_are_given_back():
    """Three own slots and three held ones for one fragment: the smallest stale ones go."""
    slots = (
        *(own(1, 9, BASE), own(2, 5, STALE), own(3, 7)),
        *(held(4, 9, BASE), held(5, 3, STALE), held(6, 3)),
    )
    assert surplus_slots(slots, Ledger(BASE), 1) == (2, 5)


def test_of_equal_slots_the_first_is_taken_and_of_others_the_one_that_fits_best():
    """Numbers and capacities run against each other: capacity decides, then the number."""
    empty = (own(1, 9), own(2, 4), own(3, 4))
    assert empty_own_slot(empty, 3) == 2
    assert empty_own_slot(empty, 5) == 1
    assert own_slot((own(1, 4), own(2, 9), own(3, 9)), Ledger()) == Take(number=2)
    slots = (held(1, 9), held(2, 4), held(3, 4))
    assert held_slot(slots, Ledger(), 3, taken=(), expected=1) == Take(number=2)
    assert held_slot(slots, Ledger(), 3, taken=(2,), expected=1) == Take(number=3)
    small = (held(1, 2), held(2, 3), held(3, 3))
    assert held_slot(small, Ledger(), 5, taken=(), expected=1) == Take(drop=2)


def test_what_is_needed_is_not_given_back_though_it_is_the_smallest():
    """Base, kept and what a receive holds stay, however many slots there are."""
    slots = (own(1, 1, BASE), own(2, 2, KEPT), own(3, 3, busy=True), own(4, 4, STALE))
    assert surplus_slots(slots, Ledger(BASE, None, ABORTED, KEPT, 1), 1) == (4,)


def test_the_refusal_says_why():
    """The words that the owner reads."""
    with pytest.raises(NoSlot) as caught:
        held_slot((held(1, busy=True),), Ledger(), 1, taken=(), expected=1)
    assert str(caught.value) == "every slot is base or under a receive that has not returned"
