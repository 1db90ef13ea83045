"""What others put into the arena's path is neither followed, read nor changed; ours is closed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from replica.arena import Arena, clean, read_arenas
from replica.arena_views import prune
from replica.errors import ArenaError
from tests.replica.arena_tools import OPEN

NOBODY = 65534
LEVELS = ["user", "job", "node", "position", "lock", "head", "data", "record"]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def paths_of(arena):
    """Return the path of every level of an arena with slot 0, from the user's directory down."""
    position = Path(arena.path)
    node, job, user = list(position.parents)[:3]
    files = ["lock", "head", "slot-0.safetensors", "slot-0.record"]
    return dict(
        zip(LEVELS, [user, job, node, position, *(position / f for f in files)], strict=True)
    )


def everything(directory):
    """Return kind, mode, owner, time and content of all that lies below a directory."""
    found = {}
    for path in sorted([directory, *directory.rglob("*")]):
        info = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        facts = (stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), info.st_uid)
        # Only what was written has another time; to look at a directory is allowed.
        found[str(path)] = (*facts, info.st_mtime_ns, content)
    return found


def every_use(arena_dir):
    """Do all that anybody does with an arena directory; the refusals, in words."""
    said = []
    for use in (
        lambda: Arena.open(arena_dir, **OPEN | {"timeout_s": 0.0}).close(),
        lambda: read_arenas(arena_dir),
        lambda: read_arenas(arena_dir, OPEN["job"]),
        lambda: clean(arena_dir),
        lambda: prune(arena_dir),
    ):
        try:
            use()
        except ArenaError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("target", ["a directory", "a file", "an arena", "nothing"])
def test_a_planted_link_leads_nowhere(open_arena, arena_dir, level, target):
    """At each level a link to other files of the same user: refused, and those stay as they are."""
    arena = open_arena()
    arena.allocate(10, "own")
    arena.close()
    place = paths_of(arena)[level]
    outside = arena_dir.parent / f"{arena_dir.name}-outside"
    outside.mkdir(mode=0o755)
    try:
        (outside / "file").write_bytes(b"precious")
        (outside / "file").chmod(0o644)
        other = open_arena(outside, job="another", node_id="n")
        other.allocate(10, "own")
        other.close()
        goals = {
            "a directory": outside,
            "a file": outside / "file",
            "an arena": paths_of(other)[level],
            "nothing": outside / "missing",
        }
        before = everything(outside)
        place.rename(arena_dir / "moved")
        place.symlink_to(goals[target])
        said = every_use(arena_dir)
        assert any(f"{place} is a symbolic link" in text for text in said)
        assert everything(outside) == before
        assert place.is_symlink()
    finally:
        for path in sorted(outside.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        outside.rmdir()


@root_only
@pytest.mark.parametrize("level", LEVELS)
def test_what_another_user_left_in_our_place_is_neither_read_nor_changed(
    open_arena, arena_dir, level, caplog
):
    """At each level something of another user's stands: it stays as it is, and that is said."""
    arena = open_arena()
    slot = arena.allocate(10, "own")
    slot.data[:] = 7
    arena.close()
    place = paths_of(arena)[level]
    os.chown(place, NOBODY, NOBODY)
    before = everything(place) if place.is_dir() else {str(place): place.read_bytes()}
    said = "\n".join([*every_use(arena_dir), caplog.text])
    assert f"{place} belongs to user {NOBODY}" in said
    after = everything(place) if place.is_dir() else {str(place): place.read_bytes()}
    assert after == before


@root_only
def test_another_users_own_arenas_beside_ours_stay(open_arena, arena_dir, children):
    """A second user's job of the same name in the same arena_dir: each sees its own only."""
    arena_dir.chmod(0o777)
    code = """
import encodings.ascii  # a lazy import, which another user may not read
os.setresuid(65534, 65534, 65534)
arena = Arena.open(DIR, **OPEN)
arena.allocate(100, "own").data[:] = 3
say(arena.path)
wait()
arena.close()
say([[v.path, v.alive] for v in read_arenas(DIR)])
"""
    child = children.start(code, arena_dir)
    theirs = Path(child.hear())
    ours = open_arena()
    ours.allocate(100, "own")
    assert [view.path for view in read_arenas(arena_dir)] == [ours.path]
    before = everything(theirs)
    ours.close()
    assert clean(arena_dir) == [ours.path]
    assert everything(theirs) == before
    child.tell()
    assert child.hear() == [[str(theirs), False]]


@pytest.mark.parametrize("mode", [0o2700, 0o2777, 0o3777, 0o1777])
def test_set_bits_of_a_directory_above_do_not_spread(open_arena, arena_dir, mode):
    """Below a setgid or sticky arena_dir: directories 0700 and files 0600, no bit inherited."""
    arena_dir.chmod(mode)
    arena = open_arena()
    arena.allocate(100, "own")
    paths = paths_of(arena).values()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in paths]
    assert modes == [0o700] * 4 + [0o600] * 4
    assert stat.S_IMODE(arena_dir.stat().st_mode) == mode


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_modes_are_the_same_under_any_umask(open_arena, umask):
    """All four kinds of files and directories, in this process, whatever its umask; it stays."""
    former = os.umask(umask)
    try:
        arena = open_arena()
        arena.allocate(100, "own")
        arena.allocate(100, "held")
        arena.close()
        arena = open_arena()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in paths_of(arena).values()]
        assert modes == [0o700] * 4 + [0o600] * 4
    finally:
        assert os.umask(former) == umask


@pytest.mark.parametrize("name", ["../../x", "..", ".", "/", "a/../../b", "\0", "\n", "-rf", "~"])
def test_no_name_leaves_the_directory(open_arena, arena_dir, name):
    """Jobs and nodes named like paths: every file lies below the user's own directory."""
    outside = {path for path in arena_dir.parent.iterdir() if path != arena_dir}
    arena = open_arena(job=name, node_id=name)
    arena.allocate(10, "own")
    assert Path(arena.path).is_relative_to(arena_dir / f"planaria-{os.geteuid()}")
    assert len(Path(arena.path).relative_to(arena_dir).parts) == 4
    assert [path.name for path in arena_dir.iterdir()] == [f"planaria-{os.geteuid()}"]
    appeared = {path for path in arena_dir.parent.iterdir() if path != arena_dir} - outside
    assert not any(path.name in ("x", "b") for path in appeared)
