"""What can happen to arenas between two runs of a job: nodes lost, files damaged or swapped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recovery.manifest import WHOLE, SlotRecord, encode_record
from replica.arena import read_arenas
from replica.folder import folder_name
from replica.frames import FrameFile
from replica.slot import data_name, record_name
from tests.replica.inprocess import JOB


def node_dir(arena_dir, node: str) -> Path:
    """Name the directory of all arenas of one node."""
    return Path(arena_dir) / f"planaria-{os.geteuid()}" / folder_name(JOB) / folder_name(node)


def lose(arena_dir, nodes: Iterable[str]) -> None:
    """Delete everything that these nodes kept."""
    for node in nodes:
        shutil.rmtree(node_dir(arena_dir, node))


def renumbered(nodes: list[str], lost: Iterable[str]) -> list[str]:
    """Return the nodes of the ranks after a restart: survivors close up, empty ones come last."""
    lost = set(lost)
    kept = [node for node in nodes if node not in lost]
    fresh = [f"{node}-replacement" for node in nodes if node in lost]
    return kept + fresh


@contextmanager
def copy_of(arena_dir):
    """Yield a copy of all arenas, to be damaged; removed afterwards."""
    copy = Path(f"{arena_dir}-copy")
    shutil.copytree(arena_dir, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


@dataclass(frozen=True)
class SlotFiles:
    """One slot on disk, its arena closed."""

    folder: Path
    number: int
    kind: str
    record: SlotRecord

    @property
    def data(self) -> Path:
        """The file with the bytes."""
        return self.folder / data_name(self.number, self.kind)

    @property
    def records(self) -> Path:
        """The file with the record."""
        return self.folder / record_name(self.number)

    def flip(self, offset: int = 0) -> None:
        """Flip one bit of the data."""
        flip(self.data, offset)

    def rewrite(self, record: SlotRecord, payload: bytes | None = None) -> None:
        """Replace the record, checksum and all, and perhaps the bytes."""
        if payload is not None:
            with self.data.open("r+b") as file:
                file.write(payload)
        frames = FrameFile(os.open(self.records, os.O_RDWR), str(self.records))
        frames.write(encode_record(record))
        frames.close()

    def payload(self) -> bytes:
        """Return the bytes that the record speaks of."""
        with self.data.open("rb") as file:
            return file.read(self.record.length)


def slots(
    arena_dir, step: int, owner: int, fragment: int | None = None, node: str | None = None
) -> list[SlotFiles]:
    """Find the slots with parts of one owner's shard of a step, sorted by fragment."""
    found = [
        SlotFiles(Path(view.path), slot.number, slot.kind, slot.record)
        for view in read_arenas(arena_dir, JOB, node)
        for slot in view.slots.values()
        if slot.record
        and (slot.record.generation.step, slot.record.owner) == (step, owner)
        and fragment in (None, slot.record.fragment)
    ]
    return sorted(found, key=lambda slot: slot.record.fragment)


def own_slot(arena_dir, step: int, owner: int) -> SlotFiles:
    """Find the slot with the owner's whole shard."""
    (slot,) = slots(arena_dir, step, owner, WHOLE)
    return slot


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))
