"""Forked and spawned children of a rank leave its job alone, however they end."""

from __future__ import annotations

import pytest

from replica.arena import read_arenas
from replica.verify import verify_arenas
from tests.replica.scripts import Scripts, finish

pytestmark = pytest.mark.real

NOISE = ("terminate", "Fatal", "Segmentation", "resource_tracker", "Exception ignored", "leaked")


def test_children_neither_save_nor_delete_nor_hang(real, arena_dir):
    """Two ranks fork children amid each save: these end by their own code, every save commits.

    Four kinds of children (leaving by the interpreter's end, closing, leaving a with block, trying
    to save) and the workers of data loaders, forked and spawned. The scripts then end without a
    close, soon, in silence, and all that they left verifies.
    """
    scripts = Scripts(real.port)
    try:
        ends = [
            finish(process)
            for process in scripts.start("fork_script.py", world=2, arena_dir=arena_dir)
        ]
    finally:
        scripts.end()
    for code, said, err in ends:
        assert code == 0, err
        assert [word for word in NOISE if word in err] == []
        children = {one["child"]: (one["code"], one["done"]) for one in said if "child" in one}
        assert children == dict.fromkeys(
            ("fall_off", "close", "leave_a_block", "save"), (5, False)
        ), err
        loaders = {one["loader"]: (one["right"], one["done"]) for one in said if "loader" in one}
        assert loaders == {"fork": (True, False), "spawn": (True, False)}
        assert said[-1] == {"step": 7, "threads": ["MainThread"], "status": 7}
    for view in read_arenas(arena_dir):
        assert (view.alive, view.head.committed.step) == (False, 8)
    assert [verdict.damaged for verdict in verify_arenas(arena_dir)] == [0, 0]
