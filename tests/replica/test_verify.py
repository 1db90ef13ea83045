"""Verifying arenas at rest: damage is found and named, and nothing whole is ever accused."""

from __future__ import annotations

import json
import os
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import replica.verify
from erasure.code import Code
from erasure.digest import bad_chunks, chunk_digests
from recovery.manifest import WHOLE, Generation, SlotRecord, encode_record, shard_digest
from replica import cli
from replica.folder import folder_name
from replica.frames import FrameFile, decode_frame, encode_frame
from replica.slot import record_name
from replica.verify import BAD, BUSY, EMPTY, OK, UNREADABLE, damaged_chunks, verify_arenas
from tests.replica.inprocess import Cluster

CHUNK = 4096
NODES = ["a", "b", "c", "d"]


def record_of(data, *, fragment=WHOLE, k=2, m=1, step=1, **changes) -> SlotRecord:
    """Describe data as a whole shard, or as one fragment of one, of owner 0, in chunks of 4 KiB."""
    code = Code(k, m)
    size = data.size if fragment == WHOLE else data.size * k
    parts = [data]
    if fragment == WHOLE:
        parts = [data[slice(*code.span(index, size))] for index in range(k)]
    digests = b"".join(chunk_digests(part, CHUNK) for part in parts)
    facts = {
        "job": "job",
        "generation": Generation(epoch=1, step=step, id=f"{step:032x}"),
        "owner": 0,
        "world": 1,
        "k": k,
        "m": m,
        "fragment": fragment,
        "shard_bytes": size,
        "length": data.size,
        "chunk_bytes": CHUNK,
        "chunk_digests": digests,
        "shard_digest": shard_digest(digests, size),
    }
    return SlotRecord(**facts | changes)


def fill(slot, rng, *, fragment=0, step=1, **changes) -> None:
    """Write random bytes to all of a slot and declare them, as an owner would."""
    slot.invalidate()
    slot.data[:] = rng.integers(0, 256, slot.capacity, dtype=np.uint8)
    slot.write_record(record_of(slot.data, fragment=fragment, step=step, **changes))


def one(arena_dir):
    """Return the verdict on the only arena that there is."""
    (verdict,) = verify_arenas(arena_dir)
    return verdict


def one_slot(arena_dir):
    """Return the verdict on the only slot of the only arena."""
    (slot,) = one(arena_dir).slots
    return slot


def verify(capsys, arena_dir, *more) -> tuple[int, dict]:
    """Return exit code and JSON of ``planaria verify``."""
    code = cli.main(["verify", "--json", "--arena-dir", str(arena_dir), *more])
    out, err = capsys.readouterr()
    assert (err, out.count("\n")) == ("", 1)
    return code, json.loads(out)


def saved(arena_dir, *, steps=(1, 2), nodes=NODES, redundancy="stripe:2+1") -> None:
    """Leave the arenas of a job that committed some steps and ended."""
    Cluster(arena_dir, nodes, redundancy).run(lambda me: me.commit(*steps))


# --- a whole job


def test_all_that_a_job_left_verifies(arena_dir, capsys):
    """Four dead ranks, two generations: every slot is ok, and who can be rebuilt is said."""
    saved(arena_dir)
    code, report = verify(capsys, arena_dir)
    slots = [slot for arena in report["arenas"] for slot in arena["slots"]]
    assert (code, report["damaged"], len(report["arenas"])) == (0, 0, 4)
    assert {slot["verdict"] for slot in slots} == {OK}
    assert len(slots) == 4 * (2 + 2 * 3)
    newest, older = report["generations"]
    assert (newest["step"], newest["committed"]) == (2, True)
    assert (older["step"], older["committed"]) == (1, False)
    for generation in (newest, older):
        assert generation["recoverable_owners"] == [0, 1, 2, 3]
        assert (generation["protection"], generation["exact"]) == (2, True)


def test_what_is_damaged_counts_for_nothing(arena_dir, capsys):
    """One byte of owner 0's own copy is flipped: the slot is named, one loss less is carried."""
    saved(arena_dir)
    before = verify(capsys, arena_dir)[1]["generations"][0]
    for arena in verify_arenas(arena_dir):
        for slot in arena.slots:
            if (slot.record.owner, slot.record.fragment, slot.record.generation.step) == (0, -1, 2):
                path = Path(arena.path) / f"slot-{slot.number}.safetensors"
                expected = (arena.path, slot.number)
    raw = bytearray(path.read_bytes())
    raw[700] ^= 1
    path.write_bytes(raw)
    code, report = verify(capsys, arena_dir)
    bad = [
        (arena["path"], slot["slot"])
        for arena in report["arenas"]
        for slot in arena["slots"]
        if slot["verdict"] == BAD
    ]
    assert (code, report["damaged"], bad) == (1, 1, [expected])
    after = report["generations"][0]
    assert (before["protection"], after["protection"]) == (2, 1)
    assert len(before["holders"]) - len(after["holders"]) == 1
    assert after["recoverable_owners"] == [0, 1, 2, 3]


def test_one_host_alone_says_whom_it_can_give_back(arena_dir, capsys):
    """With the arena of one node of four only its own owner is there: the others are missing."""
    saved(arena_dir)
    for node in "bcd":
        (path,) = arena_dir.glob(f"planaria-*/*/{folder_name(node)}")
        shutil.rmtree(path)
    code, report = verify(capsys, arena_dir)
    newest = report["generations"][0]
    assert (code, newest["recoverable_owners"], newest["protection"]) == (0, [0], None)
    assert sorted(newest["missing_owners"]) == ["1", "2", "3"]
    assert newest["exact"] is False
    assert cli.main(["verify", "--arena-dir", str(arena_dir)]) == 0
    assert "the slots that verified alone give back owner 0 of 4" in capsys.readouterr().out


def test_the_report_for_people_names_the_chunk(open_arena, arena_dir, rng, capsys):
    """The text has a line for each slot, which chunks differ, and the exit code is 1."""
    arena = open_arena()
    slot = arena.allocate(3 * CHUNK, "held")
    fill(slot, rng)
    slot.data[CHUNK] ^= 1
    arena.allocate(100, "own")
    assert cli.main(["verify", "--arena-dir", str(arena_dir)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    for part in (
        f"job job  node node  position 0  rank 0 of 1\n  {arena.path}",
        "slot 0 (held): bad, fragment 0 of owner 0, step 1, epoch 1: chunks 1 of 3 differ",
        "slot 1 (own): empty",
        "2 slots, 1 empty, 0 busy; 12288 bytes read; damaged: 1",
    ):
        assert part in out


# --- chunks


@pytest.mark.parametrize("fragment", [WHOLE, 0])
def test_each_damaged_chunk_is_found_by_its_number(fragment, rng):
    """Every byte position class: the chunks flipped at random are exactly those reported."""
    data = rng.integers(0, 256, 7 * CHUNK + 123, dtype=np.uint8)
    record = record_of(data, fragment=fragment, k=3)
    code = Code(3, 1)
    spans = [code.span(i, data.size) for i in range(3)] if fragment == WHOLE else [(0, data.size)]
    chunks = [
        (at, min(at + CHUNK, stop)) for start, stop in spans for at in range(start, stop, CHUNK)
    ]
    assert len(chunks) == len(record.chunk_digests) // 16
    assert damaged_chunks(record, data) == ()
    for _ in range(20):
        chosen = sorted(rng.choice(len(chunks), rng.integers(1, 4), replace=False).tolist())
        damaged = data.copy()
        for index in chosen:
            damaged[rng.integers(*chunks[index])] ^= 1 << rng.integers(8)
        assert damaged_chunks(record, damaged) == tuple(chosen)


def test_a_shard_of_no_bytes_verifies(open_arena, arena_dir):
    """Nothing to digest is no damage: an empty fragment of an empty shard is ok."""
    slot = open_arena().allocate(0, "held")
    slot.write_record(record_of(slot.data, fragment=0))
    assert one_slot(arena_dir).verdict == OK


def test_capacity_beyond_the_length_is_not_read(open_arena, arena_dir, rng):
    """Bytes after a record's length vouch for nothing: changing them changes no verdict."""
    slot = open_arena().allocate(2 * CHUNK, "held")
    slot.data[:] = rng.integers(0, 256, slot.capacity, dtype=np.uint8)
    slot.write_record(record_of(slot.data[:5000], fragment=0))
    slot.data[5000:] ^= 0xFF
    assert one_slot(arena_dir).verdict == OK


# --- slots that cannot be read


def test_an_own_slot_must_be_an_image(open_arena, arena_dir, rng):
    """Digests that hold over bytes that safetensors cannot open: bad, and still of use."""
    fill(open_arena().allocate(5000, "own"), rng, fragment=WHOLE)
    slot = one_slot(arena_dir)
    assert (slot.verdict, slot.bad_chunks, slot.intact) == (BAD, (), True)
    assert "safetensors cannot open it" in slot.reason


def test_an_image_of_another_owner_is_bad(arena_dir):
    """A record that claims owner 1's image for owner 0: the image itself contradicts it."""
    saved(arena_dir, nodes=["a", "b"], redundancy="copies:1", steps=(1,))
    for arena in verify_arenas(arena_dir):
        for slot in arena.slots:
            if slot.record is not None and slot.kind == "own":
                lie = slot.record.__class__(**{**vars(slot.record), "owner": 1 - slot.record.owner})
                path = Path(arena.path) / record_name(slot.number)
                records = FrameFile(os.open(path, os.O_RDWR), str(path))
                records.write(encode_record(lie))
                records.close()
    slots = [s for a in verify_arenas(arena_dir) for s in a.slots if s.kind == "own" and s.record]
    assert [s.verdict for s in slots] == [BAD, BAD]
    assert all("another generation or owner" in s.reason for s in slots)


def damage_nothing(_):
    """Leave the slot as it is."""


def tear_the_record(folder):
    """Overwrite both frames."""
    path = folder / record_name(0)
    path.write_bytes(bytes(path.stat().st_size))


def lose_the_record(folder):
    """Remove the record file."""
    (folder / record_name(0)).unlink()


def cut_the_record(folder):
    """Cut the record file in half."""
    path = folder / record_name(0)
    os.truncate(path, path.stat().st_size // 2)


def make_holes(folder):
    """Give the file's memory back and keep its size."""
    path = folder / "slot-0.fragment"
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def lead_elsewhere(folder):
    """Replace the data by a link to a file of the same bytes."""
    path = folder / "slot-0.fragment"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_nothing, ""),
        (tear_the_record, "not valid"),
        (cut_the_record, "cut short"),
        (lose_the_record, "no record file"),
        (make_holes, "holes"),
        (lead_elsewhere, "symbolic link"),
    ],
)
def test_what_cannot_be_read_is_named(open_arena, arena_dir, rng, damage, words):
    """Each way to lose a slot gives its own words; other slots are judged all the same."""
    arena = open_arena()
    fill(arena.allocate(2 * CHUNK, "held"), rng)
    fill(arena.allocate(2 * CHUNK, "held"), rng)
    folder = Path(arena.path)
    arena.close()
    damage(folder)
    first, second = one(arena_dir).slots
    assert (first.verdict, second.verdict) == (UNREADABLE if words else OK, OK)
    assert words in first.reason
    assert one(arena_dir).damaged == bool(words)


@pytest.mark.parametrize("writes_before", [0, 1])
def test_a_record_file_cut_short_is_damage(open_arena, arena_dir, rng, capsys, writes_before):
    """An older frame that says "empty" may be what is left: the file is damaged all the same."""
    arena = open_arena()
    slot = arena.allocate(CHUNK, "held")
    for _ in range(writes_before):
        slot.invalidate()
    fill(slot, rng)
    path = Path(arena.path, record_name(0))
    for keep in (0.999, 0.75, 0.5):
        os.truncate(path, int(path.stat().st_size * keep))
        code, report = verify(capsys, arena_dir)
        (found,) = report["arenas"][0]["slots"]
        assert (code, found["verdict"]) == (1, UNREADABLE)
        assert "cut short" in found["reason"]
    assert cli.main(["verify", "--arena-dir", str(arena_dir)]) == 1
    assert "unreadable" in capsys.readouterr().out


@pytest.mark.parametrize("writes_before", [0, 1, 2])
def test_an_older_empty_frame_beside_a_damaged_record_is_damage(
    open_arena, arena_dir, rng, writes_before
):
    """Any byte of the record's frame, its end, or all of it: the slot is no empty one.

    A frame that was begun may be what a writer left that was killed: nobody can tell.
    """
    arena = open_arena()
    slot = arena.allocate(CHUNK, "held")
    for _ in range(writes_before):
        slot.invalidate()
    fill(slot, rng)
    path = Path(arena.path, record_name(0))
    half, raw = path.stat().st_size // 2, path.read_bytes()
    frames = {begin: decode_frame(raw[begin : begin + half]) for begin in (0, half)}
    begin = max(frames, key=lambda place: frames[place][0])
    end = begin + len(encode_frame(*frames[begin]))
    for left in (0, 8, 40, (end - begin) // 2):
        path.write_bytes(raw[: begin + left] + bytes(half - left) + raw[begin + half :])
        assert "never finished" in one_slot(arena_dir).reason
    for at in range(begin, end):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        assert one_slot(arena_dir).verdict == UNREADABLE, f"byte {at - begin} of the frame"
    path.write_bytes(raw)
    assert one_slot(arena_dir).verdict == OK


def test_an_empty_slot_is_no_damage(open_arena, arena_dir, capsys):
    """A slot that says that it holds nothing is empty, whatever its bytes."""
    open_arena().allocate(CHUNK, "own").data[:] = 7
    assert one_slot(arena_dir).verdict == EMPTY
    assert verify(capsys, arena_dir)[0] == 0


# --- heads


def test_a_byte_of_the_newer_head_is_damage(open_arena, arena_dir, capsys):
    """The older one is shown, and that it may not be the last."""
    arena = open_arena()
    path = Path(arena.path, "head")
    arena.close()
    raw = path.read_bytes()
    for at in (0, 20, 60, len(raw) // 2, len(raw) // 2 + 60):
        bad = bytearray(raw)
        bad[at] ^= 1
        path.write_bytes(bad)
        code, report = verify(capsys, arena_dir)
        assert (code, report["arenas"][0]["job"]) == (1, "job"), f"byte {at}"
        assert "one of its two frames" in report["arenas"][0]["problem"]


@pytest.mark.parametrize("raw", [b"", b"?", bytes(20_000)])
def test_a_damaged_head_is_damage(open_arena, arena_dir, rng, capsys, raw):
    """The head is named and counted; slots are judged without it."""
    arena = open_arena()
    fill(arena.allocate(CHUNK, "held"), rng)
    arena.close()
    Path(arena.path, "head").write_bytes(raw)
    code, report = verify(capsys, arena_dir)
    (shown,) = report["arenas"]
    assert (code, report["damaged"], shown["job"]) == (1, 1, None)
    assert "head" in shown["problem"]
    assert [slot["verdict"] for slot in shown["slots"]] == [OK]


@pytest.mark.parametrize("place", ["job/node/1", "job/other/0", "other/node/0"])
def test_a_head_in_a_strange_place_is_named(open_arena, arena_dir, place):
    """An arena copied to where another one belongs says so: job, node and position are compared."""
    arena = open_arena()
    arena.close()
    job, node, position = place.split("/")
    user = Path(arena.path).parents[2]
    strange = user / folder_name(job) / folder_name(node) / position
    strange.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(arena.path, strange)
    problems = {verdict.path: verdict.problem for verdict in verify_arenas(arena_dir)}
    assert problems[arena.path] == ""
    assert "has the head of" in problems[str(strange)]


def test_one_job_alone(open_arena, arena_dir, rng, capsys):
    """--job reads that job's arenas and no other's damage."""
    fill(open_arena(job="a").allocate(CHUNK, "held"), rng, job="a")
    other = open_arena(job="b").allocate(CHUNK, "held")
    fill(other, rng, job="b")
    other.data[0] ^= 1
    assert verify(capsys, arena_dir, "--job", "a")[0] == 0
    assert verify(capsys, arena_dir, "--job", "b")[0] == 1
    assert verify(capsys, arena_dir, "--job", "c") == (
        0,
        {"arenas": [], "verified_bytes": 0, "damaged": 0, "generations": []},
    )


# --- beside a writer


def state_of(directory) -> dict:
    """Return every file below a directory with its bytes, times and mode."""
    found = {}
    for path in sorted(directory.rglob("*")):
        info = path.stat()
        raw = path.read_bytes() if path.is_file() else b""
        found[path] = (raw, info.st_mtime_ns, info.st_ctime_ns, info.st_mode, info.st_ino)
    return found


def test_verifying_changes_nothing_and_takes_no_lock(open_arena, arena_dir, rng, capsys):
    """An arena that is open here is read while its lock is held; no file, time or mode changes."""
    arena = open_arena()
    fill(arena.allocate(CHUNK, "held"), rng)
    Path(arena.path, "unfinished-slot-9.fragment").write_bytes(b"half")
    before = state_of(arena_dir)
    assert verify(capsys, arena_dir)[1]["arenas"][0]["alive"] is True
    assert state_of(arena_dir) == before


@pytest.mark.parametrize("rewrites", [1, 2, 100])
def test_a_slot_that_is_written_meanwhile_is_not_accused(
    open_arena, arena_dir, rng, monkeypatch, rewrites
):
    """The owner rewrites the slot during each of some looks: ok when it stops, busy when not."""
    slot = open_arena().allocate(2 * CHUNK, "held")
    fill(slot, rng)
    steps = iter(range(2, 2 + rewrites))

    def interfere(record, data):
        step = next(steps, None)
        if step is not None:
            fill(slot, rng, step=step)
        return damaged_chunks(record, data)

    monkeypatch.setattr(replica.verify, "damaged_chunks", interfere)
    found = one_slot(arena_dir)
    assert found.verdict == (BUSY if rewrites == 100 else OK)
    assert one(arena_dir).damaged == 0


def test_a_slot_withdrawn_meanwhile_is_busy(open_arena, arena_dir, rng, monkeypatch):
    """The owner withdraws the record and overwrites the bytes between two looks."""
    slot = open_arena().allocate(2 * CHUNK, "held")
    fill(slot, rng)

    def interfere(record, data):
        slot.invalidate()
        slot.data[:] = 0
        return damaged_chunks(record, data)

    monkeypatch.setattr(replica.verify, "damaged_chunks", interfere)
    assert one_slot(arena_dir).verdict == BUSY


def test_damage_that_is_repaired_meanwhile_is_not_reported(open_arena, arena_dir, rng, monkeypatch):
    """The same record over bytes that were bad at the first look only: ok."""
    slot = open_arena().allocate(2 * CHUNK, "held")
    fill(slot, rng)
    slot.data[0] ^= 1

    def repair(record, data):
        found = damaged_chunks(record, data)
        slot.data[0] ^= found == (0,)
        return found

    monkeypatch.setattr(replica.verify, "damaged_chunks", repair)
    assert one_slot(arena_dir).verdict == OK


def test_a_slot_dropped_meanwhile_is_left_out(open_arena, arena_dir, rng, monkeypatch):
    """The slot goes between the listing and the look: it is not mentioned."""
    arena = open_arena()
    slot = arena.allocate(CHUNK, "held")
    fill(slot, rng)
    inner = replica.verify._look
    monkeypatch.setattr(
        replica.verify, "_look", lambda *facts, **more: (arena.drop(slot), inner(*facts, **more))[1]
    )
    assert one(arena_dir).slots == ()


WRITER = """
import numpy as np
from erasure.digest import chunk_digests
from recovery.manifest import Generation, SlotRecord, shard_digest
arena = Arena.open(DIR, **OPEN)
say("open")
step = 0
while ARGS[0] > step:
    step += 1
    slots = [s for s in arena.slots.values() if s.kind == "held"]
    slot = slots[step % 2] if len(slots) == 2 else arena.allocate(60000, "held")
    slot.invalidate()
    slot.data[:] = np.random.default_rng(step).integers(0, 256, 60000, dtype=np.uint8)
    digests = chunk_digests(slot.data, 4096)
    slot.write_record(SlotRecord(job="job", generation=Generation(1, step, f"{step:032x}"), owner=0,
        world=1, k=2, m=1, fragment=0, shard_bytes=120000, length=60000, chunk_bytes=4096,
        chunk_digests=digests, shard_digest=shard_digest(digests, 120000)))
    if step % 50 == 0:
        arena.drop(slot)
"""


@pytest.mark.real
def test_beside_a_living_writer_nothing_is_ever_accused(children, arena_dir):
    """A process rewrites, drops and makes slots as fast as it can: no verdict is damage."""
    child = children.start(WRITER, arena_dir, 1500)
    assert child.hear() == "open"
    seen, looks = set(), 0
    while child.process.poll() is None or not looks:
        looks += 1
        for arena in verify_arenas(arena_dir):
            assert arena.problem == ""
            seen |= {slot.verdict for slot in arena.slots}
            faults = [slot for slot in arena.slots if slot.verdict in (BAD, UNREADABLE)]
            assert faults == []
    assert child.process.returncode == 0
    assert OK in seen


def test_the_dumb_way_agrees(arena_dir, rng):
    """Of damage at random, what a plain walk over all records finds is what verify finds."""
    saved(arena_dir, nodes=["a", "b", "c"], redundancy="stripe:2+1" if False else "copies:1")
    files = sorted(chain(arena_dir.rglob("*.fragment"), arena_dir.rglob("*.safetensors")))
    for path in rng.choice(len(files), 3, replace=False):
        raw = bytearray(files[path].read_bytes())
        raw[int(rng.integers(64, 900))] ^= 0x10
        files[path].write_bytes(raw)
    expected, found = set(), set()
    for arena in replica.arena_views.read_arenas(arena_dir):
        for slot in arena.slots.values():
            if slot.record and bad_chunks(
                slot.data[: slot.record.length], slot.record.chunk_digests, slot.record.chunk_bytes
            ):
                expected.add((arena.path, slot.number))
    for arena in verify_arenas(arena_dir):
        found |= {(arena.path, slot.number) for slot in arena.slots if slot.bad_chunks}
    assert found == expected
    assert len(found) == 3
