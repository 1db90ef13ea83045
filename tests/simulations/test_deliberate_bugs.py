"""The simulator against itself: a bug that is switched on is found, and without one all is well."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from recovery.ledger import Ledger
from simulations.runs import BEYOND, PASS, run
from tests.simulations.bugs import BUGS, small, swap

ids = [bug.name for bug in BUGS]


def found(bug):
    """Return (seed, violation) of the first run that finds the bug, or None.

    An error that the fakes raise is no finding, nor is a rule that the bug does not break.
    """
    for seed in range(bug.seeds):
        with bug.switch():
            violation = run(bug.runs(seed)).violation
        if violation is not None and violation.rule in bug.rules:
            return seed, violation
    return None


@pytest.mark.parametrize("bug", BUGS, ids=ids)
def test_a_deliberate_bug_is_found(bug, record_property):
    """Within its number of seeds some run breaks a rule that the bug is to break."""
    finding = found(bug)
    assert finding is not None, f"{bug.words}: not found in {bug.seeds} seeds"
    seed, violation = finding
    record_property("found", f"seed {seed}, {violation.rule}: {violation.text}")


def test_the_same_runs_are_well_without_a_bug():
    """Every run that may find a bug ends well when none is on: what is found is the bug."""
    wanted = defaultdict(int)
    for one in BUGS:
        wanted[one.runs] = max(wanted[one.runs], one.seeds)
    bad = {}
    for runs, seeds in wanted.items():
        for seed in range(seeds):
            result = run(runs(seed))
            if result.verdict not in (PASS, BEYOND):
                bad[runs.__name__, seed] = (result.verdict, result.violation)
    assert not bad


def test_a_switched_off_bug_leaves_nothing_behind():
    """After its run every replaced function is what it was: the next test runs the real code."""
    before = Ledger.reusable
    (one,) = [bug for bug in BUGS if bug.name == "reuse of the base"]
    with one.switch():
        assert Ledger.reusable is not before
    assert Ledger.reusable is before


def test_a_bug_that_breaks_nothing_is_not_found():
    """The search says None when no rule is broken: it can fail."""
    harmless = replace(BUGS[0], switch=swap, seeds=1, runs=small)
    assert found(harmless) is None


def test_there_are_enough_bugs_each_with_words_of_its_own():
    """At least fifteen, no two alike."""
    assert len(BUGS) >= 15
    assert len({one.words for one in BUGS}) == len({one.name for one in BUGS}) == len(BUGS)
