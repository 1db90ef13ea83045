"""The command: seeds first and last, counts, verdicts, exit codes."""

from __future__ import annotations

import json

from simulations.__main__ import main


def test_seed_is_first_and_last(capsys):
    """Two runs by the command: the seed stands on the first and on the last line."""
    assert main(["--seed", "21", "--runs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == "seed: 21"
    assert lines[1].startswith("2 runs: ")
    assert any("restores that needed parity" in line for line in lines)


def test_json_is_one_object(capsys):
    """The same as JSON: counts of faults, of those that mattered, and of restores."""
    assert main(["--seed", "21", "--runs", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seed"] == 21
    assert report["runs"] == 2
    assert report["well"]
    assert sum(report["failures"].values()) <= sum(report["fired"].values())
    assert report["counts"]["restores"] > 0


def test_work_is_shared(capsys, tmp_path):
    """Two processes share two runs: the sums are those of one process."""
    words = ["--seed", "30", "--runs", "2", "--json", "--keep", str(tmp_path)]
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*words, "--jobs", "2"]) == 0
    shared = json.loads(capsys.readouterr().out)
    for name in ("runs", "verdicts", "fired", "failures", "counts", "events"):
        assert alone[name] == shared[name]


def test_a_scenario_that_ends_otherwise_is_an_error(capsys, tmp_path):
    """A file expects what does not come: exit code 1, and the report says what came."""
    path = tmp_path / "wrong.sim"
    path.write_text("seed 5\nexpect restores >= 50\n", encoding="utf-8")
    assert main(["--scenario", str(path)]) == 1
    assert "restores 1, expected 50 or more" in capsys.readouterr().out


def test_a_failing_seed_is_kept(capsys, tmp_path, monkeypatch):
    """A broken rule: exit code 1, and a scenario that fails in the same way lies in the folder."""
    monkeypatch.setattr("recovery.ledger.Ledger.reusable", lambda *_: True)
    monkeypatch.setattr("simulations.shrink.SHRINK_S", 5.0)
    assert main(["--seed", "1", "--runs", "30", "--keep", str(tmp_path)]) == 1
    assert "replay: python -m simulations --scenario" in capsys.readouterr().out
    kept = sorted(tmp_path.glob("found-*.sim"))
    assert kept
    assert main(["--scenario", str(kept[0])]) == 1
