"""Every scenario file is played: what each rule of the protocol is there to prevent."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulations.runs import run
from simulations.scenario import parse

SCENARIOS = sorted(Path(__file__).parent.parent.joinpath("scenarios").glob("*.sim"))
# P9 needs the disk tier, P17 the layout that codes over several owners, P11 and P14 the real bytes.
ELSEWHERE = {9, 11, 14, 17}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_ends_as_it_says(path):
    """One file is played from its text; verdict and counts are those that it expects."""
    scenario = parse(path.read_text(encoding="utf-8"))
    result = run(scenario.config)
    said = result.violation.text if result.violation else result.verdict
    assert scenario.failures(result) == [], said


def test_every_rule_has_a_scenario():
    """The files' names cover all rules of the protocol that can be played at this level."""
    played = {int(path.name[1:3]) for path in SCENARIOS if path.name[:1] == "p"}
    assert played == set(range(1, 23)) - ELSEWHERE


def test_every_rule_has_its_story():
    """Each file opens with what it plays, naming its rule where it has one."""
    for path in SCENARIOS:
        story = parse(path.read_text(encoding="utf-8")).story
        assert story, path.name
        if path.name.startswith("p"):
            assert story[0].startswith(f"P{int(path.name[1:3])}:"), path.name
