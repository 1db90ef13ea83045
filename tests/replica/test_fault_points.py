"""The hook by which tests make a process fail: off by default, and every point is on some path."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch

import replica
from replica import fault_points
from replica.fault_points import POINTS, reach, reach_key, set_hook
from tests.sources import ROOT, called_name, parse, python_files

COMMIT_S = 20.0


@pytest.fixture
def reached():
    """Return the points that this process reaches in a test, in their order."""
    points = []
    set_hook(points.append)
    yield points
    set_hook(None)


def test_it_is_off_by_default():
    """A fresh interpreter has no hook, and without one a point does nothing."""
    code = "from replica import fault_points as f; assert f._hook is None; f.reach('close')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    assert fault_points._hook is None
    reach("close")
    reach_key("ack/g/0/0")


def test_every_point_is_explained_and_reached():
    """The points in the sources are those listed, each with its line in the module's docstring."""
    named = {
        call.args[0].value
        for path in python_files("replica")
        for call in ast.walk(parse(path))
        if isinstance(call, ast.Call) and called_name(call) == "reach"
    }
    by_key = {*fault_points._BY_WORD.values(), *fault_points._BY_LATER_WORD.values()}
    assert (named | by_key, named & by_key) == (set(POINTS), set())
    lines = [line.split() for line in fault_points.__doc__.splitlines()]
    assert tuple(line[0] for line in lines if line and line[0] in POINTS) == POINTS


def test_keys_of_sessions_are_points(reached):
    """A key that is set or waited for says how far a session has come; other keys say nothing."""
    for key in (
        "planned/1/value/0/3",
        "offer/g/3",
        "ready/g/0/1",
        "ack/g/0/1",
        "held/g/0/3",
        "decision/g",
        "restore/0/inventory/0/3",
        "restore/0/0/moved/0/3",
        "restore/0/0/vote",
        "mend/0.1.0/0/report/3",
        "mend/0.1.0/sent/3",
        "",
    ):
        reach_key(key)
    assert reached == [
        "save.plan",
        "save.offer",
        "save.ack",
        "save.held",
        "save.commit",
        "restore.inventory",
        "restore.vote",
        "mend.result",
    ]


def test_a_save_and_a_restore_pass_their_points_in_order(reached, arena_dir):
    """Alone in a world, without peers to send to: the points of its own path come, in order."""
    options = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a"}
    with replica.Checkpointer({"w": torch.zeros(10)}, **options) as one:
        one.save(1).wait("committed", COMMIT_S)
        assert one.restore() == 1
    saved = ("plan", "stage", "offer", "encode", "held", "commit", "release")
    restored = ("inventory", "transfer", "decode", "vote", "load")
    firsts = [point for i, point in enumerate(reached) if point not in reached[:i]]
    # To choose its base the first save looks at what is there.
    assert firsts == [
        "save.plan",
        "restore.inventory",
        *(f"save.{name}" for name in saved[1:]),
        *(f"restore.{name}" for name in restored[1:]),
        "close",
    ]


def test_what_the_hook_raises_fails_that_line(arena_dir):
    """A hook that raises as bytes are digested: the save is aborted with its words."""

    def fail(point: str) -> None:
        if point == "save.encode":
            raise replica.ArenaError("made to fail")

    options = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a"}
    with replica.Checkpointer({"w": torch.zeros(10)}, **options) as one:
        set_hook(fail)
        try:
            with pytest.raises(replica.SaveFailed, match="made to fail"):
                one.save(1).wait("committed", COMMIT_S)
        finally:
            set_hook(None)
        one.save(2).wait("committed", COMMIT_S)
