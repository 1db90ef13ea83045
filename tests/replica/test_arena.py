"""An arena keeps what was put into it over any death, and takes nothing that is not there."""

from __future__ import annotations

import errno
import gc
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erasure.digest import CHUNK_BYTES, chunk_digests
from recovery import manifest
from recovery.errors import ManifestError
from recovery.manifest import Generation, SlotRecord, encode_record, shard_digest
from replica import slot as slot_module
from replica.arena import Arena, read_arenas
from replica.errors import ArenaBusy, ArenaError, ArenaFull
from replica.frames import FrameFile, encode_frame
from tests.replica.arena_tools import OPEN, descriptors, mappings

GENERATION = Generation(epoch=1, step=5, id="ab" * 16)


def record_for(data, length: int, **changes) -> SlotRecord:
    """Describe ``data[:length]`` as a whole shard of owner 0."""
    digests = chunk_digests(data[:length], CHUNK_BYTES)
    facts = {
        "job": "job",
        "generation": GENERATION,
        "owner": 0,
        "world": 1,
        "k": 1,
        "m": 1,
        "fragment": -1,
        "shard_bytes": length,
        "length": length,
        "chunk_bytes": CHUNK_BYTES,
        "chunk_digests": digests,
        "shard_digest": shard_digest(digests, length),
    }
    return SlotRecord(**facts | changes)


def entries(directory) -> list[str]:
    """List every file and directory below, as relative paths."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def names(arena: Arena) -> list[str]:
    """List an arena's files."""
    return sorted(path.name for path in Path(arena.path).iterdir())


# --- opening and adopting


def test_a_new_arena_is_fresh_and_says_whose_it_is(open_arena):
    """The head of a new arena names job, node, position, rank, world and this very process."""
    arena = open_arena(job="j", node_id="n", position=3, rank=7, world=9)
    head = arena.head
    assert arena.fresh
    assert (head.job, head.node_id, head.position, head.rank, head.world) == ("j", "n", 3, 7, 9)
    assert (head.pid, head.agent_pid, head.epoch, head.committed) == (os.getpid(), 0, 0, None)
    assert arena.slots == {}
    assert arena.bytes_allocated == 0


def test_reopening_adopts_head_slots_and_capacities(open_arena):
    """All that was written is there for the next owner; only rank, world and process are new."""
    arena = open_arena()
    own, held = arena.allocate(100_001, "own"), arena.allocate(5, "held")
    own.data[:] = np.arange(100_001) % 251
    record = record_for(own.data, 77_777)
    own.write_record(record)
    before = arena.update_head(epoch=4, nonce="cd" * 16, committed=GENERATION)
    arena.close()
    again = open_arena(rank=0, world=1)
    assert not again.fresh
    assert (again.head.epoch, again.head.nonce, again.head.committed) == (4, "cd" * 16, GENERATION)
    assert again.head.incarnation == before.incarnation
    found = {n: (s.kind, s.capacity, s.record) for n, s in again.slots.items()}
    assert found == {own.number: ("own", 100_001, record), held.number: ("held", 5, None)}
    assert np.array_equal(again.slots[own.number].data, np.arange(100_001) % 251)
    assert again.bytes_allocated == 100_006


def test_arenas_of_other_names_are_others(open_arena, arena_dir):
    """Jobs, nodes and positions differ in their arenas, and so do names that look alike."""
    paths = [
        open_arena(**{field: value}).path
        for field, values in {
            "job": ["a/b", "a_b", "a b", "../a", "..", ".", "é", "x" * 200, "x" * 201, "\udc80"],
            "node_id": ["other", "../node"],
            "position": [1, 12],
        }.items()
        for value in values
    ]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert os.path.realpath(path) == path
        assert path.startswith(f"{arena_dir}/planaria-{os.geteuid()}/")


def test_an_arena_of_another_job_in_our_place_is_refused(open_arena, arena_dir):
    """The job's name is checked inside the data too: a directory moved to our place is no arena."""
    theirs = open_arena(job="theirs")
    ours = open_arena(job="ours")
    theirs.close()
    ours.close()
    Path(theirs.path, "head").replace(Path(ours.path, "head"))
    with pytest.raises(ArenaError, match="is of job 'theirs', expected 'ours'"):
        open_arena(job="ours")


@pytest.mark.parametrize("bad", [{"job": ""}, {"position": -1}, {"rank": 1}, {"job": "x" * 5000}])
def test_names_and_numbers_that_no_head_can_carry_leave_nothing_behind(open_arena, arena_dir, bad):
    """A refused value is refused before anything is made."""
    with pytest.raises(ManifestError):
        open_arena(**bad)
    assert entries(arena_dir) == []


def test_a_second_open_in_one_process_is_refused(open_arena):
    """The lock cannot refuse its own process, a table does; once closed it can be had again."""
    first = open_arena()
    with pytest.raises(ArenaBusy, match=f"open in this process, pid {os.getpid()}"):
        open_arena()
    first.close()
    assert not open_arena().fresh


def test_a_closed_arena_and_a_dropped_slot_refuse_use(open_arena):
    """After close or drop every method raises ArenaError, while close itself may be repeated."""
    arena = open_arena()
    slot, dropped = arena.allocate(10, "own"), arena.allocate(10, "own")
    record = record_for(slot.data, 10)
    arena.drop(dropped)
    for use in (
        lambda: dropped.data,
        lambda: dropped.tensor,
        lambda: dropped.write_record(record),
        dropped.invalidate,
        lambda: arena.drop(dropped),
    ):
        with pytest.raises(ArenaError):
            use()
    arena.close()
    arena.close()
    for use in (
        lambda: slot.data,
        lambda: slot.write_record(record),
        lambda: arena.update_head(epoch=1),
        lambda: arena.allocate(1, "own"),
        lambda: arena.drop(slot),
    ):
        with pytest.raises(ArenaError):
            use()


# --- slots


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1_000_003])
@pytest.mark.parametrize("kind", ["own", "held"])
def test_a_slot_has_exactly_its_capacity_reserved(open_arena, nbytes, kind):
    """File size is the capacity to the byte, every block is there, and the file bears its kind."""
    arena = open_arena()
    slot = arena.allocate(nbytes, kind)
    suffix = {"own": "safetensors", "held": "fragment"}[kind]
    info = Path(arena.path, f"slot-{slot.number}.{suffix}").stat()
    assert (slot.capacity, slot.data.shape, info.st_size) == (nbytes, (nbytes,), nbytes)
    assert info.st_blocks * 512 >= nbytes
    assert slot.record is None
    assert slot.data.flags.writeable


def test_all_memory_is_reserved_and_touched_before_the_slot_is_given_out(open_arena, monkeypatch):
    """The first write into a new slot faults no page in: minor faults are counted around it."""
    resource = pytest.importorskip("resource")
    nbytes = 64 << 20
    slot = open_arena().allocate(nbytes, "own")
    source = np.ones(nbytes, np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    np.copyto(slot.data, source)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < nbytes // 4096 // 16


def test_array_and_tensor_are_the_file(open_arena):
    """A byte written through the tensor is in the array and in the file, at the same place."""
    arena = open_arena()
    slot = arena.allocate(5000, "own")
    slot.tensor[4321] = 77
    assert slot.tensor.dtype == torch.uint8
    assert slot.tensor.data_ptr() == slot.data.ctypes.data
    in_file = Path(arena.path, f"slot-{slot.number}.safetensors").read_bytes()
    assert in_file[4321] == slot.data[4321] == 77


def test_memory_outlives_drop_and_close_as_long_as_it_is_used(open_arena):
    """A tensor kept over drop and close still reads and writes: never a segmentation fault."""
    arena = open_arena()
    dropped, closed = arena.allocate(9000, "own"), arena.allocate(9000, "held")
    tensors, array = [dropped.tensor, closed.tensor], closed.data
    arena.drop(dropped)
    arena.close()
    del dropped, closed, arena
    gc.collect()
    for tensor in tensors:
        tensor.fill_(3)
    assert int(array.sum()) == 27_000


def test_dropping_gives_the_memory_and_the_number_back(open_arena):
    """After drop the files are gone, the mapping too once unreferenced, and the number is free."""
    arena = open_arena()
    keep, slot = arena.allocate(10, "own"), arena.allocate(1 << 20, "held")
    number = slot.number
    arena.drop(slot)
    assert mappings(f"slot-{number}") == 0
    assert sorted(arena.slots) == [keep.number]
    assert arena.allocate(10, "own").number == number
    assert list(Path(arena.path).glob("*.fragment")) == []


def test_fifty_rounds_leak_neither_descriptors_nor_mappings(open_arena, arena_dir):
    """Open, allocate or adopt, use and close 50 times: both counts end where they began."""
    open_arena().allocate(4096, "own")
    read_arenas(arena_dir)
    open_arena(job="another").close()
    Arena.open(arena_dir, **OPEN | {"job": "warm"}).close()
    counts = (descriptors(), mappings(arena_dir))
    for step in range(50):
        arena = Arena.open(arena_dir, **OPEN | {"job": "leak"})
        slot = arena.allocate(4096, "held") if step % 3 == 0 else next(iter(arena.slots.values()))
        slot.tensor.fill_(step)
        # Refused at every adoption: what is logged then must not keep the mapping either.
        slot.write_record(record_for(slot.data, 4096, job="another"))
        if step % 3 == 2:
            arena.drop(slot)
        del slot
        arena.close()
        read_arenas(arena_dir)
    del arena
    assert (descriptors(), mappings(arena_dir)) == counts


@pytest.mark.parametrize(("nbytes", "kind"), [(-1, "own"), (1, "mine")])
def test_a_wrong_size_or_kind_is_refused(open_arena, nbytes, kind):
    """Both are the caller's mistakes: ValueError, and no file is made."""
    arena = open_arena()
    before = names(arena)
    with pytest.raises(ValueError, match="expected own or held"):
        arena.allocate(nbytes, kind)
    assert names(arena) == before


def test_threads_allocate_slots_of_different_numbers(open_arena):
    """Eight threads allocate and drop at once: every slot is whole and no number is given twice."""
    arena = open_arena()
    slots, start = [], threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(5):
            slot = arena.allocate(1000, "own")
            arena.update_head(epoch=slot.number)
            slots.append(slot)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slot.number for slot in slots) == list(range(40))
    assert arena.slots == {slot.number: slot for slot in slots}


# --- records


def test_a_record_lives_until_it_is_invalidated(open_arena, arena_dir):
    """Written, read by others and after reopening; invalidated, it is gone for all of them."""
    arena = open_arena()
    slot = arena.allocate(1000, "own")
    record = record_for(slot.data, 900)
    slot.write_record(record)
    assert slot.record == read_arenas(arena_dir)[0].slots[slot.number].record == record
    arena.close()
    arena = open_arena()
    slot = arena.slots[slot.number]
    assert slot.record == record
    slot.invalidate()
    assert slot.record is None
    assert read_arenas(arena_dir)[0].slots[slot.number].record is None
    arena.close()
    assert open_arena().slots[slot.number].record is None


def test_a_record_longer_than_its_slot_is_refused(open_arena):
    """A record must not claim bytes that the slot has not: refused when written."""
    slot = open_arena().allocate(1000, "own")
    with pytest.raises(ArenaError, match="has 1000 bytes, a record claims 1001"):
        slot.write_record(record_for(np.zeros(1001, np.uint8), 1001))
    assert slot.record is None


def test_the_largest_record_of_a_slot_fits_its_file(open_arena):
    """Small chunks make long digest lists: a slot made for them takes its full record."""
    slot = open_arena().allocate(1 << 20, "own", chunk_bytes=4096)
    digests = chunk_digests(slot.data, 4096)
    record = record_for(
        slot.data,
        1 << 20,
        chunk_bytes=4096,
        chunk_digests=digests,
        shard_digest=shard_digest(digests, 1 << 20),
    )
    slot.write_record(record)
    assert slot.record == record


def test_a_torn_record_is_invalid_and_a_torn_rewrite_keeps_the_old(open_arena):
    """A write cut short leaves what was before it: nothing after invalidate, else the record."""
    arena = open_arena()
    slot = arena.allocate(1000, "own")
    first, second = (record_for(slot.data, length) for length in (500, 600))
    for state, expected in ((None, None), (first, first)):
        if state is None:
            slot.invalidate()
        else:
            slot.write_record(state)
        frames = slot._records
        sequence = frames._sequence + 1
        frame = encode_frame(sequence, encode_record(second))
        os.pwrite(frames.descriptor, frame[:-1], sequence % 2 * frames.frame_bytes)
        arena.close()
        arena = open_arena()
        slot = arena.slots[slot.number]
        assert slot.record == expected


def overwrite(arena: Arena, name: str, payload: bytes) -> None:
    """Put a whole frame with any payload into a file of a closed arena."""
    frames = FrameFile(os.open(Path(arena.path, name), os.O_RDWR), name)
    frames.write(payload)
    frames.close()


@pytest.fixture
def other_version(monkeypatch):
    """Encode as a library would whose format version is 99."""

    def encode(function, value):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "FORMAT_VERSION", 99)
            return function(value)

    return encode


def test_a_record_of_another_version_is_named_and_skipped(open_arena, other_version, caplog):
    """The log names file and version; the slot holds nothing for us, and its bytes stay."""
    arena = open_arena()
    slot = arena.allocate(1000, "own")
    slot.data[:] = 9
    record = record_for(slot.data, 1000)
    arena.close()
    overwrite(arena, f"slot-{slot.number}.record", other_version(encode_record, record))
    found = open_arena().slots[slot.number]
    assert found.record is None
    assert int(found.data.min()) == 9
    assert f"slot-{slot.number}.record is skipped" in caplog.text
    assert "version 99" in caplog.text


def test_a_head_of_another_version_is_named_and_replaced(open_arena, other_version, caplog):
    """The log names the version; the arena opens with a new head and keeps its valid slots."""
    arena = open_arena()
    slot = arena.allocate(100, "own")
    slot.write_record(record_for(slot.data, 100))
    before = arena.update_head(epoch=3)
    arena.close()
    overwrite(arena, "head", other_version(manifest.encode_head, before))
    again = open_arena()
    assert "version 99" in caplog.text
    assert (again.head.epoch, again.fresh) == (0, False)
    assert again.head.incarnation != before.incarnation
    assert again.slots[slot.number].record is not None


def test_a_record_of_another_job_is_refused(open_arena, caplog):
    """A slot whose record names another job counts as lost, with both names in the log."""
    arena = open_arena()
    slot = arena.allocate(100, "own")
    slot.write_record(record_for(slot.data, 100, job="theirs"))
    arena.close()
    assert open_arena().slots[slot.number].record is None
    assert "'theirs'" in caplog.text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_garbage_in_any_file_is_invalid_and_never_a_crash(arena_dir, data):
    """Random bytes over a random part of head or record: the arena opens; what is read is right."""
    name = data.draw(st.sampled_from(["head", "slot-0.record"]))
    garbage = data.draw(st.binary(min_size=1, max_size=400))
    whole = data.draw(st.booleans())
    arena = Arena.open(arena_dir, **OPEN)
    slot = arena.slots.get(0) or arena.allocate(64, "own")
    record = record_for(slot.data, 64)
    slot.write_record(record)
    arena.close()
    path = Path(arena.path, name)
    size = path.stat().st_size
    with path.open("r+b") as file:
        if whole:
            file.write(garbage)
            file.truncate()
        else:
            for start in (0, size // 2):
                file.seek(start + data.draw(st.integers(0, 200)))
                file.write(garbage)
    again = Arena.open(arena_dir, **OPEN)
    try:
        assert again.head.job == "job"
        assert again.slots[0].record in ((record,) if name == "head" else (record, None))
    finally:
        again.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_a_whole_frame_around_garbage_is_invalid(arena_dir, payload):
    """Frames with a right checksum around arbitrary payloads are no heads and no records."""
    arena = Arena.open(arena_dir, **OPEN)
    if not arena.slots:
        arena.allocate(64, "own")
    arena.close()
    overwrite(arena, "head", payload)
    overwrite(arena, "slot-0.record", payload)
    again = Arena.open(arena_dir, **OPEN)
    again.close()
    assert again.head.epoch == 0


def test_what_a_killed_allocation_left_is_removed(open_arena):
    """Unfinished files, a record without data, data without a record and data with holes."""
    arena = open_arena()
    slot = arena.allocate(8192, "own")
    slot.write_record(record_for(slot.data, 8192))
    arena.close()
    for name in ("unfinished-slot-9.fragment", "slot-5.record"):
        Path(arena.path, name).write_bytes(b"x")
    for name, size in (("slot-7.fragment", 8192), ("slot-8.fragment", 0)):
        with Path(arena.path, name).open("wb") as file:
            file.truncate(size)
    again = open_arena()
    assert {n: s.record is None for n, s in again.slots.items()} == {slot.number: False, 8: True}
    assert names(arena) == [
        "head",
        "lock",
        f"slot-{slot.number}.record",
        f"slot-{slot.number}.safetensors",
        "slot-8.fragment",
        "slot-8.record",
    ]


# --- no room


def fill(path) -> None:
    """Write a file until the file system has no page left."""

    def write_for_ever() -> None:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(OSError, match="No space left"):
        write_for_ever()


def test_an_allocation_that_fits_nowhere_is_arena_full(small_tmpfs):
    """More than the file system has: needed and free bytes are named and nothing is left behind."""
    arena = Arena.open(small_tmpfs, **OPEN)
    small = arena.allocate(4096, "own")
    before, free = entries(small_tmpfs), os.statvfs(small_tmpfs).f_bavail * 4096
    with pytest.raises(ArenaFull, match=rf"\d+ bytes needed, {free} bytes free") as caught:
        arena.allocate(3 << 20, "own")
    assert int(str(caught.value).split(": ")[1].split()[0]) >= 3 << 20
    assert entries(small_tmpfs) == before
    assert os.statvfs(small_tmpfs).f_bavail * 4096 == free
    small.data[:] = 1
    arena.close()


def test_what_cannot_fit_is_refused_before_anything_is_taken(open_arena, arena_dir, monkeypatch):
    """More than is free is refused by a look: filling memory up first would starve others."""
    arena = open_arena()
    calls = []
    monkeypatch.setattr(slot_module.os, "posix_fallocate", lambda *args: calls.append(args))
    facts = os.statvfs(arena_dir)
    with pytest.raises(ArenaFull):
        arena.allocate((facts.f_bavail + 1) * facts.f_frsize, "own")
    assert calls == []


def test_a_file_system_filled_meanwhile_is_arena_full_and_no_sigbus(small_tmpfs, monkeypatch):
    """Room that vanishes after the look: fallocate fails, all is undone, old slots work on."""
    monkeypatch.setattr(slot_module, "_check_room", lambda *_: None)
    arena = Arena.open(small_tmpfs, **OPEN)
    old = arena.allocate(100_000, "own")
    before, free = entries(small_tmpfs), os.statvfs(small_tmpfs).f_bavail
    with pytest.raises(ArenaFull):
        arena.allocate(free * 4096, "held")
    assert (entries(small_tmpfs), os.statvfs(small_tmpfs).f_bavail) == (before, free)
    filler = small_tmpfs / "filler"
    fill(filler)
    old.data[:] = 5
    old.write_record(record_for(old.data, 100_000))
    arena.update_head(epoch=9)
    with pytest.raises(ArenaFull):
        arena.allocate(1, "own")
    assert int(old.data.sum()) == 500_000
    arena.close()


@pytest.mark.parametrize(("kib", "enough"), [(0, False), (4, False), (8, False), (400, True)])
def test_an_arena_that_cannot_even_begin_leaves_nothing(small_tmpfs, kib, enough):
    """With so little left that directory, lock or head do not fit, open is ArenaFull and undone."""
    filler = small_tmpfs / "filler"
    fill(filler)
    os.truncate(filler, filler.stat().st_size - kib * 1024)
    if enough:
        Arena.open(small_tmpfs, **OPEN).close()
        return
    with pytest.raises(ArenaFull, match="bytes needed"):
        Arena.open(small_tmpfs, **OPEN)
    assert entries(small_tmpfs) == ["filler"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG])
def test_every_refusal_of_the_system_is_an_arena_error(open_arena, monkeypatch, code):
    """Whatever posix_fallocate fails with: ArenaFull for want of room, else ArenaError; undone."""
    arena = open_arena()
    before = names(arena)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(slot_module.os, "posix_fallocate", refuse)
    with pytest.raises(ArenaError) as caught:
        arena.allocate(100, "own")
    assert isinstance(caught.value, ArenaFull) == (code != errno.EFBIG)
    assert names(arena) == before


# --- whose files


@pytest.mark.parametrize("umask", [0o000, 0o777])
@pytest.mark.parametrize("user", [None, 65534])
def test_modes_do_not_depend_on_the_umask(arena_dir, children, umask, user):
    """Directories 0700, files 0600, with umask 0 and 0777, as root and as a user it binds."""
    if user is not None:
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        arena_dir.chmod(0o777)
    code = """
umask, user = ARGS
if user is not None:
    import encodings.ascii  # a lazy import, which another user may not read
    os.setresuid(user, user, user)
os.umask(umask)
for _ in range(2):
    arena = Arena.open(DIR, **OPEN)
    arena.allocate(100, "own")
    arena.close()
say([[len(v.slots), v.path] for v in read_arenas(DIR)])
"""
    child = children.start(code, arena_dir, umask, user)
    [[count, path]] = child.hear()
    assert count == 2
    assert child.process.wait() == 0
    below = list((arena_dir / f"planaria-{user or os.geteuid()}").rglob("*"))
    modes = {stat.S_IMODE(p.stat().st_mode) for p in below if p.is_file()}
    folders = {stat.S_IMODE(p.stat().st_mode) for p in below if p.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})
    assert stat.S_IMODE((arena_dir / f"planaria-{user or os.geteuid()}").stat().st_mode) == 0o700
    assert path.startswith(str(arena_dir))


def test_wrong_modes_are_set_right(open_arena, arena_dir):
    """Directories and files of ours that others may enter are closed to them when adopted."""
    arena = open_arena()
    arena.allocate(10, "own")
    arena.close()
    below = list(arena_dir.rglob("*"))
    for path in below:
        path.chmod(0o777)
    open_arena()
    assert {stat.S_IMODE(path.stat().st_mode) for path in below} == {0o700, 0o600}


LEVELS = ["user", "job", "node", "position", "lock", "head", "data", "record"]


def level_path(arena: Arena, level: str) -> Path:
    """Return the path of one level of an arena that has slot 0."""
    position = Path(arena.path)
    node, job, user = list(position.parents)[:3]
    folders = {"user": user, "job": job, "node": node, "position": position}
    files = {"data": "slot-0.safetensors", "record": "slot-0.record"}
    return folders.get(level) or position / files.get(level, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_symbolic_link_at_any_level_is_refused(open_arena, arena_dir, level):
    """The real thing moved elsewhere and a link put in its place: ArenaError names the path."""
    arena = open_arena()
    arena.allocate(10, "own")
    arena.close()
    path = level_path(arena, level)
    path.rename(arena_dir / "elsewhere")
    path.symlink_to(arena_dir / "elsewhere")
    with pytest.raises(ArenaError, match=f"{path} is a symbolic link"):
        open_arena()


@pytest.mark.parametrize("last", [True, False])
def test_a_symbolic_link_in_arena_dir_is_refused_and_the_real_path_told(
    open_arena, arena_dir, last
):
    """The directory that the user names is reached through no link either."""
    (arena_dir / "real" / "inner").mkdir(parents=True)
    (arena_dir / "link").symlink_to(arena_dir / "real")
    target = arena_dir / "link" if last else arena_dir / "link" / "inner"
    with pytest.raises(ArenaError, match=f"symbolic link.*real path, {arena_dir / 'real'}"):
        open_arena(target)
    assert entries(arena_dir / "real") == ["inner"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_belongs_to_another_user_is_refused(open_arena, level):
    """A directory or file of somebody else at any level: ArenaError names path and user."""
    arena = open_arena()
    arena.allocate(10, "own")
    arena.close()
    path = level_path(arena, level)
    os.chown(path, 65534, -1)
    with pytest.raises(ArenaError, match=f"{path} belongs to user 65534"):
        open_arena()


@pytest.mark.parametrize("level", ["lock", "head", "data", "record"])
def test_a_file_with_a_second_name_or_of_another_kind_is_refused(open_arena, arena_dir, level):
    """A hard link would let another path write into the arena, a pipe would stop the reader."""
    arena = open_arena()
    arena.allocate(10, "own")
    arena.close()
    path = level_path(arena, level)
    os.link(path, arena_dir / "second")
    with pytest.raises(ArenaError, match="has 2 names"):
        open_arena()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArenaError, match=f"{path} is not a regular file"):
        open_arena()


@pytest.mark.parametrize(
    "parts", [("missing",), ("missing", "below"), ("file",), ("file", "below")]
)
def test_an_arena_dir_that_is_no_directory_is_named(open_arena, arena_dir, parts):
    """A missing directory and a file in its place are told apart, and nothing is made."""
    (arena_dir / "file").write_bytes(b"")
    with pytest.raises(ArenaError, match=f"arena_dir: {arena_dir / parts[0]} (does not|is not)"):
        open_arena(arena_dir.joinpath(*parts))
    assert entries(arena_dir) == ["file"]


# --- killed at any moment

KILLER = """
import random, signal, time
from recovery.manifest import Generation, SlotRecord, shard_digest
from erasure.digest import chunk_digests
import numpy
seed, rounds = ARGS
rng = random.Random(seed)
# Large values, so that a frame spans pages and a kill can come in the middle of one.
attempts = tuple((f"{n:032x}", "0" * 32, n) for n in range(60))
digests = chunk_digests(numpy.zeros(1 << 20, numpy.uint8), 4096)
def write_for_ever(ready):
    arena = Arena.open(DIR, **OPEN)
    slots = list(arena.slots.values())
    while len(slots) < 2:
        slots.append(arena.allocate(1 << 20, "own", chunk_bytes=4096))
    step = arena.head.committed.step if arena.head.committed else 0
    while True:
        step += 1
        generation = Generation(epoch=1, step=step, id=f"{step:032x}")
        slot = slots[step % 2]
        slot.invalidate()
        slot.write_record(SlotRecord(job="job", generation=generation, owner=0, world=1, k=1, m=1,
            fragment=-1, shard_bytes=1 << 20, length=1 << 20, chunk_bytes=4096,
            chunk_digests=digests, shard_digest=shard_digest(digests, 1 << 20)))
        arena.update_head(committed=generation, attempts=attempts)
        if step % 10 == 2:
            os.write(ready, b"x")
for number in range(rounds):
    seen, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_for_ever(ready)
    # Closed here, so that a writer that fails is an end of file and not a wait for ever.
    os.close(ready)
    if not os.read(seen, 1):
        sys.exit("the writer has failed")
    time.sleep(rng.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(seen)
    [view] = read_arenas(DIR)
    steps = [s.record.generation.step for s in view.slots.values() if s.record]
    say([view.problem, view.head and view.head.committed and view.head.committed.step, steps])
"""


def test_of_two_slots_one_is_valid_after_every_kill(arena_dir, children, rng):
    """A writer in a tight loop is killed 25 times at drawn moments; head and a slot stay valid."""
    child = children.start(KILLER, arena_dir, int(rng.integers(1 << 30)), 25)
    committed_before = 0
    for _ in range(25):
        problem, committed, steps = child.hear()
        assert problem == ""
        # The head follows the records by one step at most, and never goes back.
        assert committed_before < committed <= max(steps) <= committed + 1
        committed_before = committed
    assert child.process.wait() == 0


def test_the_layout_on_disk_is_what_the_module_says(open_arena, arena_dir):
    """The paths that its docstring promises, for names with characters that no path may have."""
    arena = open_arena(job="a/b:c", node_id="host name")
    arena.allocate(1, "own")
    arena.allocate(1, "held")
    user, job, node, position = os.path.relpath(arena.path, arena_dir).split("/")
    assert (user, position) == (f"planaria-{os.geteuid()}", "0")
    assert (job[:6], node[:10]) == ("a_b_c-", "host_name-")
    assert names(arena) == [
        "head",
        "lock",
        "slot-0.record",
        "slot-0.safetensors",
        "slot-1.fragment",
        "slot-1.record",
    ]


def test_an_audit_hook_sees_and_can_refuse_an_arena_dir(arena_dir, children):
    """All else is opened relative to a descriptor; the directory itself by its whole path."""
    code = """
def hook(event, arguments):
    if event == "open" and arguments[0] == DIR:
        raise PermissionError("not this one")
sys.addaudithook(hook)
for use in (lambda: Arena.open(DIR, **OPEN), lambda: read_arenas(DIR), lambda: clean(DIR)):
    try:
        use()
        say("opened")
    except ArenaError as error:
        say(str(error))
say(len(os.listdir("/proc/self/fd")))
"""
    child = children.start(code, arena_dir)
    assert all("not this one" in child.hear() for _ in range(3))
    assert child.hear() <= 5


def test_listing_arenas_does_not_load_torch(arena_dir, children):
    """A child that opens and cleans arenas has not imported torch: the command stays quick."""
    child = children.start(
        "Arena.open(DIR, **OPEN).close(); clean(DIR); say('torch' in sys.modules)", arena_dir
    )
    assert child.hear() is False
