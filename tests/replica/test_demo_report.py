"""The demo's pure parts: options, the comparison of two runs, figures, sentences, exit codes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from replica.demo.compare import Comparison, compare, outcome
from replica.demo.journal import Line
from replica.demo.options import DemoOptions, draw_kill, parse_demo_options
from replica.demo.plot import mean_losses
from replica.demo.report import Kill, committed_before, make_report, round_after
from replica.demo.story import (
    BEYOND,
    DIFFERENT,
    EQUAL,
    exit_code,
    kill_sentence,
    noticed_sentence,
    opening,
    resumed_sentence,
    table,
    verdict,
)

WORLD, STEPS = 3, 8
KILL_AT_S = 100.0


def line(event, at_s, rank, round_id, **facts):
    """Return a journal line of a rank that is alone on its node; rank 1 moves after the kill."""
    moved = rank == 1 and round_id == "second"
    return Line(
        event=event,
        at_s=at_s,
        node="node-new" if moved else f"node-{rank}",
        pid=rank,
        rank=rank,
        world=WORLD,
        round_id=round_id,
        facts=facts,
    )


def step_line(at_s, rank, round_id, step, shift=0.0):
    """Return the line of a step whose loss follows from rank and step."""
    loss = 5.0 + rank - step / 16 + shift
    return line("step", at_s, rank, round_id, step=step, loss=loss, loss_bits=loss.hex())


def restore_line(at_s, rank, *, step, here, seconds, reason="newest"):
    """Return a restore event: own copy at hand, or 1,000 shard bytes received."""
    detail = {
        "event": "restore",
        "step": step,
        "source": "none" if step is None else "own" if here else "peers",
        "bytes_received": 0 if here or step is None else 1000,
        "shard_bytes": 1000,
        "bytes_local": 0,
        "seconds": {"inventory": 0.01, "transfer": 0.02, "decode": 0.0, "load": 0.03} | seconds,
        "reason": reason,
    }
    return line("checkpoint", at_s, rank, "second", detail=detail)


def save_line(at_s, rank, step, result):
    """Return a save event."""
    return line(
        "checkpoint", at_s, rank, "first", detail={"event": "save", "step": step, "outcome": result}
    )


def lossy_run(*, resumed=4, reason="newest"):
    """Return lines of a run: steps 1 to 5, a kill, a restore of step 4 (or none), the rest."""
    lines = [line("start", 90.0 + rank, rank, "first") for rank in range(WORLD)]
    lines += [
        step_line(94.0 + step, rank, "first", step) for step in range(1, 6) for rank in range(WORLD)
    ]
    lines += [
        save_line(94.5 + step, rank, step, "committed")
        for step in range(1, 5)
        for rank in range(WORLD)
    ]
    lines += [save_line(99.9, 0, 5, "skipped"), save_line(100.5, 0, 5, "committed")]
    lines += [line("interrupted", 100.25, 1, "first", error="RuntimeError: closed")]
    lines += [line("start", 110.0 + rank, rank, "second") for rank in range(WORLD)]
    lines += [
        restore_line(113.0, 0, step=resumed, here=True, seconds={"total": 0.1}, reason=reason),
        restore_line(113.0, 1, step=resumed, here=False, seconds={"total": 0.4, "transfer": 0.3}),
        restore_line(113.0, 2, step=resumed, here=True, seconds={"total": 0.2}),
    ]
    again = range((resumed or 0) + 1, STEPS + 1)
    lines += [
        step_line(110.0 + step + rank, rank, "second", step)
        for step in again
        for rank in range(WORLD)
    ]
    return lines + [
        line("final", 130.0, rank, "second", digest=f"d{rank}") for rank in range(WORLD)
    ]


def whole_run():
    """Return lines of the uninterrupted run."""
    steps = [
        step_line(200.0 + step, rank, "only", step)
        for step in range(1, STEPS + 1)
        for rank in range(WORLD)
    ]
    return steps + [line("final", 220.0, rank, "only", digest=f"d{rank}") for rank in range(WORLD)]


def kill(nodes=("node-2",)):
    """Return the kill of some nodes."""
    return Kill(
        at_s=KILL_AT_S, nodes=nodes, ranks=(2, 1)[: len(nodes)], processes=2, arena_bytes=3 << 20
    )


def report_of(lines, *, killed=None):
    """Return the report of lines against the uninterrupted run."""
    comparison = compare(outcome(lines), outcome(whole_run()), world=WORLD, steps=STEPS)
    return make_report(
        lines,
        killed or kill(),
        comparison,
        nodes=WORLD,
        redundancy="copies:1",
        steps=STEPS,
        seed=7,
    )


def test_figures_of_a_run_that_lost_a_node():
    """Every figure follows from the journals by the stated rule, computed here by hand."""
    figures = report_of(lossy_run()).to_json()
    assert figures["bitwise_equal"] is True
    assert (figures["nodes"], figures["killed"], figures["redundancy"]) == (3, 1, "copies:1")
    assert figures["committed_step_at_kill"] == 4
    assert figures["resumed_step"] == 4
    assert figures["steps_lost"] == 1
    assert figures["source"] == "peers"
    assert figures["bytes_received"] == 1000
    assert list(figures["bytes_received_by_rank"]) == [0, 1000, 0]
    assert (figures["bytes_expected"], figures["bytes_read_locally"]) == (1000, 0)
    assert figures["seconds"] == {
        "detect": 0.25,
        "relaunch": 11.75,
        "inventory": 0.01,
        "transfer": 0.3,
        "decode": 0.0,
        "load": 0.03,
        "restore_total": 0.4,
        "kill_to_training": 17.0,
    }
    assert figures["saves"] == {"committed": 5, "skipped": 1}


def test_json_holds_the_promised_names_and_plain_values():
    """The object survives a round trip through JSON and has every promised field."""
    figures = json.loads(json.dumps(report_of(lossy_run()).to_json()))
    promised = {
        *("nodes", "redundancy", "killed", "committed_step_at_kill", "resumed_step", "steps_lost"),
        *("source", "bytes_received", "bytes_received_by_rank", "seconds", "bitwise_equal"),
    }
    assert promised <= figures.keys()
    phases = {"detect", "relaunch", "inventory", "transfer", "decode", "load", "restore_total"}
    assert figures["seconds"].keys() == phases | {"kill_to_training"}


def test_commits_after_the_kill_do_not_count():
    """A commit noted after the kill is not what was committed at it."""
    lines = lossy_run()
    assert committed_before(lines, KILL_AT_S) == 4
    assert committed_before(lines, KILL_AT_S + 1) == 5
    assert committed_before(lines, 0.0) == 0


def test_round_after_skips_a_round_that_never_trained():
    """A round that failed before its first step is not the one that training resumed in."""
    failed = [line("start", 101.0 + rank, rank, "failed") for rank in range(WORLD)]
    found = round_after([*failed, *lossy_run()], KILL_AT_S, world=WORLD)
    assert found.started_at[0] == 110.0
    with pytest.raises(ValueError, match="no round of 3 ranks trained after the kill"):
        round_after(whole_run()[:0] + failed, KILL_AT_S, world=WORLD)


def test_ranks_that_restored_different_steps_are_no_report():
    """Two restored steps in one round are refused, not averaged."""
    lines = lossy_run()
    lines.append(restore_line(113.5, 2, step=3, here=True, seconds={"total": 0.1}))
    with pytest.raises(ValueError, match="different steps"):
        report_of(lines)


def test_detection_falls_back_to_the_next_round():
    """Without a survivor's note the first worker of the next round ends the detection."""
    lines = [entry for entry in lossy_run() if entry.event != "interrupted"]
    seconds = report_of(lines).seconds
    assert (seconds.detect, seconds.relaunch) == (10.0, 2.0)


@pytest.mark.parametrize("rank", range(WORLD))
def test_one_bit_in_one_loss_is_a_difference(rank):
    """A loss that differs in its last bit, even in a step that was done twice, is found."""
    lines = lossy_run()
    lines.append(step_line(105.0, rank, "second", 5, shift=2**-48))
    report = report_of(lines)
    assert not report.bitwise_equal
    assert f"rank {rank}, step 5" in report.differences[0]


@pytest.mark.parametrize("event", ["step", "final"])
def test_a_missing_line_is_a_difference(event):
    """A loss or a digest that one run lacks is never taken for equal."""
    lines = whole_run()
    lines.remove(next(entry for entry in lines if entry.event == event))
    comparison = compare(outcome(lines), outcome(whole_run()), world=WORLD, steps=STEPS)
    assert not comparison.equal
    assert not compare(outcome([]), outcome([]), world=WORLD, steps=STEPS).equal


def test_another_digest_is_a_difference():
    """Equal losses with another final state of one rank are different."""
    lines = [
        dataclasses.replace(entry, facts={"digest": "x"}) if entry.event == "final" else entry
        for entry in lossy_run()
    ]
    assert len(report_of(lines).differences) == WORLD


def test_exit_code_equal():
    """A restored run that ends equal exits 0 and says so."""
    options = DemoOptions(nodes=3, redundancy="copies:1", steps=STEPS)
    report = report_of(lossy_run())
    assert exit_code(report, options) == EQUAL == 0
    assert verdict(report, options).startswith("EQUAL, bit for bit")


def test_exit_code_beyond_the_layout():
    """More nodes than the layout survives, said so and begun anew: exit code 3."""
    options = DemoOptions(nodes=3, kill=2, redundancy="copies:1", steps=STEPS)
    lines = lossy_run(resumed=None, reason="owner 1 cannot be rebuilt: 0 of 1 fragments")
    report = report_of(lines, killed=kill(("node-2", "node-1")))
    assert exit_code(report, options) == BEYOND == 3
    assert (report.source, report.resumed_step, report.steps_lost) == ("none", 0, 5)
    assert report.bytes_expected == 0
    assert "owner 1 cannot be rebuilt" in resumed_sentence(report)
    assert verdict(report, options).startswith("BEYOND THE LAYOUT: 2 nodes died")


@pytest.mark.parametrize("resumed", [None, 3])
def test_exit_code_when_less_was_restored_than_promised(resumed):
    """A kill that the layout survives and a restore below the committed step: 1, though equal."""
    options = DemoOptions(nodes=3, redundancy="copies:1", steps=STEPS)
    report = report_of(lossy_run(resumed=resumed))
    assert report.bitwise_equal
    assert exit_code(report, options) == DIFFERENT == 1
    assert verdict(report, options).startswith("DIFFERENT from what was promised")


def test_exit_code_different_wins_over_beyond():
    """Garbage after a loss beyond the layout is 1, not 3."""
    options = DemoOptions(nodes=3, kill=2, redundancy="copies:1", steps=STEPS, sabotage=True)
    lines = [*lossy_run(resumed=None), step_line(105.0, 0, "second", 5, shift=1.0)]
    report = report_of(lines, killed=kill(("node-2", "node-1")))
    assert exit_code(report, options) == DIFFERENT
    assert "as it must be after --sabotage" in verdict(report, options)


def test_a_killed_process_is_always_survivable():
    """A worker's death loses no memory, so nothing restored is less than promised."""
    options = DemoOptions(nodes=3, redundancy="none", kill_process=True, steps=STEPS)
    assert exit_code(report_of(lossy_run(resumed=None)), options) == DIFFERENT


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "1"], "--nodes must be 2 to 32, got 1"),
        (["--kill", "4"], "--kill must be 1 to 3"),
        (["--kill", "0"], "--kill must be 1 to 3"),
        (["--steps", "2"], "--steps must be at least 6, got 2"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--redundancy", "stripe:4+1"], "needs 6 nodes, but this job has 4"),
        (["--redundancy", "mirror"], "'mirror' is not one of"),
        (["--nodes", "many"], "invalid int value"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_usage_errors_exit_2_with_one_sentence(arguments, sentence, capsys):
    """What cannot be done is refused before anything starts, naming the option and the rule."""
    with pytest.raises(SystemExit) as ended:
        parse_demo_options(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_options_are_read_as_given():
    """Every option arrives in its field."""
    options = parse_demo_options(
        [
            "--nodes",
            "5",
            "--kill",
            "2",
            "--redundancy",
            "stripe:3+1",
            "--steps",
            "30",
            "--kill-process",
            "--json",
            "-",
            "--seed",
            "9",
            "--sabotage",
        ]
    )
    assert options == DemoOptions(
        nodes=5,
        kill=2,
        redundancy="stripe:3+1",
        steps=30,
        kill_process=True,
        json="-",
        seed=9,
        sabotage=True,
    )
    assert str(DemoOptions().layout) == "stripe:2+1"


def test_kill_is_drawn_from_the_seed():
    """One seed gives one plan; many seeds reach every node, many steps, and any part of a step."""
    plans = [draw_kill(DemoOptions(nodes=5, kill=2, seed=seed)) for seed in range(200)]
    assert plans[:20] == [draw_kill(DemoOptions(nodes=5, kill=2, seed=seed)) for seed in range(20)]
    assert {victim for plan in plans for victim in plan.victims} == set(range(5))
    assert all(len(set(plan.victims)) == 2 for plan in plans)
    assert {plan.step for plan in plans} == set(range(12, 29))
    assert min(plan.fraction for plan in plans) < 0.05
    assert max(plan.fraction for plan in plans) > 0.95


def test_shortest_run_leaves_room_for_a_kill():
    """With the fewest steps the kill still falls after the first step and before the last."""
    plans = [draw_kill(DemoOptions(steps=6, seed=seed)) for seed in range(50)]
    assert {plan.step for plan in plans} <= {2, 3, 4}


def test_sentences_name_the_facts():
    """The story names nodes, ranks, sizes and what kind of kill it was."""
    options = DemoOptions(nodes=4, kill=2, steps=40, seed=3)
    assert "4 nodes, stripe:2+1, which survives the loss of 2" in opening(options)
    assert "2 nodes at once will be killed; seed 3" in opening(options)
    told = kill_sentence(kill(("node-2", "node-1")), step=5, kept_node=False)
    assert told == (
        "SIGKILL to node-2 (rank 2), node-1 (rank 1) in step 6: 2 processes, "
        "and 3.0 MiB of arena deleted"
    )
    assert "node and arena stay" in kill_sentence(kill(), step=5, kept_node=True)
    error = "RuntimeError: [/a/pair.cc:537] Connection closed by peer [127.0.0.1]:2"
    assert noticed_sentence("node-0", error) == (
        "node-0 notices: RuntimeError: Connection closed by peer [127.0.0.1]:2"
    )
    assert "restored step 4 from their own and their peers' arenas" in resumed_sentence(
        report_of(lossy_run())
    )


def test_table_shows_every_phase_and_a_dash_for_what_was_not_measured():
    """Rows line up; a run without a checkpointer has dashes, never zeros."""
    report = report_of(lossy_run())
    rows = table(report).splitlines()
    assert len({len(row) for row in rows}) == 1
    assert rows[2].split()[-1] == "0.250"
    bare = [entry for entry in lossy_run(resumed=None) if entry.event != "checkpoint"]
    assert table(report_of(bare)).count(" -") >= 5


def test_mean_losses_are_over_the_ranks():
    """The picture's curve is the mean of all ranks at each step, in order of steps."""
    curve = mean_losses(outcome(whole_run()))
    assert list(curve) == list(range(1, STEPS + 1))
    assert curve[8] == pytest.approx(5.0 + 1.0 - 0.5)


def test_comparison_without_differences_is_equal():
    """Two equal outcomes have no difference to name."""
    same = compare(outcome(lossy_run()), outcome(whole_run()), world=WORLD, steps=STEPS)
    assert same == Comparison(differences=())
    assert same.equal
