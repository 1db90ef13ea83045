"""Targets for the readers of ``replica``: frames, images, arenas, words of peers, trailers."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from erasure.digest import DIGEST_BYTES, digest
from erasure.errors import PlanariaError
from recovery.topology import Topology
from replica import opening
from replica.arena import Arena, read_arenas
from replica.errors import PeerError
from replica.folder import folder_name
from replica.frames import FrameFile, decode_frame, encode_frame
from replica.group import MemoryGroup
from replica.image import read_image
from replica.jsontext import JsonError, parse_bounded
from replica.slot import read_record
from replica.snapshot import Snapshot
from replica.store import MemoryStore
from replica.streams import receive_stream
from replica.words import check_facts, check_introductions
from tests.data.job import FORMAT, JOB, members, state_of
from tests.fuzz.decisions import HEADS, RECORDS
from tests.fuzz.target import Target, dumped, refused
from tests.replica.arena_tools import OPEN
from tests.replica.snapshot_tools import image_of, tree_of, with_header, with_tree

SHM = Path("/dev/shm")
WHO = OPEN | {"job": JOB, "node_id": "node-0", "world": 4, "timeout_s": 0.0}


# --- frames


def read_frame(raw: bytes) -> Any:
    """A frame that is taken is the one that was written."""
    frame = decode_frame(raw)
    if frame is not None:
        assert raw.startswith(encode_frame(*frame))
    return frame


def read_frame_file(raw: bytes) -> Any:
    """A record file of any bytes and any size: a record or none."""
    frames = FrameFile(os.memfd_create("fuzz"), "fuzz")
    try:
        os.write(frames.descriptor, raw)
        again = FrameFile(os.dup(frames.descriptor), "fuzz")
        try:
            return read_record(again, 1 << 20, JOB)
        finally:
            again.close()
    finally:
        frames.close()


# --- images


def live() -> dict[str, Any]:
    """Build a state with every kind of place that values are loaded into."""
    model = nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optim.state[param] = {"momentum_buffer": torch.ones_like(param)}
    return {"model": model, "optim": optim, "generator": torch.Generator(), **state_of(1, 0)}


IMAGE = image_of(live())
TREE = json.dumps(tree_of(IMAGE)).encode()
HEADER = bytes(IMAGE[8 : 8 + int.from_bytes(IMAGE[:8].tobytes(), "little")]).rstrip()
SHARDS = [raw for name, raw in members(FORMAT) if raw and name.endswith(".safetensors")]


def load_image(image: Any) -> Any:
    """Prepare and, when that is allowed, load: refused or loaded, and nothing else."""

    def load() -> str:
        Snapshot(live(), random_states=False).prepare(image).commit()
        return "loaded"

    return refused(load)


def read_image_of(raw: bytes) -> Any:
    """Any bytes as an image: parsed, then loaded."""
    buffer = np.frombuffer(raw, np.uint8)
    image = refused(lambda: read_image(buffer))
    return image if isinstance(image, PlanariaError) else load_image(buffer)


def read_json(raw: bytes) -> Any:
    """Bounded JSON: a value or JsonError, which every caller turns into its own."""
    try:
        return parse_bounded(raw, 1 << 14, 1 << 10)
    except JsonError as error:
        return PeerError(str(error))


# --- arenas


def run_arena(raw: bytes) -> Any:
    """Bytes as head, record and data of an arena: read and opened, and nothing else is touched."""
    head, _, rest = raw.partition(b"\xff\xfe\xfd")
    record, _, data = rest.partition(b"\xff\xfe\xfd")
    home = Path(tempfile.mkdtemp(prefix="planaria-fuzz-", dir=SHM if SHM.is_dir() else None))
    try:
        outside = home / "outside"
        outside.write_bytes(b"not ours")
        (home / "arenas").mkdir()
        place = [folder_name(JOB), folder_name(WHO["node_id"]), "0"]
        folder = home.joinpath("arenas", f"planaria-{os.geteuid()}", *place)
        folder.mkdir(parents=True)
        (folder / "head").write_bytes(head)
        (folder / "slot-0.record").write_bytes(record)
        (folder / "slot-0.safetensors").write_bytes(data)
        with suppress(PlanariaError):
            read_arenas(home / "arenas")
        arena = refused(lambda: Arena.open(home / "arenas", **WHO))
        if isinstance(arena, Arena):
            found = arena.slots[0].record
            assert found is None or found.length <= len(data)
            assert arena.head.job == JOB
            arena.close()
            arena = arena if found is not None else None
        assert sorted(path.name for path in home.iterdir()) == ["arenas", "outside"]
        assert outside.read_bytes() == b"not ours"
        return arena
    finally:
        shutil.rmtree(home)


def read_name(raw: bytes) -> str:
    """Any job or node name is one harmless file name."""
    name = folder_name(raw.decode("utf-8", "surrogateescape"))
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name)
    return name


# --- peers


class Told:
    """A channel on which a peer has sent certain bytes, and then nothing more."""

    def __init__(self, raw: bytes) -> None:
        self._left = raw

    def receive(self, buffer: Any) -> Told:
        """Fill the buffer as far as the bytes go."""
        some, self._left = self._left[: buffer.size], self._left[buffer.size :]
        buffer[: len(some)] = np.frombuffer(some, np.uint8)
        self._short = len(some) < buffer.size
        return self

    def wait(self) -> None:
        """Fail when they did not reach."""
        if self._short:
            raise PeerError("the peer sent no more")


def read_trailer(raw: bytes) -> Any:
    """A stream of one chunk and its trailer: digests that its bytes gave, or bad bytes."""
    size = min(max(len(raw) - 2 * DIGEST_BYTES, 0), 64)
    buffer = np.empty(size, np.uint8)
    got = refused(lambda: receive_stream(Told(raw), buffer, lambda: None))
    if not isinstance(got, PlanariaError):
        assert got.chunk_digests == (digest(buffer) if size else b"")
        assert len(got.shard_digest) == DIGEST_BYTES
    return got


class Spoken:
    """A group of two, of which the other says certain bytes."""

    rank, world = 0, 2

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def exchange(self, value: bytes, timeout_s: float) -> list[bytes]:
        """Give both words."""
        del timeout_s
        return [value, self.raw]


OURS = {
    "node": "a",
    "job": "job",
    "bytes": 1000,
    "arena_dir": "/dev/shm",
    "same": {"library": "1", "format": 1, "algorithm": "xxh3-128"},
}
FACTS = {
    "epoch": 3,
    "nonce": "0" * 32,
    "incarnation": "1" * 32,
    "present": 0,
    "memory": {
        "tmpfs_free_bytes": None,
        "ram_available_bytes": 1 << 30,
        "cgroup_free_bytes": 5,
        "device": 7,
        "filesystem": "tmpfs",
        "boot_id": "x",
    },
}


def read_introduction(raw: bytes) -> Any:
    """The first word of a peer: a topology, or an error that every rank raises alike."""

    def read() -> Any:
        said = opening.together(Spoken(raw), 1.0, lambda: OURS)
        check_introductions(said, "1")
        opening._check_same(said)
        sizes = [int(one["bytes"]) for one in said]
        return Topology(tuple(str(one["node"]) for one in said)), sizes

    return refused(read)


def read_facts(raw: bytes) -> Any:
    """The second word: facts of an arena and a memory, all of their types."""

    def read() -> Any:
        said = opening.together(Spoken(raw), 1.0, lambda: FACTS)
        check_facts(said)
        return max(int(one["epoch"]) for one in said)

    return refused(read)


def read_epoch(raw: bytes) -> Any:
    """The epoch that the store remembers: a number or StoreError."""
    (group,) = MemoryGroup.make(1)
    store = group.store(None, 1.0)
    store.clone(JOB).set("epoch", raw)
    assert isinstance(store, MemoryStore)
    return refused(lambda: opening._stored_epoch(store, JOB, 5.0))


def split_seeds() -> list[bytes]:
    """Whole arenas as ``run_arena`` takes them."""
    files = dict(members(FORMAT))
    (folder,) = {Path(n).parent for n in files if n.endswith("slot-0.record") and "node-0" in n}
    parts = [files[f"{folder}/{n}"] for n in ("head", "slot-0.record", "slot-0.safetensors")]
    mark = b"\xff\xfe\xfd"
    return [mark.join(part or b"" for part in parts), mark.join([HEADS[0], RECORDS[0], b"x" * 99])]


TARGETS = [
    Target(name="frame", run=read_frame, seeds=[encode_frame(3, b"abc"), encode_frame(2, b"")]),
    Target(
        name="frame-file",
        run=read_frame_file,
        seeds=[
            encode_frame(2, RECORDS[0]) + encode_frame(3, RECORDS[0]),
            *[raw for n, raw in members(FORMAT) if raw and n.endswith("slot-0.record")][:1],
        ],
    ),
    Target(name="image", run=read_image_of, seeds=[IMAGE.tobytes(), SHARDS[0]]),
    Target(
        name="image-header",
        run=lambda raw: load_image(with_header(IMAGE, raw)),
        seeds=[HEADER],
    ),
    Target(name="tree", run=lambda raw: load_image(with_tree(IMAGE, raw)), seeds=[TREE]),
    Target(name="bounded-json", run=read_json, seeds=[b'{"a":[1,2.5,null]}', TREE[:400]]),
    Target(name="arena", run=run_arena, seeds=split_seeds()),
    Target(name="name", run=read_name, seeds=[b"job", b"../../x", b"a/b", b"\x80", b""]),
    Target(
        name="trailer",
        run=read_trailer,
        seeds=[b"x" * 64 + digest(b"x" * 64) + b"s" * 16, b"s" * 16],
    ),
    Target(
        name="introduction",
        run=read_introduction,
        seeds=[dumped({"value": OURS}), dumped({"kind": "ArenaFull", "error": "no room"})],
    ),
    Target(name="facts", run=read_facts, seeds=[dumped({"value": FACTS})]),
    Target(name="epoch", run=read_epoch, seeds=[b"0", b"17"]),
]
