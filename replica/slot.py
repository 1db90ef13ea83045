"""Slots: pre-allocated pieces of node-local memory that hold one shard or fragment each.

A slot is a file on tmpfs, mapped for as long as the arena is open, and a small record that says
what is in it. The record is written last and torn first: a slot without a valid record holds
nothing.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from erasure.digest import CHUNK_BYTES
from recovery.errors import FormatVersionError, ManifestError
from recovery.manifest import Generation, SlotRecord, decode_record, encode_record, record_capacity
from recovery.slots import HELD, OWN, SlotFacts
from replica.errors import ArenaError, ArenaFull
from replica.folder import Folder
from replica.frames import FrameFile
from replica.pinned import Mapping

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

log = logging.getLogger("planaria")

SUFFIXES = {OWN: "safetensors", HELD: "fragment"}
"""File name suffix by kind: an own slot is a safetensors image, a held one a bare fragment."""

_KINDS = {suffix: kind for kind, suffix in SUFFIXES.items()}
_DATA_NAME = re.compile(r"slot-(\d{1,6})\.(safetensors|fragment)")
_RECORD_NAME = re.compile(r"slot-(\d{1,6})\.record")
UNFINISHED = "unfinished-"
"""Prefix of files that are not whole yet; what a dead process left of them is removed."""

_PIECE_BYTES = 1 << 28  # a signal is handled between pieces, and not only after all of a large slot
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}


class Slot:
    """One slot of an open arena.

    ``record`` says what the slot holds; None: nothing that anybody may rely on. ``taken``: somebody
    fills it, or has filled it with what has no record yet; nobody else chooses it. The mapping
    lives as long as anything refers to ``data`` or ``tensor``, even after the slot is dropped or
    the arena closed.
    """

    def __init__(
        self,
        *,
        number: int,
        kind: str,
        data: npt.NDArray[np.uint8],
        records: FrameFile,
        key: tuple[int, int],
    ) -> None:
        self.number = number
        self.kind = kind
        self.key = key
        """Device and inode of the data's file: names it whatever has its name now."""
        self.capacity = data.size
        self._holds = 0
        self._lock = threading.Lock()
        self.taken = False
        self.record: SlotRecord | None = None
        self._data: npt.NDArray[np.uint8] | None = data
        self._tensor: torch.Tensor | None = None
        self._records = records

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The slot's memory: uint8[capacity], writable, the arena's, shared with its file."""
        if self._data is None:
            raise ArenaError(f"slot {self.number} was dropped or its arena closed")
        return self._data

    @property
    def generation(self) -> Generation | None:
        """The generation that the slot holds a part of; None: nothing."""
        return self.record.generation if self.record else None

    @property
    def busy(self) -> bool:
        """A receive or a late copy into it has not ended, so nobody may reuse or unmap it (P22)."""
        return self._holds > 0

    def hold(self) -> None:
        """A receive or a late copy into it begins; ``let_go`` ends it."""
        with self._lock:
            self._holds += 1

    def let_go(self) -> None:
        """One of them has ended."""
        with self._lock:
            self._holds -= 1

    @property
    def facts(self) -> SlotFacts:
        """What decisions need to know of it."""
        return SlotFacts(
            number=self.number,
            kind=self.kind,
            capacity=self.capacity,
            generation=self.generation,
            busy=self.busy or self.taken,
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as a torch.uint8 tensor."""
        if self._tensor is None:
            import torch  # noqa: PLC0415 - listing arenas must not wait seconds for torch

            self._tensor = torch.from_numpy(self.data)
        return self._tensor

    def write_record(self, record: SlotRecord) -> None:
        """Declare what the slot holds now. The bytes must be in place before."""
        if record.length > self.data.size:
            raise ArenaError(
                f"slot {self.number} has {self.capacity} bytes, a record claims {record.length}"
            )
        self._records.write(encode_record(record))
        self.record = record

    def invalidate(self) -> None:
        """Declare that the slot holds nothing. Overwrite its bytes only after this has returned."""
        if self._data is None:
            raise ArenaError(f"slot {self.number} was dropped or its arena closed")
        self._records.write(b"")
        self.record = None

    def in_place(self, folder: Folder) -> bool:
        """Whether its files still have their names: without them nobody adopts the slot."""
        return folder.has(data_name(self.number, self.kind), self.key) and folder.leads_to(
            record_name(self.number), self._records.descriptor
        )

    def release(self) -> None:
        """Let go of memory and descriptors; for the arena only."""
        self._data = self._tensor = None
        self._records.close()


def data_name(number: int, kind: str) -> str:
    """Return the name of a slot's data file."""
    return f"slot-{number}.{SUFFIXES[kind]}"


def record_name(number: int) -> str:
    """Return the name of a slot's record file."""
    return f"slot-{number}.record"


def listed_slots(names: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, kind) of every data file among the names."""
    for name in names:
        match = _DATA_NAME.fullmatch(name)
        if match is not None and name == data_name(int(match[1]), _KINDS[match[2]]):
            yield int(match[1]), _KINDS[match[2]]


def leftovers(names: list[str]) -> list[str]:
    """Return the names of files that a process which died left half made: nobody will use them."""
    whole = {record_name(number) for number, _ in listed_slots(names)}
    return [
        name
        for name in names
        if name.startswith(UNFINISHED) or (_RECORD_NAME.fullmatch(name) and name not in whole)
    ]


def is_slot_file(name: str) -> bool:
    """Whether an arena may have made a file of this name for a slot."""
    return bool(
        _DATA_NAME.fullmatch(name) or _RECORD_NAME.fullmatch(name) or name.startswith(UNFINISHED)
    )


def map_file(descriptor: int, nbytes: int, *, write: bool) -> npt.NDArray[np.uint8]:
    """Map a file as uint8[nbytes]. The array keeps the mapping; the descriptor may be closed.

    numpy holds the mapping's buffer, so that it cannot be closed under the array: torch.frombuffer
    does not, and a touch after close is a segmentation fault.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return np.frombuffer(Mapping(descriptor, nbytes, mmap.MAP_SHARED, protection), np.uint8)


def create_slot(
    folder: Folder, number: int, kind: str, nbytes: int, chunk_bytes: int = CHUNK_BYTES
) -> Slot:
    """Allocate a slot: its memory is reserved, mapped and touched once before it gets its name.

    Raises ArenaFull, having left nothing behind, when the file system has too little room.
    """
    data, records = data_name(number, kind), record_name(number)
    unfinished = (UNFINISHED + data, UNFINISHED + records)
    record_bytes = record_capacity(nbytes, chunk_bytes)
    needed_bytes = nbytes + 2 * record_bytes
    try:
        _check_room(folder, needed_bytes)
        record_file = FrameFile.create(folder, unfinished[1], record_bytes)
        try:
            mapped, key = _allocate(folder, unfinished[0], nbytes)
            record_file.write(b"")
            folder.rename(unfinished[1], records)
            folder.rename(unfinished[0], data)
        except BaseException:
            record_file.close()
            raise
    except BaseException as error:
        for name in (*unfinished, data, records):
            folder.unlink(name)
        if isinstance(error, OSError):
            raise as_arena_error(error, folder.path, needed_bytes) from error
        raise
    return Slot(number=number, kind=kind, data=mapped, records=record_file, key=key)


def _allocate(
    folder: Folder, name: str, nbytes: int
) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    descriptor = folder.file(name, create=True)
    try:
        # Reserve before mapping: a touch of a page that tmpfs cannot give is a SIGBUS, this is an
        # OSError.
        for offset in range(0, nbytes, _PIECE_BYTES):
            os.posix_fallocate(descriptor, offset, min(_PIECE_BYTES, nbytes - offset))
        data, info = map_file(descriptor, nbytes, write=True), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    # The first touch of a page costs several warm copies of it: paid here and never by a save.
    for offset in range(0, nbytes, _PIECE_BYTES):
        data[offset : offset + _PIECE_BYTES : mmap.PAGESIZE] = 0
    return data, (info.st_dev, info.st_ino)


def _check_room(folder: Folder, nbytes: int) -> None:
    """Raise ArenaFull before anything is taken: to fill the file system up would hurt others."""
    facts = os.fstatvfs(folder.descriptor)
    if facts.f_blocks and facts.f_bavail * facts.f_frsize < nbytes:
        raise _full(folder.path, facts, nbytes)


def as_arena_error(error: OSError, path: str, nbytes: int) -> ArenaError:
    """Translate what the operating system says about ``path``, which wanted ``nbytes`` more."""
    if error.errno in _NO_ROOM:
        return _full(path, os.statvfs(path), nbytes)
    return ArenaError(f"{path}: {error.strerror or error}")


def _full(path: str, facts: os.statvfs_result, nbytes: int) -> ArenaFull:
    free = (
        f"{facts.f_bavail * facts.f_frsize} bytes free" if facts.f_blocks else "no limit of its own"
    )
    files = ", no more files allowed" if facts.f_files and not facts.f_favail else ""
    return ArenaFull(
        f"{path}: {nbytes} bytes needed, {free}{files}: "
        "give the tmpfs more room (docker: --shm-size) or set arena_dir to a larger one"
    )


def adopt_slot(folder: Folder, number: int, kind: str, job: str) -> Slot | None:
    """Map a slot that an earlier process left; one with holes is removed instead (None)."""
    descriptor = folder.file(data_name(number, kind))
    try:
        info = os.fstat(descriptor)
        if info.st_blocks * 512 < info.st_size:
            log.warning("%s/%s has holes and is removed", folder.path, data_name(number, kind))
            remove_slot_files(folder, number, kind)
            return None
        data = map_file(descriptor, info.st_size, write=True)
    finally:
        os.close(descriptor)
    records = _adopt_record_file(folder, number, data.size)
    key = (info.st_dev, info.st_ino)
    slot = Slot(number=number, kind=kind, data=data, records=records, key=key)
    slot.record = read_record(records, data.size, job)
    return slot


def _adopt_record_file(folder: Folder, number: int, capacity: int) -> FrameFile:
    """Open the record file as it is; make it anew if it is missing or too small for a record."""
    try:
        records = FrameFile(
            folder.file(record_name(number)), f"{folder.path}/{record_name(number)}"
        )
    except FileNotFoundError:
        log.warning("%s/%s has no record and counts as lost", folder.path, record_name(number))
    else:
        problem = _cut_short(records, capacity)
        if not problem:
            return records
        log.warning("%s", problem)
        records.close()
    records = FrameFile.create(folder, record_name(number), record_capacity(capacity, CHUNK_BYTES))
    records.write(b"")
    return records


def read_record(records: FrameFile, capacity: int, job: str | None) -> SlotRecord | None:
    """Return the valid record in a record file, else None; why is logged unless it is empty."""
    record, problem = judge_record(records, capacity, job)
    if problem:
        log.warning("%s", problem)
    return record


def judge_record(
    records: FrameFile, capacity: int, job: str | None
) -> tuple[SlotRecord | None, str]:
    """Return the valid record in a record file, else None and why not, "" when it is empty.

    A record of another format version is named; one of another job, or longer than the slot, is
    damaged. So is a file that lost its end: its newer frame is not where it was, and the older one
    may be empty.
    """
    problem = _cut_short(records, capacity)
    if problem:
        return None, problem
    raw = records.read()
    if raw == b"":
        lost = (
            f"{records.path} says empty in one of its two frames, and the other one is damaged or "
            "was never finished: the slot counts as lost"
        )
        return None, lost if records.maimed() else ""
    try:
        record = decode_record(raw or b"")
        if record.length > capacity:
            raise ManifestError(f"{record.length} bytes claimed in a slot of {capacity}")
        if job is not None and record.job != job:
            raise ManifestError(f"record of job {record.job!r} in an arena of job {job!r}")
    # Texts are returned and not errors, whose tracebacks would keep the caller's mapping alive.
    except FormatVersionError as error:
        return None, f"{records.path} is skipped: {error}"
    except ManifestError as error:
        return None, f"{records.path} is not valid and counts as lost: {error}"
    return record, ""


def _cut_short(records: FrameFile, capacity: int) -> str:
    """Say that a record file has less room than was made for a slot of that size, else ""."""
    room, needed = records.payload_bytes_max, record_capacity(capacity, CHUNK_BYTES)
    if room >= needed:
        return ""
    return (
        f"{records.path} is cut short and counts as lost: "
        f"it has room for a record of {max(0, room)} bytes, expected {needed}"
    )


def remove_slot_files(folder: Folder, number: int, kind: str) -> None:
    """Unlink a slot, the record first: data without a record hold nothing."""
    folder.unlink(record_name(number))
    folder.unlink(data_name(number, kind))
