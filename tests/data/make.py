"""Make the folder of the present format version, once: ``python -m tests.data.make``.

Four ranks run as threads, save two steps and close; what lies in their arenas then is packed as it
is. A folder that is there already is never replaced: a released format does not change.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recovery.manifest import FORMAT_VERSION
from replica.arena import read_arenas
from tests.data.job import (
    ARCHIVE,
    EXPECTED,
    JOB,
    NODES,
    REDUNDANCY,
    STEPS,
    folder_of,
    members,
    pack,
    said_of,
    sha256,
    state_of,
)
from tests.replica.inprocess import Cluster, Member


def save(me: Member) -> None:
    """Save the steps of one rank, each committed before the next."""
    for step in STEPS:
        me.state.clear()
        me.state.update(state_of(me.rank, step))
        me.ckpt.save(step).wait("committed", 30)


def describe(version: int, arena_dir: Path) -> dict[str, Any]:
    """Say in plain JSON what the arenas hold."""
    slots = {}
    heads = {}
    for view in read_arenas(arena_dir, JOB):
        head = view.head
        assert head is not None
        heads[str(head.rank)] = asdict(head)
        for number, slot in sorted(view.slots.items()):
            record = slot.record
            facts = None
            if record is not None:
                facts = asdict(record) | {
                    "chunk_digests": record.chunk_digests.hex(),
                    "shard_digest": record.shard_digest.hex(),
                    "payload_sha256": sha256(slot.data[: record.length].tobytes()),
                }
            slots[f"{head.rank}/{number}"] = {
                "kind": slot.kind,
                "capacity": slot.capacity,
                "record": facts,
            }
    return {
        "format": version,
        "files": {name: sha256(raw) for name, raw in members(version) if raw is not None},
        "heads": heads,
        "slots": slots,
        "states": {
            f"{rank}/{step}": said_of(state_of(rank, step))
            for rank in range(len(NODES))
            for step in STEPS
        },
    }


def main() -> None:
    """Make it, or refuse."""
    folder = folder_of(FORMAT_VERSION)
    if folder.exists():
        sys.exit(f"{folder} is there: a released format does not change, raise FORMAT_VERSION")
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        arena_dir = Path(name)
        Cluster(arena_dir, NODES, REDUNDANCY, counts=[1] * len(NODES), job=JOB).run(save)
        folder.mkdir()
        pack(arena_dir, folder / ARCHIVE)
        text = json.dumps(describe(FORMAT_VERSION, arena_dir), indent=1, sort_keys=True)
        (folder / EXPECTED).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
