"""Reading arenas disturbs nobody and follows no link; cleaning removes what nobody uses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from erasure.digest import CHUNK_BYTES, chunk_digests
from recovery.manifest import Generation, SlotRecord, shard_digest
from replica.arena import Arena, clean, read_arenas
from replica.errors import ArenaError
from replica.procs import end, identify
from tests.replica.arena_tools import OPEN, PREAMBLE

OWNER = """
arena = Arena.open(DIR, **OPEN | (ARGS[0] if ARGS else {}))
arena.allocate(4096, "own")
say(arena.path)
wait()
arena.close()
say("closed")
"""


def record(data, step: int) -> SlotRecord:
    """Describe all of ``data`` as owner 0's shard at a step."""
    digests = chunk_digests(data, CHUNK_BYTES)
    return SlotRecord(
        job="job",
        generation=Generation(epoch=1, step=step, id=f"{step:032x}"),
        owner=0,
        world=1,
        k=1,
        m=0,
        fragment=-1,
        shard_bytes=data.size,
        length=data.size,
        chunk_bytes=CHUNK_BYTES,
        chunk_digests=digests,
        shard_digest=shard_digest(digests, data.size),
    )


def test_what_is_read_is_what_was_written(open_arena, arena_dir):
    """Heads, slots, records and data of three arenas of two jobs, in the order of their paths."""
    arenas = [
        open_arena(job="a", node_id="n", position=0, rank=0, world=2),
        open_arena(job="a", node_id="n", position=1, rank=1, world=2),
        open_arena(job="b", node_id="m"),
    ]
    slot = arenas[1].allocate(1000, "held")
    slot.data[:] = 4
    views = read_arenas(arena_dir)
    assert [view.path for view in views] == sorted(arena.path for arena in arenas)
    assert [v.head.rank for v in read_arenas(arena_dir, "a")] == [0, 1]
    assert [v.head for v in read_arenas(arena_dir, "b")] == [arenas[2].head]
    assert read_arenas(arena_dir, "a", "m") == read_arenas(arena_dir, "c") == []
    assert len(read_arenas(arena_dir, "a", "n")) == len(read_arenas(arena_dir, None, "n")) == 2
    view = read_arenas(arena_dir, "a")[1].slots[slot.number]
    assert (view.number, view.kind, view.capacity, view.record) == (0, "held", 1000, None)
    assert int(view.data.sum()) == 4000
    assert read_arenas(arena_dir, "a")[1].bytes_allocated == 1000


def test_a_reader_cannot_write(open_arena, arena_dir):
    """The data of a view are read-only."""
    open_arena().allocate(100, "own")
    [view] = read_arenas(arena_dir)
    with pytest.raises(ValueError, match="read-only"):
        view.slots[0].data[0] = 1


def test_a_view_outlives_its_slot(open_arena, arena_dir):
    """Data that are mapped stay readable after their owner has dropped the slot and closed."""
    arena = open_arena()
    slot = arena.allocate(10_000, "own")
    slot.data[:] = 2
    [view] = read_arenas(arena_dir)
    arena.drop(slot)
    arena.close()
    clean(arena_dir)
    assert int(view.slots[0].data.sum()) == 20_000


def test_alive_means_that_the_owner_runs_and_has_it_open(arena_dir, children):
    """Alive while it runs, dead after SIGKILL, dead after close, whoever asks."""
    killed = children.start(OWNER, arena_dir, {"job": "killed"})
    closed = children.start(OWNER, arena_dir, {"job": "closed"})
    assert (len(killed.hear()), len(closed.hear())) != (0, 0)
    assert [view.alive for view in read_arenas(arena_dir)] == [True, True]
    killed.end()
    closed.tell()
    assert closed.hear() == "closed"
    assert [view.alive for view in read_arenas(arena_dir)] == [False, False]
    assert [view.bytes_allocated for view in read_arenas(arena_dir)] == [4096, 4096]


def test_reading_takes_no_lock_and_changes_nothing(open_arena, arena_dir):
    """Names, sizes, times and modes of every file below are the same after a read as before it."""
    arena = open_arena()
    arena.allocate(4096, "own")
    arena.close()

    def state():
        facts = ((path, path.lstat()) for path in sorted(arena_dir.rglob("*")))
        return [(str(p), s.st_ino, s.st_size, s.st_mode, s.st_mtime_ns) for p, s in facts]

    before = state()
    read_arenas(arena_dir)
    assert state() == before
    # The reader has no lock: the arena can be had while the views are there.
    views = read_arenas(arena_dir)
    assert open_arena(timeout_s=0.0).slots.keys() == views[0].slots.keys()


WRITER = """
from recovery.manifest import Generation, SlotRecord, shard_digest
from erasure.digest import chunk_digests
import numpy
arena = Arena.open(DIR, **OPEN)
digests = chunk_digests(numpy.zeros(8192, numpy.uint8), 4096)
say("writing")
step = 0
slots = []
while True:
    step += 1
    generation = Generation(epoch=1, step=step, id=f"{step:032x}")
    slot = arena.allocate(8192, "own", chunk_bytes=4096)
    slot.data[:] = step % 251
    slot.write_record(SlotRecord(job="job", generation=generation, owner=0, world=1, k=1, m=0,
        fragment=-1, shard_bytes=8192, length=8192, chunk_bytes=4096,
        chunk_digests=digests, shard_digest=shard_digest(digests, 8192)))
    arena.update_head(committed=generation, attempts=((f"{step:032x}", "0" * 32, step),) * 60)
    slots.append(slot)
    if len(slots) > 2:
        arena.drop(slots.pop(0))
"""


def test_reading_is_safe_while_the_owner_writes(arena_dir, children):
    """A writer that never rests is read 200 times: a head each time, and steps that never fall."""
    writer = children.start(WRITER, arena_dir)
    assert writer.hear() == "writing"
    seen = 0
    for _ in range(200):
        [view] = read_arenas(arena_dir)
        assert (view.problem, view.alive) == ("", True)
        committed = view.head.committed.step if view.head.committed else 0
        assert committed >= seen
        seen = committed
        for slot in view.slots.values():
            # Either it holds nothing, or what its record says: the bytes are of that one step.
            if slot.record is not None:
                assert set(np.unique(slot.data)) == {slot.record.generation.step % 251}
    assert seen > 0


def test_nothing_to_read_is_an_empty_list_and_a_missing_place_an_error(arena_dir):
    """A directory without arenas gives []; one that is not there is named."""
    assert read_arenas(arena_dir) == []
    assert clean(arena_dir) == []
    assert list(arena_dir.iterdir()) == []
    with pytest.raises(ArenaError, match="does not exist"):
        read_arenas(arena_dir / "missing")


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_links_are_not_followed(open_arena, arena_dir, depth, caplog):
    """A link at each level leads to a real arena: refused at the top, else left out."""
    arena = open_arena()
    arena.close()
    real = [Path(arena.path), *Path(arena.path).parents][3 - depth]
    real.rename(arena_dir / "elsewhere")
    real.symlink_to(arena_dir / "elsewhere")
    if depth == 0:
        with pytest.raises(ArenaError, match="symbolic link"):
            read_arenas(arena_dir)
        with pytest.raises(ArenaError, match="symbolic link"):
            clean(arena_dir)
    else:
        assert read_arenas(arena_dir) == []
        assert clean(arena_dir) == []
        assert "symbolic link" in caplog.text
    assert sum(path.name == "head" for path in (arena_dir / "elsewhere").rglob("*")) == 1


@pytest.mark.parametrize("name", ["slot-0.safetensors", "slot-0.record"])
def test_a_linked_slot_is_left_out(open_arena, arena_dir, name, caplog):
    """A slot whose file was replaced by a link is not read; the arena's other slots are."""
    arena = open_arena()
    arena.allocate(10, "own")
    arena.allocate(10, "held")
    arena.close()
    path = Path(arena.path, name)
    path.rename(arena_dir / "elsewhere")
    path.symlink_to(arena_dir / "elsewhere")
    [view] = read_arenas(arena_dir)
    assert list(view.slots) == [1]
    assert "symbolic link" in caplog.text


def test_a_slot_with_holes_is_left_out(open_arena, arena_dir):
    """Reading a hole in a full tmpfs would be a SIGBUS: a sparse file is no slot."""
    arena = open_arena()
    arena.allocate(8192, "own")
    arena.close()
    path = Path(arena.path, "slot-0.safetensors")
    with path.open("wb") as file:
        file.truncate(8192)
    [view] = read_arenas(arena_dir)
    assert view.slots == {}


def test_a_head_that_cannot_be_read_says_why(open_arena, arena_dir, caplog):
    """Without a whole head a view has a problem in words instead, and its slots all the same."""
    arena = open_arena()
    slot = arena.allocate(10, "own")
    slot.write_record(record(slot.data, 5))
    arena.close()
    Path(arena.path, "head").write_bytes(b"garbage" * 100)
    [view] = read_arenas(arena_dir)
    assert view.head is None
    assert not view.alive
    assert f"{arena.path}/head is damaged" in view.problem
    assert view.problem in caplog.text
    assert view.slots[0].record.generation.step == 5
    Path(arena.path, "head").unlink()
    assert "has no head" in read_arenas(arena_dir)[0].problem


# --- cleaning


def test_cleaning_removes_dead_arenas_and_empty_directories(arena_dir, children):
    """Of a killed, a closed and a living one the living one stays; nothing else is left."""
    paths = {}
    for job in ("killed", "closed", "living"):
        child = children.start(OWNER, arena_dir, {"job": job})
        paths[job] = child.hear()
        if job == "killed":
            child.end()
        if job == "closed":
            child.tell()
            child.process.wait()
    dead = sorted([paths["killed"], paths["closed"]])
    assert clean(arena_dir, dry_run=True) == dead
    assert all(Path(path, "head").exists() for path in paths.values())
    assert clean(arena_dir) == dead
    assert [view.path for view in read_arenas(arena_dir)] == [paths["living"]]
    assert [path.name for path in arena_dir.rglob("lock")] == ["lock"]
    assert clean(arena_dir) == []


def test_cleaning_one_job_leaves_the_others(open_arena, arena_dir):
    """Only arenas of the named job go; the last one takes this user's directory with it."""
    for job in ("a", "b"):
        open_arena(job=job).close()
    assert len(clean(arena_dir, "a")) == 1
    assert [view.head.job for view in read_arenas(arena_dir)] == ["b"]
    assert len(clean(arena_dir, "b")) == 1
    assert list(arena_dir.iterdir()) == []


def test_what_is_not_ours_in_an_arena_stays(open_arena, arena_dir):
    """A file that no arena makes is not removed, nor is the directory that it lies in."""
    arena = open_arena()
    arena.close()
    note = Path(arena.path, "note.txt")
    note.write_text("keep")
    assert clean(arena_dir) == [arena.path]
    assert note.read_text() == "keep"
    assert [path.name for path in Path(arena.path).iterdir()] == ["note.txt"]


def test_a_job_between_two_incarnations_is_kept(arena_dir, children, caplog):
    """The trainer is dead and its agent lives: the launcher will start it again, so it is kept."""
    trainer = children.start(OWNER, arena_dir, env={"TORCHELASTIC_RUN_ID": "job"})
    path = trainer.hear()
    trainer.end()
    assert clean(arena_dir) == clean(arena_dir, dry_run=True) == []
    assert f"{path} is kept: its agent, pid {os.getpid()}, lives" in caplog.text
    assert Path(path, "head").exists()


def test_an_arena_without_a_readable_head_can_be_cleaned(open_arena, arena_dir):
    """Garbage in the head: nobody is known to use the arena, nobody has its lock, so it goes."""
    arena = open_arena()
    arena.close()
    Path(arena.path, "head").write_bytes(b"\xff" * 300)
    assert clean(arena_dir) == [arena.path]


def test_an_owner_without_its_lock_is_spared(arena_dir, children):
    """A living owner that lost the lock to a stray close is still found by its head."""
    lost = OWNER.replace("say(", "os.close(os.open(arena.path + '/lock', os.O_RDONLY)); say(", 1)
    owner = children.start(lost, arena_dir)
    path = owner.hear()
    assert clean(arena_dir) == []
    assert Path(path, "head").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_other_users_arenas_are_neither_read_nor_removed(open_arena, arena_dir, caplog):
    """Directories of another user: refused at the top, else left out and left alone."""
    arena = open_arena()
    arena.close()
    for path in list(Path(arena.path).parents)[1:2]:
        os.chown(path, 65534, -1)
        assert read_arenas(arena_dir) == []
        assert clean(arena_dir) == []
        assert "belongs to user 65534" in caplog.text
    os.chown(arena_dir / f"planaria-{os.geteuid()}", 65534, -1)
    with pytest.raises(ArenaError, match="belongs to user 65534"):
        read_arenas(arena_dir)
    with pytest.raises(ArenaError, match="belongs to user 65534"):
        clean(arena_dir)
    assert Path(arena.path, "head").exists()


STARTER = """
rounds = 0
say("started")
while rounds < 150:
    arena = Arena.open(DIR, **OPEN)
    there = all(os.path.exists(f"{arena.path}/{name}") for name in ("lock", "head"))
    slot = arena.allocate(4096, "own")
    there = there and os.path.exists(f"{arena.path}/slot-{slot.number}.safetensors")
    arena.drop(slot)
    arena.close()
    rounds += 1
    if not there:
        break
say([rounds, there])
"""


def test_cleaning_against_a_job_that_starts(arena_dir, children):
    """A job opens and closes 150 times while it is cleaned without rest: what it has stays."""
    job = children.start(STARTER, arena_dir)
    assert job.hear() == "started"
    removed = 0
    while job.process.poll() is None:
        removed += len(clean(arena_dir))
    assert job.hear() == [150, True]
    assert removed > 0
    clean(arena_dir)
    assert list(arena_dir.iterdir()) == []


def test_an_orphan_is_not_cleaned_away(arena_dir, children):
    """An orphan still writes, so its arena is kept: the job's next start will end it."""
    agent = (
        "import subprocess\n"
        "subprocess.Popen([sys.executable, '-c', ARGS[0], *sys.argv[1:]],"
        " env=os.environ | {'TORCHELASTIC_RUN_ID': 'job'})\n"
        "wait()\n"
    )
    trainer = "import signal\nArena.open(DIR, **OPEN)\nsay(os.getpid())\nsignal.pause()\n"
    child = children.start(agent, arena_dir, PREAMBLE + trainer)
    orphan = identify(child.hear())
    child.end()
    try:
        assert clean(arena_dir) == []
        assert orphan.alive
    finally:
        assert end(orphan, 10) == ""
    assert len(clean(arena_dir)) == 1


def test_arenas_are_read_and_cleaned_in_one_process(arena_dir):
    """The owner itself may read and clean: its open arena is alive, and not removed."""
    arena = Arena.open(arena_dir, **OPEN)
    assert [view.alive for view in read_arenas(arena_dir)] == [True]
    assert clean(arena_dir) == []
    arena.close()
    assert clean(arena_dir) == [arena.path]
