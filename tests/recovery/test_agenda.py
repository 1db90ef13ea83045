"""When the base is mended: names, pauses, calls of others, and the end of trying."""

from __future__ import annotations

import pytest

from recovery.agenda import FAILURES_MAX, KEPT_ATTEMPTS, MendAgenda
from recovery.errors import RecoveryError
from recovery.mend import DONE, FAILED, GIVEN_UP, LOST, PART, MendOutcome


def ended(state, *, agreed=True):
    """Return the end of a mend."""
    return MendOutcome(state, 0, "", agreed=agreed)


def test_nothing_is_due_at_first():
    """A new agenda wants nothing, and neither does one after a commit."""
    agenda = MendAgenda()
    assert agenda.wants(1e9, kept=True) == ""
    agenda.call("damage")
    agenda.after("", sequence=3)
    assert agenda.wants(1e9, kept=True) == ""
    assert agenda.name == "0.3.0"


def test_the_first_reason_stands():
    """Two calls: the first is what is said."""
    agenda = MendAgenda()
    agenda.call("damage")
    agenda.call("more damage")
    assert agenda.wants(0.0, kept=False) == "damage"


def test_names_count_from_what_ended():
    """A restore sets its number, a save only raises the sequence, and attempts start anew."""
    agenda = MendAgenda()
    agenda.after("it was restored", restores=2)
    agenda.ended(ended(FAILED), 0.0, 1.0)
    assert agenda.name == "2.0.1"
    agenda.after("a save was aborted", sequence=5)
    agenda.after("a save was aborted", sequence=4)
    assert agenda.name == "2.5.0"


def test_pauses_grow_to_a_limit_and_trying_ends_unless_something_is_kept():
    """Each pause is one deadline longer, up to a limit; after that only for what is kept."""
    agenda = MendAgenda(due="it was restored")
    for count in range(1, FAILURES_MAX + 3):
        agenda.ended(ended(PART), 100.0, 10.0)
        not_before_s = 100.0 + 10.0 * min(count, FAILURES_MAX)
        for kept in (True, False):
            goes_on = kept or count < FAILURES_MAX
            assert agenda.wants(not_before_s - 0.1, kept=kept) == ""
            assert agenda.wants(not_before_s, kept=kept) == ("it was restored" if goes_on else "")


def test_what_ends_begins_the_count_anew():
    """After a restore or a save no pause is kept, and all failures are allowed again."""
    agenda = MendAgenda(due="damage")
    for _ in range(FAILURES_MAX):
        agenda.ended(ended(FAILED), 100.0, 10.0)
    agenda.after("a save was aborted", sequence=1)
    assert agenda == MendAgenda(due="a save was aborted", sequence=1)
    for _ in range(FAILURES_MAX - 1):
        agenda.ended(ended(FAILED), 0.0, 10.0)
    assert agenda.wants(1e9, kept=False) == "a save was aborted"


def test_done_ends_it_and_giving_way_is_no_failure():
    """A mend that gave way is tried again at once; one that is done is not."""
    agenda = MendAgenda(due="damage")
    agenda.ended(ended(GIVEN_UP), 5.0, 10.0)
    assert (agenda.wants(5.0, kept=False), agenda.failures, agenda.attempt) == ("damage", 0, 1)
    agenda.ended(ended(FAILED), 5.0, 10.0)
    agenda.ended(ended(DONE), 5.0, 10.0)
    assert (agenda.wants(1e9, kept=True), agenda.failures, agenda.attempt) == ("", 0, 3)


@pytest.mark.parametrize(
    ("called", "missed"),
    [
        *(("1.4.2", True), ("1.4.3", True), ("1.5.0", True)),
        *(("1.4.1", False), ("1.3.9", False), ("0.9.9", False), ("2.4.2", False)),
    ],
)
def test_a_call_is_missed_that_is_not_behind(called, missed):
    """Of this restore, and no attempt before the next one; whoever joins counts from there."""
    agenda = MendAgenda(restores=1, sequence=4, attempt=2)
    assert agenda.missed(called.encode()) == (called if missed else "")
    if missed:
        agenda.join(called)
        assert agenda.name == called


def test_what_is_no_name_raises():
    """A garbled call."""
    with pytest.raises(RecoveryError, match="name of a mend is b'once'"):
        MendAgenda().missed(b"once")


@pytest.mark.parametrize("state", [DONE, PART, LOST, GIVEN_UP, FAILED])
@pytest.mark.parametrize("agreed", [True, False])
def test_trying_for_what_is_kept_ends_where_all_agree_that_it_fell_short(state, agreed):
    """After so many attempts, in an end that all obey, with no rank lost."""
    agenda = MendAgenda(attempt=KEPT_ATTEMPTS - 1)
    assert not agenda.is_last(ended(state, agreed=agreed))
    agenda.attempt += 1
    assert agenda.is_last(ended(state, agreed=agreed)) == (agreed and state in (PART, FAILED))
