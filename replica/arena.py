"""The arena: node-local memory of one rank, which outlives its process.

::

    <arena_dir>/planaria-<uid>/<job>/<node>/<position>[.<n>]/
        lock                  held while a process uses the arena (see claim.py)
        head                  whose arena it is, which incarnation, what was committed
        slot-<n>.safetensors  an own slot: one whole shard image          size = capacity, for ever
        slot-<n>.fragment     a held slot: a fragment of another owner    the same
        slot-<n>.record       what is in the slot

Everything is allocated and touched before it is used, so that a full tmpfs is an ArenaFull at that
moment and never a SIGBUS later. A killed process tears at most the frame that it was writing (see
frames.py): the head stays readable, and a slot is what its record says or invalid.

Descriptors in use: one for each mapping, one for each slot's record, three for the arena.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from erasure.digest import CHUNK_BYTES
from recovery.manifest import MAX_HEAD_BYTES, ArenaHead, encode_head
from recovery.slots import HELD, OWN, SlotFacts
from replica.arena_views import (
    ArenaView,
    SlotView,
    clean,
    left_over,
    prune,
    read_arenas,
    remove_arena,
    remove_claimed,
)
from replica.claim import HEAD, LOCK, Claim, claim, sibling_name, sibling_numbers
from replica.errors import ArenaError
from replica.folder import Folder, folder_name, open_arena_dir, user_folder
from replica.frames import FrameFile
from replica.procs import my_agent, myself
from replica.slot import (
    SUFFIXES,
    Slot,
    adopt_slot,
    as_arena_error,
    create_slot,
    data_name,
    leftovers,
    listed_slots,
    remove_slot_files,
)

__all__ = [
    "HELD",
    "OWN",
    "Arena",
    "ArenaView",
    "Slot",
    "SlotView",
    "clean",
    "left_over",
    "read_arenas",
]

log = logging.getLogger("planaria")

_OPEN_TRIES = 20


class Arena:
    """An open arena; ``Arena.open`` makes one. Its methods may be called from any thread.

    ``fresh``: there was nothing to adopt. ``head``: what the arena says about itself now.
    """

    def __init__(self, taken: Claim, frames: FrameFile, head: ArenaHead) -> None:
        self.head = head
        self.fresh = taken.fresh
        self.path = taken.folder.path
        self._claim = taken
        self._frames = frames
        self._slots: dict[int, Slot] = {}
        self._being_made: set[int] = set()
        self.choosing = threading.Lock()
        """Held by who looks for a slot to take or to drop, until that is done."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self.lost = ""
        """Why nobody will find this arena again, and no slot is made; empty while all is well."""

    @classmethod
    def open(
        cls,
        arena_dir: str | Path,
        *,
        job: str,
        node_id: str,
        position: int,
        rank: int,
        world: int,
        timeout_s: float,
    ) -> Arena:
        """Create the arena of this node's ``position``-th rank, or adopt the one that is there.

        The head keeps epoch, nonce, committed, restored and attempts of the former owner; rank,
        world and process are ours now. Waits up to ``timeout_s`` for an orphan to end. Raises
        ArenaBusy (a living process has it), ArenaFull, or ArenaError (links, another user's files).
        """
        me, agent = myself(), my_agent(os.environ)
        ours: dict[str, Any] = {
            "job": job,
            "node_id": node_id,
            "position": position,
            "rank": rank,
            "world": world,
            "pid": me.pid,
            "pid_start": me.start,
            "agent_pid": agent.pid if agent else 0,
            "agent_start": agent.start if agent else 0,
        }
        # Checked before anything is made: a value that no head can carry must leave nothing behind.
        blank = ArenaHead(**ours, incarnation=secrets.token_hex(16))
        try:
            taken = _claim(arena_dir, job, node_id, position, timeout_s)
            arena = cls._start(taken, blank)
        except OSError as error:
            with contextlib.suppress(OSError, ArenaError):
                prune(arena_dir, job)
            raise as_arena_error(error, str(arena_dir), 2 * MAX_HEAD_BYTES) from error
        _remove_older_siblings(arena_dir, job, node_id, position, Path(arena.path).name)
        return arena

    @classmethod
    def _start(cls, taken: Claim, blank: ArenaHead) -> Arena:
        """Make a claimed directory an arena; undone if that fails."""
        frames, arena = None, None
        try:
            head = _succeed(taken, blank)
            frames = FrameFile.create(taken.folder, HEAD, MAX_HEAD_BYTES)
            # First of all, so that who looks at the lock finds its holder in the head.
            frames.write(encode_head(head))
            arena = cls(taken, frames, head)
            arena._adopt()
        except BaseException:
            if arena is not None:
                arena._release_slots()
            if frames is not None:
                frames.close()
            if taken.fresh:
                remove_claimed(taken)
            else:
                taken.release()
            raise
        return arena

    @property
    def slots(self) -> dict[int, Slot]:
        """The slots by number; those with a record hold what it says."""
        with self._lock:
            return dict(self._slots)

    def facts(self) -> tuple[SlotFacts, ...]:
        """The slots as decisions see them, by number."""
        return tuple(slot.facts for _, slot in sorted(self.slots.items()))

    @property
    def bytes_allocated(self) -> int:
        """Sum of the slots' capacities."""
        return sum(slot.capacity for slot in self.slots.values())

    def update_head(self, **changes: Any) -> ArenaHead:
        """Replace fields of the head, for readers at once and for whoever adopts the arena."""
        with self._lock:
            self._check_open()
            head = replace(self.head, **changes)
            self._frames.write(encode_head(head))
            self.head = head
            return head

    def allocate(
        self, nbytes: int, kind: str, chunk_bytes: int = CHUNK_BYTES, *, taken: bool = False
    ) -> Slot:
        """Make a slot of exactly ``nbytes``: reserved, mapped, touched, holding nothing yet.

        ``taken``: it is so from its first moment, and nobody else chooses it.
        ``kind`` is "own" or "held"; ``chunk_bytes`` the smallest chunk that a record of it will
        have. Raises ArenaFull, which says the bytes needed and free, and leaves nothing behind.
        """
        if kind not in SUFFIXES or nbytes < 0:
            raise ValueError(
                f"slot: expected {OWN} or {HELD} and bytes >= 0, got {kind!r}, {nbytes}"
            )
        with self._lock:
            self._check_open()
            if self.lost:
                raise ArenaError(self.lost)
            number = next(n for n in count() if n not in self._slots and n not in self._being_made)
            self._being_made.add(number)
        # Not under the lock: the touch of a large slot takes seconds, and the head must stay
        # writable.
        try:
            slot = create_slot(self._claim.folder, number, kind, nbytes, chunk_bytes)
            slot.taken = taken
            with self._lock:
                self._slots[number] = slot
        finally:
            with self._lock:
                self._being_made.discard(number)
        return slot

    def drop(self, slot: Slot) -> None:
        """Give a slot's memory back: now, or when the last array or tensor over it is gone."""
        with self._lock:
            self._check_open()
            if self._slots.get(slot.number) is not slot:
                raise ArenaError(f"slot {slot.number} is not of this arena, or was dropped before")
            del self._slots[slot.number]
            slot.release()
            remove_slot_files(self._claim.folder, slot.number, slot.kind)

    def removed(self) -> list[Slot]:
        """Look whether somebody removed files that are in use here; the slots that lost theirs.

        Their memory is still there and nobody will adopt it. All of them are lost, and ``lost``
        says so, when the directory, the head or the lock is gone: so costs a look a few calls of
        ``stat``, and nothing is read.
        """
        with self._lock:
            if self._closed:
                return []
            folder, files = self._claim.folder, ((LOCK, self._claim), (HEAD, self._frames))
            gone = [name for name, file in files if not folder.leads_to(name, file.descriptor)]
            if not folder.in_place():
                gone = [""]
            if gone and not self.lost:
                self.lost = (
                    f"{self.path}{gone[0] and '/'}{gone[0]} was removed or replaced while this "
                    "process used it, so that nobody will find what is kept there: no further save "
                    "is possible. Restart the job, which makes it anew, and keep it from being "
                    "removed: `planaria clean` spares what is in use"
                )
            return [s for s in self._slots.values() if self.lost or not s.in_place(folder)]

    def close(self, *, refused: bool = False) -> None:
        """Release the lock and keep the files. A second call does nothing.

        No receive into a slot may be under way: without the lock the next owner may write there
        too. In a forked child this only closes the child's own descriptors. ``refused``: the start
        came to nothing, so that what it has made goes too, if nothing was put there yet.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ours = os.getpid() == self._pid
            # An epoch that was written is never used again, so its head stays.
            unused = ours and refused and self.fresh and not self._slots and not self.head.epoch
            if ours:
                nobody = replace(self.head, pid=0, pid_start=0, agent_pid=0, agent_start=0)
                self._frames.write(encode_head(nobody))
            self._release_slots()
            self._frames.close()
            if unused:
                remove_claimed(self._claim)
            else:
                self._claim.release()

    def _adopt(self) -> None:
        folder = self._claim.folder
        names = folder.names()
        for name in leftovers(names):
            folder.unlink(name)
        for number, kind in listed_slots(names):
            if number in self._slots:
                log.warning("%s: slot %d is there twice, one is removed", self.path, number)
                folder.unlink(data_name(number, kind))
                continue
            slot = adopt_slot(folder, number, kind, self.head.job)
            if slot is not None:
                self._slots[number] = slot

    def _release_slots(self) -> None:
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ArenaError(f"{self.path} is closed")
        if os.getpid() != self._pid:
            raise ArenaError(f"{self.path} is of pid {self._pid}, a forked child may not change it")


def _open_node(arena_dir: str | Path, job: str, node_id: str) -> Folder:
    with (
        open_arena_dir(arena_dir) as base,
        user_folder(base, create=True) as user,
        user.child(folder_name(job), create=True) as jobs,
    ):
        return jobs.child(folder_name(node_id), create=True)


def _claim(arena_dir: str | Path, job: str, node_id: str, position: int, timeout_s: float) -> Claim:
    for _ in range(_OPEN_TRIES):
        try:
            with _open_node(arena_dir, job, node_id) as node:
                taken = claim(node, position, job=job, timeout_s=timeout_s)
        except FileNotFoundError:
            continue  # a clean-up took a directory away between two steps
        if taken is not None:
            return taken
    raise ArenaError(f"{arena_dir}: the directories of job {job!r} vanish as fast as they are made")


def _succeed(taken: Claim, blank: ArenaHead) -> ArenaHead:
    """Return the head of the new owner, which keeps what the former one knew."""
    former = taken.head
    if former is None:
        return blank
    for name in ("job", "node_id", "position"):
        theirs, expected = getattr(former, name), getattr(blank, name)
        if theirs != expected:
            raise ArenaError(f"{taken.folder.path} is of {name} {theirs!r}, expected {expected!r}")
    ours = ("rank", "world", "pid", "pid_start", "agent_pid", "agent_start")
    return replace(former, **{name: getattr(blank, name) for name in ours})


def _remove_older_siblings(
    arena_dir: str | Path, job: str, node_id: str, position: int, used: str
) -> None:
    """Free what an orphan kept until it ended: its arena has counted as lost since we left it."""
    with _open_node(arena_dir, job, node_id) as node:
        for number in sibling_numbers(node.names(), position):
            name = sibling_name(position, number)
            if name == used:
                return
            if remove_arena(node, name):
                log.info("%s/%s, lost to an orphan that has ended, is removed", node.path, name)
