"""Signals end a process by their own meaning, at once, and what was committed is still there."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from replica.arena import read_arenas
from replica.checkpointer import Checkpointer
from replica.group import MemoryGroup
from replica.verify import verify_arenas
from tests.replica.inprocess import Cluster, all_of, outcomes
from tests.replica.scripts import Scripts, finish, hear

pytestmark = [pytest.mark.real, pytest.mark.long]

SOON_S = 20.0
"""Far more than the end of an interpreter takes on a busy machine, far less than any deadline."""
TIMEOUT_S = 6.0
NOISE = ("terminate", "Fatal", "Segmentation", "resource_tracker", "Exception ignored")


@pytest.fixture
def scripts(real):
    """Return a starter of scripts."""
    starter = Scripts(real.port)
    yield starter
    starter.end()


def start(scripts, arena_dir, **asked) -> list:
    """Start two ranks that come to a moment."""
    facts = {"moment": "idle", "handler": "", "steps": 2, "timeout_s": TIMEOUT_S}
    asked = facts | asked
    return scripts.start("moment_script.py", world=2, arena_dir=arena_dir, **asked)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("idle", signal.SIGTERM),
        ("saving", signal.SIGTERM),
        ("saving", signal.SIGINT),
        ("restoring", signal.SIGTERM),
        ("restoring", signal.SIGINT),
    ],
)
def test_a_signal_ends_a_rank_by_its_own_meaning(scripts, arena_dir, moment, number):
    """Rank 1 gets it at each moment: code -15 or -2, soon; rank 0 is told whose fault it is.

    The arenas verify, and the next start of both ranks restores the newest committed step, or the
    one after it, where that happens to be complete.
    """
    first, second = start(scripts, arena_dir, moment=moment)
    assert hear(second) == {"at": moment}
    second.send_signal(number)
    struck_s = time.monotonic()
    code, said, err = finish(second)
    assert (code, said) == (-number, []), err
    assert time.monotonic() - struck_s < SOON_S
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert [word for word in NOISE if word in err] == []
    code, said, err = finish(first)
    assert code == 0, err
    if moment != "idle":
        assert said[0]["failed"] == ("SaveFailed" if moment == "saving" else "RestoreAborted")
        assert "rank 1" in said[0]["text"]
    assert said[-1]["ended"] is True
    check_next_start(arena_dir, {2, 3} if moment == "saving" else {2})


def check_next_start(arena_dir, steps) -> None:
    """Nobody has the arenas, all bytes verify, and both ranks restore one of the steps."""
    assert not any(view.alive for view in read_arenas(arena_dir))
    assert [verdict.damaged for verdict in verify_arenas(arena_dir)] == [0, 0]
    assert [view.head.committed.step for view in read_arenas(arena_dir)] == [2, 2]
    groups = MemoryGroup.make(2)

    def restore(rank):
        state = {"weights": torch.zeros(2_000_000)}
        options = {"job": "job", "node_id": f"node-{rank}", "arena_dir": str(arena_dir)}
        with Checkpointer(state, group=groups[rank], random_states=False, **options) as again:
            step = again.restore()
        assert torch.equal(state["weights"], torch.full((2_000_000,), float(step)))
        return step

    found = all_of(outcomes(2, restore))
    assert found[0] == found[1]
    assert found[0] in steps


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_script_stays_and_decides(scripts, arena_dir, when):
    """SIGTERM to both ranks, twice, while they train: each saves once more and ends with code 3."""
    processes = start(scripts, arena_dir, handler=when, steps=1)
    for process in processes:
        assert hear(process) == {"at": "training"}
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
    ends = [finish(process) for process in processes]
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert all(set(said[-1]["signals"]) == {signal.SIGTERM} for _, said, _ in ends)


def test_no_handler_is_installed_by_us(arena_dir):
    """What every signal does is the same before, during and after a whole life of two ranks."""

    def table():
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    before, during = table(), []

    def body(me):
        me.restore()
        me.commit(1, 2)
        during.append(table())

    Cluster(arena_dir, ["a", "b"], "copies:1").run(body)
    assert during == [before, before]
    assert table() == before
