"""Runs drawn from seeds: a fixed set always, a minute of fresh ones where CI is set."""

from __future__ import annotations

import sys
import time

import pytest

from simulations.report import Report
from simulations.runs import PASS, VIOLATED, run
from simulations.scenario import Scenario, write
from simulations.shrink import shrink
from simulations.swarm import WEIGHTS, draw

FIXED = range(1, 9)
FRESH_S = 60.0


def play(seed, report):
    """Play one run; its text, shrunk, if it is not well."""
    config = draw(seed)
    began_s = time.process_time()
    result = run(config)
    report.add(result, time.process_time() - began_s)
    if report.well:
        return ""
    small, found = shrink(config, result, limit_s=30.0)
    said = found.violation or found.verdict
    return f"seed {seed}: {said}\n{write(Scenario(small))}"


def test_fixed_seeds():
    """A fixed set of seeds is played: nothing that was promised is broken."""
    report = Report(FIXED[0])
    for seed in FIXED:
        text = play(seed, report)
        assert not text, text
    assert sum(report.failures.values()) >= 200


@pytest.mark.long
def test_fresh_seeds(rng, capsys):
    """A minute of seeds that nobody has tried: the first one is printed, and what came by kind."""
    report = Report(int(rng.integers(1 << 32)))
    ends_s = time.monotonic() + FRESH_S
    seed = report.seed
    while time.monotonic() < ends_s:
        text = play(seed, report)
        assert not text, text
        seed += 1
    with capsys.disabled():
        lines = ["", f"simulation: seeds from {report.seed}", *report.lines(), ""]
        sys.stdout.write("\n".join(lines))
    assert set(report.fired) == set(WEIGHTS)


def test_equal_seeds_give_equal_runs():
    """One seed is played twice: the same story, event by event."""
    stories = [[], []]
    results = [run(draw(77), story) for story in stories]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 100
    assert results[0] == results[1]


def test_a_run_that_comes_to_no_end_is_unknown(monkeypatch):
    """A run is stopped by its limit of events: it is no pass."""
    monkeypatch.setattr("simulations.world.EVENTS_MAX", 3_000)
    assert run(draw(3)).verdict == "unknown"
    report = Report(3)
    report.add(run(draw(3)), 1.0)
    assert not report.well


def test_a_broken_rule_is_found_and_shrunk(monkeypatch):
    """Every slot may be reused at any time: found, and by few faults."""
    monkeypatch.setattr("recovery.ledger.Ledger.reusable", lambda *_: True)
    seed, result = next(
        (seed, result) for seed in range(40) if (result := run(draw(seed))).verdict == VIOLATED
    )
    small, found = shrink(draw(seed), result, limit_s=10.0)
    assert found.violation.rule == result.violation.rule
    assert len(small.faults) < 10
    monkeypatch.undo()
    assert run(small).verdict == PASS
