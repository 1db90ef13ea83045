"""The text of a scenario: what is written is read back, and nothing else is taken."""

from __future__ import annotations

import pytest

from simulations.config import Config, Fault
from simulations.runs import run
from simulations.scenario import Expectation, Scenario, ScenarioError, parse, write
from simulations.swarm import draw


def test_drawn_runs_survive_the_text():
    """Runs drawn from many seeds are written and read: equal configurations come back."""
    for seed in range(200):
        config = draw(seed)
        assert parse(write(Scenario(config))).config == config


def test_expectations_and_story_survive_the_text():
    """A scenario with all kinds of lines is written and read back whole."""
    scenario = Scenario(
        Config(seed=3, sizes=(1, 0, 20), skewed=True, faults=(Fault(kind="rest", after_s=1.5),)),
        (
            Expectation(("verdict", "pass")),
            Expectation(("restores-that-needed-parity",), 2),
            Expectation(("fired", "rest"), 1),
        ),
        ("P1: a story", "in two lines"),
    )
    assert parse(write(scenario)) == scenario


@pytest.mark.parametrize(
    "line",
    [
        "nodes four",
        "nodes 4 5",
        "colour red",
        "seed 2",
        "skewed perhaps",
        "faults 3",
        "fault",
        "fault burn",
        "fault kill-node node",
        "fault kill-node node=x",
        "fault kill-node node=1 node=2",
        "fault kill-node kind=2",
        "fault kill-node where=1",
        "expect",
        "expect verdict",
        "expect restores 3",
        "expect restores >= many",
        "expect one two three >= 1",
    ],
)
def test_other_lines_are_refused(line):
    """A scenario with one bad line is refused, and the line is named."""
    with pytest.raises(ScenarioError, match="line 2"):
        parse(f"seed 1\n{line}\n")


def test_a_seed_is_needed():
    """Without its seed a run could not be repeated."""
    with pytest.raises(ScenarioError, match="seed"):
        parse("nodes 4\n")


def test_what_is_expected_and_does_not_come_is_said():
    """Expectations that are too high are compared with a run, each with what came instead."""
    text = "seed 5\nexpect verdict beyond\nexpect restores >= 900\nexpect fired kill-node >= 1\n"
    scenario = parse(text)
    said = scenario.failures(run(scenario.config))
    assert [words.split()[0] for words in said] == ["verdict", "restores", "fired"]
