"""Verifying arenas at rest: every byte that a record vouches for is compared with its digests.

Takes no lock, changes nothing, follows no link and needs neither torch nor a running job. The owner
may go on writing: it withdraws a slot's record before it overwrites the slot, so what looks wrong
counts only when it looks exactly so twice in a row; a slot that goes on changing is "busy".
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from erasure.digest import DIGEST_BYTES
from recovery.manifest import WHOLE, ArenaHead, SlotRecord
from replica.arena import OWN
from replica.arena_views import arena_folders
from replica.chunks import damaged_chunks
from replica.claim import read_head
from replica.errors import ArenaError
from replica.folder import Folder, folder_name
from replica.frames import FrameFile
from replica.procs import Process
from replica.slot import data_name, judge_record, listed_slots, map_file, record_name

OK, BAD, UNREADABLE, EMPTY, BUSY = "ok", "bad", "unreadable", "empty", "busy"
LOOKS = 4
AGAIN_S = 0.05
"""After so long a small file that looked damaged while its owner lived is looked at again."""
_METADATA_CHARS_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SlotVerdict:
    """What one slot is worth. ``record`` is None unless it can be read.

    ``verdict``: "ok", all bytes verify; "bad", some do not (``bad_chunks``) or the image cannot be
    opened; "unreadable", nobody can tell what it should hold; "empty", it claims to hold nothing;
    "busy", it changed at every look. ``intact``: the bytes verify, so that a restore may use them.
    """

    number: int
    kind: str
    verdict: str
    reason: str = ""
    record: SlotRecord | None = None
    bad_chunks: tuple[int, ...] = ()
    capacity: int = 0

    @property
    def chunks(self) -> int:
        """How many chunks have a digest."""
        return len(self.record.chunk_digests) // DIGEST_BYTES if self.record else 0

    @property
    def intact(self) -> bool:
        """Whether a restore may use it."""
        return self.record is not None and self.verdict in (OK, BAD) and not self.bad_chunks


@dataclass(frozen=True, kw_only=True)
class ArenaVerdict:
    """One arena. ``problem`` says what is wrong with its head, "" if nothing."""

    path: str
    head: ArenaHead | None
    problem: str
    alive: bool
    slots: tuple[SlotVerdict, ...]

    @property
    def damaged(self) -> int:
        """How many of its slots, and its head, are bad or unreadable."""
        return bool(self.problem) + sum(s.verdict in (BAD, UNREADABLE) for s in self.slots)


def verify_arenas(arena_dir: str | Path, job: str | None = None) -> list[ArenaVerdict]:
    """Return a verdict on each of this user's arenas, of one job or all, by path.

    Raises ArenaError when arena_dir itself cannot be used.
    """
    found = []
    for node, name in arena_folders(arena_dir, job):
        path = f"{node.path}/{name}"
        try:
            with node.child(name, create=False) as folder:
                verdict = _verify_arena(folder)
        except FileNotFoundError:
            continue  # removed since it was listed
        except (ArenaError, OSError) as error:
            verdict = ArenaVerdict(path=path, head=None, problem=str(error), alive=False, slots=())
        if job is None or verdict.head is None or verdict.head.job == job:
            found.append(verdict)
    return found


def _verify_arena(folder: Folder) -> ArenaVerdict:
    head, problem = read_head(folder)
    alive = head is not None and Process(head.pid, head.pid_start).alive
    if problem and alive:
        # Its owner may have been writing it.
        time.sleep(AGAIN_S)
        head, problem = read_head(folder)
    if head is not None:
        problem = problem or _misplaced(head, folder.path)
    looked = [
        _verify_slot(folder, number, kind, head.job if head else None, alive=alive)
        for number, kind in listed_slots(folder.names())
    ]
    return ArenaVerdict(
        path=folder.path,
        head=head,
        problem=problem,
        alive=alive,
        slots=tuple(sorted(filter(None, looked), key=lambda slot: slot.number)),
    )


def _misplaced(head: ArenaHead, path: str) -> str:
    """Say where a head lies that belongs elsewhere, "" if it lies where it should."""
    *_, job, node, name = path.split("/")
    if (folder_name(head.job), folder_name(head.node_id)) != (job, node):
        return f"{path} has the head of job {head.job!r}, node {head.node_id!r}"
    if name.partition(".")[0] != str(head.position):
        return f"{path} has the head of position {head.position}"
    return ""


def _verify_slot(
    folder: Folder, number: int, kind: str, job: str | None, *, alive: bool
) -> SlotVerdict | None:
    """Look until a verdict stands; None when the slot was dropped since it was listed."""
    last = None
    for _ in range(LOOKS):
        try:
            found = _look(folder, number, kind, job, alive=alive)
        except ArenaError as error:
            found = SlotVerdict(number=number, kind=kind, verdict=UNREADABLE, reason=str(error))
        if found is None or found.verdict == OK or found == last:
            return found
        if found.verdict == EMPTY:
            # Withdrawn while we looked: it is being written anew.
            return found if last is None else replace(found, verdict=BUSY, reason=_CHANGING)
        last = found
    assert last is not None, "LOOKS is at least 1"
    return replace(last, verdict=BUSY, reason=_CHANGING, bad_chunks=(), record=None)


_CHANGING = "its owner is writing it"


def _look(
    folder: Folder, number: int, kind: str, job: str | None, *, alive: bool
) -> SlotVerdict | None:
    """Give a verdict on the slot as it is now; None if it is not there any more."""
    name, found = data_name(number, kind), SlotVerdict(number=number, kind=kind, verdict=EMPTY)
    try:
        descriptor = folder.file(name, write=False)
    except FileNotFoundError:
        return None
    try:
        found = _look_into(folder, descriptor, found, job, alive=alive)
        # The number may have been given to a new slot, whose record is not about these bytes.
        if found.verdict != OK and not folder.leads_to(name, descriptor):
            return replace(found, verdict=BUSY, reason=_CHANGING, bad_chunks=(), record=None)
        return found
    finally:
        os.close(descriptor)


def _look_into(
    folder: Folder, descriptor: int, found: SlotVerdict, job: str | None, *, alive: bool
) -> SlotVerdict:
    info, name = os.fstat(descriptor), record_name(found.number)
    found = replace(found, capacity=info.st_size)
    if info.st_blocks * 512 < info.st_size:
        # To read a hole allocates it, and is a SIGBUS where there is no room.
        return replace(found, verdict=UNREADABLE, reason="the file has holes")
    data = map_file(descriptor, info.st_size, write=False)
    try:
        records = FrameFile(folder.file(name, write=False), f"{folder.path}/{name}")
    except FileNotFoundError:
        # A slot's record is made before it and goes before it.
        return replace(found, verdict=BUSY if alive else UNREADABLE, reason="it has no record file")
    try:
        record, problem = judge_record(records, data.size, job)
    finally:
        records.close()
    if record is None:
        return replace(found, verdict=UNREADABLE if problem else EMPTY, reason=problem)
    return _judge(replace(found, record=record), record, data, descriptor)


def _judge(
    found: SlotVerdict, record: SlotRecord, data: npt.NDArray[np.uint8], descriptor: int
) -> SlotVerdict:
    damaged = damaged_chunks(record, data)
    if damaged:
        reason = f"{len(damaged)} of {found.chunks} chunks differ from their digests"
        return replace(found, verdict=BAD, reason=reason, bad_chunks=damaged)
    if found.kind == OWN and record.fragment == WHOLE:
        fault = _image_fault(descriptor, record)
        if fault and _declared_bytes(data) not in (0, data.size):
            # Regrown in a slot of another size, it has not the pad that it had, which is no part of
            # the shard.
            fault = _fault_as_it_was(data, record)
        if fault:
            return replace(found, verdict=BAD, reason=fault)
    return replace(found, verdict=OK)


def _declared_bytes(data: npt.NDArray[np.uint8]) -> int:
    """How long the file was that the image was made in, as its header has it; 0: not said."""
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    try:
        entries = json.loads(data[8 : 8 + header_bytes].tobytes())
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name[:2] != "__"]
        return 8 + header_bytes + int(max(ends, default=0))
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return 0


def _fault_as_it_was(data: npt.NDArray[np.uint8], record: SlotRecord) -> str:
    """What is wrong with the image in a file of the length that its header has; no byte is read."""
    declared, header_bytes = _declared_bytes(data), int.from_bytes(data[:8].tobytes(), "little")
    if declared < record.shard_bytes:
        return f"its digests hold, and its header says {declared} bytes of {record.shard_bytes}"
    descriptor = os.memfd_create("planaria-verify")
    try:
        os.write(descriptor, data[: 8 + header_bytes].tobytes())
        os.ftruncate(descriptor, declared)
        return _image_fault(descriptor, record)
    except OSError as error:
        return f"its digests hold, and a file of its length {declared} cannot be made: {error}"
    finally:
        os.close(descriptor)


def _image_fault(descriptor: int, record: SlotRecord) -> str:
    """Have safetensors open the file; what is wrong with the image, or with whose it says it is."""
    try:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="np") as image:
            text = (image.metadata() or {}).get("planaria", "")
    except (SafetensorError, OSError) as error:
        return f"its digests hold, and safetensors cannot open it: {error}"
    try:
        facts = json.loads(text) if len(text) <= _METADATA_CHARS_MAX else None
    except (ValueError, RecursionError):
        facts = None
    generation = record.generation
    expected = {
        "job": record.job,
        "epoch": generation.epoch,
        "step": generation.step,
        "generation": generation.id,
        "owner": record.owner,
        "world": record.world,
    }
    if not isinstance(facts, dict) or any(facts.get(key) != expected[key] for key in expected):
        return "its digests hold, and its image is of another generation or owner than its record"
    return ""
