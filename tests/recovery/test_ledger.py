"""What is kept beside the base, and what a mend forbids: the ledger after a restore (P10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recovery.actions import CompareSet
from recovery.admission import Admission, admission_key, admit_session, parse_admission, propose
from recovery.errors import RecoveryError
from recovery.ledger import ABORTED, ADMITTED, COMMITTED, HELD, STAGED, Ledger
from recovery.manifest import Generation

OLDER, BASE, CURRENT, NEXT = (Generation(1, step, f"{step:032x}") for step in (1, 2, 3, 4))
UNDECIDED = (ADMITTED, STAGED, HELD)
RESTORED = Ledger(BASE, None, ABORTED, OLDER, 1)


def test_an_empty_ledger_keeps_nothing_and_admits():
    """A job that begins: nothing to keep, nothing under way, no word of protection."""
    ledger = Ledger()
    assert (ledger.base, ledger.current, ledger.kept) == (None, None, None)
    assert ledger.kept_protection == -1
    assert ledger.decided
    assert ledger.idle
    assert ledger.may_admit


@pytest.mark.parametrize("state", [COMMITTED, ABORTED])
def test_a_restore_sets_what_is_kept_and_nothing_else(state):
    """Base, kept and its protection are what was restored; the newest attempt stays."""
    ledger = Ledger(BASE, CURRENT, state)
    assert ledger.rebase(OLDER) == Ledger(OLDER, CURRENT, state)
    assert ledger.rebase(BASE, OLDER, 2) == Ledger(BASE, CURRENT, state, OLDER, 2)
    assert ledger.rebase(BASE, OLDER, 2).rebase(None) == Ledger(None, CURRENT, state)


@pytest.mark.parametrize("ledger", [Ledger(BASE, CURRENT, state) for state in UNDECIDED])
def test_nothing_is_restored_while_a_generation_is_undecided(ledger):
    """The restored one would be kept and the undecided one forgotten: it raises, in words."""
    with pytest.raises(RecoveryError, match=r"rebased on .* while .* is " + ledger.state):
        ledger.rebase(OLDER)


def test_nothing_is_restored_while_the_base_is_mended():
    """A mend writes to the arena: it has to end first."""
    with pytest.raises(RecoveryError, match="rebased on"):
        Ledger(BASE).mend().rebase(OLDER)


def test_what_is_kept_is_not_reused_and_nothing_is_admitted_before_the_mend():
    """The restored base is worse protected than the older one: both stay, no save begins."""
    assert not RESTORED.reusable(BASE)
    assert not RESTORED.reusable(OLDER)
    assert RESTORED.reusable(CURRENT)
    assert RESTORED.reusable(None)
    assert not RESTORED.may_admit
    assert RESTORED.idle
    with pytest.raises(RecoveryError, match=r"admitted while None is aborted and .* must be kept"):
        RESTORED.admit(NEXT)
    with pytest.raises(RecoveryError) as caught:
        Ledger(BASE, CURRENT, HELD).admit(NEXT)
    assert str(caught.value) == f"{NEXT.describe()} admitted while {CURRENT} is held"


@pytest.mark.parametrize(
    ("kept_protection", "protection", "freed"),
    [(1, 1, True), (1, 2, True), (1, 0, False), (1, -1, False), (0, 0, True), (-1, 0, True)],
)
def test_a_mend_frees_what_is_kept_once_the_base_is_as_good(kept_protection, protection, freed):
    """At least as many losses as the older one bears, and not fewer than none; else it stays."""
    before = replace(RESTORED, kept_protection=kept_protection).mend()
    after = before.mended(protection)
    assert after.kept == (None if freed else OLDER)
    assert after.may_admit == freed
    assert after.reusable(OLDER) == freed
    assert not after.mending
    assert after.base == BASE


def test_a_failed_mend_never_frees_even_what_has_no_known_protection():
    """-1 means "not known": it frees nothing, whatever the older one bore."""
    assert replace(RESTORED, kept_protection=-1).mend().mended(-1).kept == OLDER


def test_a_mend_without_anything_kept_changes_its_mark_only():
    """Begun and ended: the ledger is what it was."""
    ledger = Ledger(BASE, CURRENT, COMMITTED)
    assert ledger.mend() == replace(ledger, mending=True)
    assert not ledger.mend().idle
    assert ledger.mend().decided
    assert ledger.mend().mended(3) == ledger


def test_a_mend_begins_only_when_nothing_is_under_way_and_there_is_a_base():
    """An undecided generation, another mend, or nothing to mend: it raises."""
    for ledger in [*(Ledger(BASE, CURRENT, s) for s in UNDECIDED), Ledger(BASE).mend(), Ledger()]:
        with pytest.raises(RecoveryError, match="mend of"):
            ledger.mend()


def test_a_commit_frees_what_was_kept_and_an_abort_does_not():
    """The committed generation is fully protected by itself; after an abort all is as before."""
    held = replace(RESTORED, current=CURRENT, state=HELD)
    assert held.apply(COMMITTED) == replace(held, base=CURRENT, state=COMMITTED, kept=None)
    assert held.apply(ABORTED) == replace(held, state=ABORTED)


def test_keys_of_admissions_count_the_restores():
    """After a restore the same step is asked for anew; without a word there was none."""
    assert admission_key(7, 2) == "admit/2/7"
    assert admission_key(7) == "admit/0/7"
    assert admission_key(7, 2, 1) == "admit/2/7/1"


@pytest.mark.parametrize("digits", [1, 18])
def test_a_sequence_of_up_to_eighteen_digits_is_taken(digits):
    """No more than a signed number of 64 bits carries."""
    raw = b"take:" + b"9" * digits
    assert parse_admission(raw) == Admission(take=True, sequence=int("9" * digits))
    with pytest.raises(RecoveryError):
        parse_admission(b"take:" + b"9" * 19)


@pytest.mark.parametrize("raw", [b"take:1:2", b"skip:take:1", b"x" * 100])
def test_an_admission_is_one_word_and_one_number(raw):
    """A second colon makes it something else; what is shown of it is cut at 64 bytes."""
    with pytest.raises(RecoveryError) as caught:
        parse_admission(raw)
    assert f"admission is {raw[:64]!r}, expected" in str(caught.value)


def test_to_ask_for_admission_is_one_compare_and_set():
    """The proposal is set if nobody's is there; what stands there is the answer."""
    session = admit_session(7, 2, 4, Ledger(BASE, CURRENT, COMMITTED))
    assert next(session) == CompareSet("admit/2/7", b"take:5")
    with pytest.raises(StopIteration) as stop:
        session.send(b"skip:9")
    assert stop.value.value == Admission(take=False, sequence=9)
    assert next(admit_session(7, 2, 4, RESTORED, 3)) == CompareSet("admit/2/7/3", b"skip:4")


def test_while_something_is_kept_the_first_to_arrive_proposes_to_skip():
    """A save would need the slots of what is kept: it is proposed only when that is free."""
    assert propose(4, RESTORED) == Admission(take=False, sequence=4)
    assert propose(4, RESTORED.mend().mended(1)) == Admission(take=True, sequence=5)
    assert propose(4, Ledger(BASE).mend()) == Admission(take=True, sequence=5)


def test_to_give_up_what_is_kept_changes_nothing_else():
    """The base cannot be mended: saves go on, and the base is still not reused."""
    after = RESTORED.give_up_kept()
    assert after == replace(RESTORED, kept=None)
    assert after.may_admit
    assert not after.reusable(BASE)
    assert after.reusable(OLDER)
