"""Files of a living job that somebody removes: told, counted as lost, made again if they can."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import pytest

from recovery.manifest import WHOLE
from replica.arena import OWN, read_arenas
from replica.errors import ArenaError, SaveFailed
from replica.slot import data_name, record_name
from tests.replica.inprocess import JOB
from tests.replica.mend_tools import (
    MENDED_S,
    MendCluster,
    live_slot,
    mends,
    no_damage,
    places,
    protected,
    wanted,
)

FOUR = ["a", "b", "c", "d"]


@pytest.fixture
def arena(open_arena):
    """Return an open arena with an own slot."""
    arena = open_arena()
    arena.allocate(1000, OWN)
    return arena


def test_nothing_is_missing_from_an_arena_that_was_left_alone(arena):
    """A look finds nothing, before and after slots are made and dropped, and after the close."""
    assert arena.removed() == []
    arena.drop(arena.allocate(10, "held"))
    assert (arena.removed(), arena.lost) == ([], "")
    arena.close()
    assert arena.removed() == []


@pytest.mark.parametrize("name", [data_name(0, OWN), record_name(0)])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_slot_whose_file_is_gone_is_found(arena, name, replaced):
    """Its data or its record removed, or another file under the name: that slot, and no other."""
    other = arena.allocate(1000, OWN)
    file = Path(arena.path) / name
    content = file.read_bytes()
    file.unlink()
    if replaced:
        file.write_bytes(content)
    assert [slot.number for slot in arena.removed()] == [0]
    assert (arena.lost, other.number) == ("", 1)


@pytest.mark.parametrize("what", ["", "head", "lock"])
def test_an_arena_that_nobody_will_find_again_is_lost(arena, what):
    """Directory, head or lock gone: every slot is lost, none is made, and the text names the path.

    It stays so when the path is there again: it is another one.
    """
    path = Path(arena.path) / what
    if what:
        path.unlink()
        path.touch()
    else:
        shutil.rmtree(path)
        path.mkdir()
    assert [slot.number for slot in arena.removed()] == [0]
    assert str(path) in arena.lost
    assert "Restart the job" in arena.lost
    with pytest.raises(ArenaError, match="no further save is possible"):
        arena.allocate(10, OWN)


def test_a_parent_directory_counts_too(arena):
    """The whole arena_dir was renamed: what lies there will not be found."""
    node = Path(arena.path).parent
    node.rename(node.with_name("elsewhere"))
    assert arena.removed()
    assert arena.path in arena.lost


@pytest.mark.parametrize(("owner", "fragment"), [(1, WHOLE), (0, 0)])
def test_a_removed_slot_is_made_again(arena_dir, owner, fragment, caplog):
    """Rank 1's own copy, or a fragment, is unlinked while it runs: told, mended, there again."""
    together = threading.Barrier(4, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        if me.rank == 1:
            slot = live_slot(me, owner, fragment, 1)
            (Path(me.job.arena.path) / data_name(slot.number, slot.kind)).unlink()
            assert me.events.wait_for(lambda: bool(me.events.of("scrub")))
            (event,) = me.events.of("scrub")
            assert (event["owner"], event["fragment"], event["step"]) == (owner, fragment, 1)
        told = mends(me)[0]
        assert (told["outcome"], told["protection"]) == ("done", 2)
        assert protected(me)
        assert me.ckpt.status()["slots_damaged"] == int(me.rank == 1)
        assert places(me, 1) == wanted(me)
        together.wait()
        me.commit(2)

    with caplog.at_level(logging.ERROR, "planaria"):
        options = {"scrub_bytes_per_s": 0.0, "timeout_s": 5.0}
        MendCluster(arena_dir, FOUR, "stripe:2+1", **options).run(body)
    assert sum("was removed by somebody" in text for text in caplog.messages) == 1
    assert no_damage(arena_dir)
    files = [slot for view in read_arenas(arena_dir, JOB) for slot in view.slots.values()]
    assert len(files) == 4 * 8


def test_a_removed_arena_fails_every_save_and_says_whose(arena_dir, caplog):
    """Rank 1's directory is gone: it says so once, counts it as a lost node, and no save commits.

    Every rank hears of it with each save, by name and path; a restart makes it anew.
    """
    together = threading.Barrier(2, timeout=MENDED_S)

    def body(me):
        me.commit(1)
        together.wait()
        driver = me.ckpt._engine.driver
        if me.rank == 1:
            with driver.held(MENDED_S) as stands_still:
                assert stands_still
                shutil.rmtree(me.job.arena.path)
                driver._idle.see_to_files()
                driver._idle.see_to_files()
                status = me.ckpt.status()
            assert len(me.events.of("scrub")) == status["slots_damaged"] == 2
            assert (status["protected"], status["protection"]) == ("degraded", 0)
        together.wait()
        for step in (2, 3):
            ticket = me.ckpt.save(step, when_busy="wait")
            with pytest.raises(SaveFailed, match=r"rank 1: ArenaError: .*removed or replaced"):
                ticket.wait("committed", MENDED_S)
        return me.job.arena.path

    with caplog.at_level(logging.ERROR, "planaria"):
        paths = MendCluster(arena_dir, ["a", "b"], "copies:1", timeout_s=3.0).run(body)
    told = [text for text in caplog.messages if "removed or replaced while" in text]
    assert [text for text in told if text.startswith(f"rank 1: {paths[1]}")] == told[:1]
    MendCluster(arena_dir, ["a", "b"], "copies:1").run(lambda me: me.restore() and me.commit(9))
    assert no_damage(arena_dir)
