"""Every format that was ever released is read whole, and what is written today is still of it.

``tests/data/format-N`` has the arenas of a small job as version N of the format left them. A change
of a single byte of what is written fails here: then ``FORMAT_VERSION`` is to be raised, the former
version stays readable, and ``python -m tests.data.make`` keeps an example of the new one.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import ExitStack
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from erasure.codec import Codec
from erasure.digest import chunk_digests, digest
from recovery import manifest
from recovery.manifest import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
    WHOLE,
    decode_head,
    decode_record,
    encode_head,
    encode_record,
)
from replica import image, tables
from replica.arena import read_arenas
from replica.frames import FrameFile, decode_frame, encode_frame
from replica.image import ShardHeader, read_image
from replica.snapshot import Snapshot
from tests.data.job import (
    ARCHIVE,
    DATA,
    EXPECTED,
    JOB,
    NODES,
    REDUNDANCY,
    STEPS,
    folder_of,
    members,
    said_of,
    sha256,
    state_of,
    unpack,
)
from tests.replica.damage import node_dir
from tests.replica.inprocess import Cluster
from tests.sources import ROOT

KEPT = sorted(int(path.name.removeprefix("format-")) for path in DATA.glob("format-*"))
every_format = pytest.mark.parametrize("version", KEPT)
RAISE = "bytes of a released format have changed: raise FORMAT_VERSION and keep reading this one"


def expected_of(version):
    """Return what is in the arenas of a version, as it was written down when they were made."""
    return json.loads((folder_of(version) / EXPECTED).read_text(encoding="utf-8"))


@pytest.fixture
def arenas(arena_dir, request):
    """Lay the arenas of the version that the test names out, and return where."""
    unpack(request.getfixturevalue("version"), arena_dir)
    return arena_dir


def cluster(arena_dir, nodes=NODES):
    """Return the same job, started anew over arenas that are there."""
    return Cluster(arena_dir, nodes, REDUNDANCY, counts=[1] * len(nodes), job=JOB)


def restored(me):
    """Restore one rank from a state that was not trained; (step, what it holds then)."""
    me.state.clear()
    me.state.update(state_of(me.rank, 0))
    return me.ckpt.restore(), said_of(me.state)


def test_every_readable_version_is_kept():
    """A reader takes its own version and the one before it, and an example of each is here."""
    assert [v for v in (FORMAT_VERSION - 1, FORMAT_VERSION) if v >= 1] == list(READABLE_VERSIONS)
    assert list(range(1, FORMAT_VERSION + 1)) == KEPT


def test_the_numbers_are_those_of_the_page():
    """The table of docs/formats.md has the version of every format: compared with the code."""
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([A-Z_.a-z]+)` \| (\d+) \|", page, flags=re.MULTILINE))
    assert told == {
        "recovery.manifest.FORMAT_VERSION": str(manifest.FORMAT_VERSION),
        "replica.image.FORMAT": str(image.FORMAT),
        "replica.tables.TABLE_FORMAT": str(tables.TABLE_FORMAT),
    }


@every_format
def test_the_kept_files_are_as_they_were(version):
    """Nobody touched the example: every file has the SHA-256 that was written down with it."""
    files = {name: sha256(raw) for name, raw in members(version) if raw is not None}
    assert files == expected_of(version)["files"]
    assert (folder_of(version) / ARCHIVE).stat().st_size < 200_000


@every_format
def test_today_reads_all_of_it(version, arenas):
    """Heads, records and payloads of every slot are what was written down, digests verified."""
    told = expected_of(version)
    views = read_arenas(arenas, JOB)
    heads = {str(view.head.rank): json.loads(json.dumps(asdict(view.head))) for view in views}
    # A later format may know more of a head; what this one knew is still there.
    assert {rank: {k: heads[rank][k] for k in head} for rank, head in told["heads"].items()} == (
        told["heads"]
    )
    found = {f"{v.head.rank}/{n}": slot for v in views for n, slot in v.slots.items()}
    assert found.keys() == told["slots"].keys()
    for name, facts in told["slots"].items():
        slot, record = found[name], facts["record"]
        assert (slot.kind, slot.capacity) == (facts["kind"], facts["capacity"])
        assert (slot.record is None) == (record is None)
        if record is None:
            continue
        payload = slot.data[: slot.record.length]
        assert sha256(payload.tobytes()) == record["payload_sha256"]
        said = asdict(slot.record)
        said["chunk_digests"] = slot.record.chunk_digests.hex()
        said["shard_digest"] = slot.record.shard_digest.hex()
        assert {k: said[k] for k in record if k != "payload_sha256"} == {
            k: v for k, v in record.items() if k != "payload_sha256"
        }
        if slot.record.fragment != WHOLE:
            assert chunk_digests(payload, slot.record.chunk_bytes) == slot.record.chunk_digests


@every_format
def test_fragments_give_the_shards_back(version, arenas):
    """For every owner and step any two of the three fragments decode to the owner's own copy."""
    parts = {}
    for view in read_arenas(arenas, JOB):
        for slot in view.slots.values():
            if slot.record is not None:
                key = (slot.record.generation.step, slot.record.owner)
                payload = np.array(slot.data[: slot.record.length])
                parts.setdefault(key, {})[slot.record.fragment] = payload, slot.record
    assert set(parts) == {(step, owner) for step in STEPS for owner in range(len(NODES))}
    for fragments in parts.values():
        whole, record = fragments.pop(WHOLE)
        codec = Codec(record.code)
        for chosen in combinations(sorted(fragments), record.k):
            shard = np.empty(record.shard_bytes, np.uint8)
            out = {i: shard[slice(*record.code.span(i, shard.size))] for i in range(record.k)}
            have = {i: fragments[i][0] for i in chosen}
            for i in have.keys() & out.keys():
                out[i][:] = have[i]
            codec.decode(have, {i: part for i, part in out.items() if i not in have})
            assert np.array_equal(shard, whole)


@every_format
def test_a_job_goes_on_from_it(version, arenas):
    """The job is started over the arenas: every rank has step 8 back, bit for bit, types too."""
    told = expected_of(version)["states"]
    expected = [(STEPS[-1], told[f"{rank}/{STEPS[-1]}"]) for rank in range(len(NODES))]
    assert cluster(arenas).run(restored) == expected


@every_format
def test_a_job_goes_on_from_it_with_a_node_lost(version, arenas):
    """Node 1 is gone and another has come: rank 1 comes back from fragments of this format."""
    told = expected_of(version)["states"]
    lost = Path(node_dir(arenas, NODES[1])).name
    (path,) = arenas.glob(f"planaria-*/*/{lost}")
    for file in (path / "0").iterdir():
        file.unlink()
    nodes = [NODES[0], "new", *NODES[2:]]
    expected = [(STEPS[-1], told[f"{rank}/{STEPS[-1]}"]) for rank in range(len(NODES))]
    assert cluster(arenas, nodes).run(restored) == expected


@every_format
def test_an_own_slot_opens_in_the_plain_library(version, arenas):
    """Safetensors itself opens every own slot; a tensor in it has the value of its step."""
    for path in sorted(arenas.glob("planaria-*/*/*/*/*.safetensors")):
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["planaria"])
            names = [name for name in file.keys() if name.endswith("half")]  # noqa: SIM118 - no dict
            assert torch.equal(
                file.get_tensor(names[0]), state_of(header["owner"], header["step"])["half"]
            )


@every_format
def test_the_words_say_what_the_state_was(version):
    """What was written down of every state is what the job's function gives: bits, types, order."""
    for name, text in expected_of(version)["states"].items():
        rank, step = map(int, name.split("/"))
        assert said_of(state_of(rank, step)) == text


def test_today_writes_the_same_heads_and_records(arena_dir):
    """Every head, record and frame of our own format, decoded and encoded again, is the same."""
    seen = 0
    for name, raw in members(FORMAT_VERSION):
        if raw is None or not name.endswith(("head", ".record")):
            continue
        for start in (0, len(raw) // 2):
            frame = decode_frame(raw[start:])
            if frame is None or not frame[1]:
                continue
            sequence, payload = frame
            again = encode_frame(sequence, payload)
            assert raw[start : start + len(again)] == again, RAISE
            if name.endswith("head"):
                assert encode_head(decode_head(payload)) == payload, RAISE
            else:
                assert encode_record(decode_record(payload)) == payload, RAISE
            seen += 1
    assert seen > len(NODES) * 2


def test_files_of_two_frames_have_the_same_sizes_and_places():
    """Heads have room for the largest head twice, each frame stands where its number says."""
    for name, raw in members(FORMAT_VERSION):
        if raw is None or not name.endswith("/head"):
            continue
        assert len(raw) == 2 * (len(encode_frame(0, b"")) + manifest.MAX_HEAD_BYTES), RAISE
        for place, start in enumerate((0, len(raw) // 2)):
            sequence, _ = decode_frame(raw[start:])
            assert sequence % 2 == place, RAISE


def test_today_writes_the_same_shards_and_fragments(arena_dir):
    """The same states, captured and encoded now, give the kept own slots, fragments and digests."""
    unpack(FORMAT_VERSION, arena_dir)
    kept = {}
    for view in read_arenas(arena_dir, JOB):
        for slot in view.slots.values():
            if slot.record is not None:
                record = slot.record
                kept[record.generation.step, record.owner, record.fragment] = slot, record
    for (step, owner, fragment), (slot, record) in kept.items():
        if fragment != WHOLE:
            continue
        header = read_image(slot.data).header
        again = np.zeros(slot.capacity, np.uint8)
        header = ShardHeader(**asdict(header))
        nbytes = Snapshot(state_of(owner, step), random_states=False).capture_into(again, header)
        assert nbytes == record.shard_bytes, RAISE
        assert np.array_equal(again, slot.data), RAISE
        code, shard = record.code, again[:nbytes]
        data = {i: np.array(shard[slice(*code.span(i, nbytes))]) for i in range(code.k)}
        parity = {i: np.empty(code.length(i, nbytes), np.uint8) for i in range(code.k, code.n)}
        Codec(code).decode(data, parity)
        made = b""
        for index, part in sorted((data | parity).items()):
            held, about = kept[step, owner, index]
            assert np.array_equal(part, held.data[: about.length]), RAISE
            assert chunk_digests(part, about.chunk_bytes) == about.chunk_digests, RAISE
            made += about.chunk_digests if index < code.k else b""
        assert made == record.chunk_digests, RAISE
        assert manifest.shard_digest(made, nbytes) == record.shard_digest, RAISE


# --- formats of others


def reversioned(raw, version):
    """Return a head or record as a library of another format version would frame it."""
    _, _, kind, text_bytes, tail_bytes, _ = struct.unpack_from("<8sHHII16s", raw)
    sizes = struct.pack("<HHII", version, kind, text_bytes, tail_bytes)
    body = raw[36 : 36 + text_bytes + tail_bytes]
    return b"PLANARIA" + sizes + digest(sizes + body) + body


def make_foreign(arena_dir, version, nodes):
    """Rewrite heads and records of some nodes in another format version."""
    with ExitStack() as stack:
        for node in nodes:
            for path in sorted(arena_dir.glob(f"planaria-*/*/{node}-*/0/*")):
                if path.name == "head" or path.suffix == ".record":
                    file = stack.enter_context(path.open("r+b"))
                    frames = FrameFile(file.fileno(), str(path))
                    payload = frames.read()
                    if payload:
                        frames.write(reversioned(payload, version))


@pytest.mark.parametrize("other", [0, FORMAT_VERSION + 1, FORMAT_VERSION + 7, 0xFFFF])
def test_another_format_is_named_and_skipped(arena_dir, caplog, other):
    """Arenas of a version never released or not known yet: no head, no record, and it is said."""
    unpack(FORMAT_VERSION, arena_dir)
    make_foreign(arena_dir, other, NODES)
    views = read_arenas(arena_dir)
    assert len(views) == len(NODES)
    for view in views:
        assert view.head is None
        assert f"format version {other}" in view.problem
        assert {slot.record for slot in view.slots.values()} == {None}
    assert caplog.text.count(f"record of format version {other}") >= len(NODES) * len(STEPS)
    caplog.clear()
    assert {step for step, _ in cluster(arena_dir).run(restored)} == {None}


@pytest.mark.parametrize("other", [0, FORMAT_VERSION + 1])
def test_a_node_of_another_format_costs_that_node_only(arena_dir, other):
    """One node ran a newer library in between: its arena counts as lost, the step comes back."""
    unpack(FORMAT_VERSION, arena_dir)
    make_foreign(arena_dir, other, NODES[2:3])
    told = expected_of(FORMAT_VERSION)["states"]
    expected = [(STEPS[-1], told[f"{rank}/{STEPS[-1]}"]) for rank in range(len(NODES))]
    assert cluster(arena_dir).run(restored) == expected
