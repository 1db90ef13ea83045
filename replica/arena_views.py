"""Looking at arenas without using them, and removing those that nobody uses.

Reading takes no lock, changes nothing and follows no link; it is safe while the owner writes: heads
and records are whole or absent, and mapped data stay mapped after their owner drops them. What data
are worth is for their digests to say.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recovery.manifest import ArenaHead, SlotRecord
from replica.claim import HEAD, LOCK, Claim, read_head, try_claim
from replica.errors import ArenaError
from replica.folder import Folder, folder_name, open_arena_dir, user_folder
from replica.frames import FrameFile
from replica.procs import Process
from replica.slot import data_name, is_slot_file, listed_slots, map_file, read_record, record_name

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger("planaria")

_ARENA_NAME = re.compile(r"\d{1,9}(\.\d{1,9})?")


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotView:
    """One slot as it was found. ``data`` is uint8[capacity], read-only, shared with its owner."""

    number: int
    kind: str
    capacity: int
    record: SlotRecord | None
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class ArenaView:
    """One arena as it was found. Without a readable ``head``, ``problem`` says why."""

    path: str
    head: ArenaHead | None
    problem: str
    slots: dict[int, SlotView]
    alive: bool
    """Whether the process that opened the arena runs and has not closed it."""

    @property
    def bytes_allocated(self) -> int:
        """Sum of the slots' capacities."""
        return sum(slot.capacity for slot in self.slots.values())


def read_arenas(
    arena_dir: str | Path, job: str | None = None, node_id: str | None = None
) -> list[ArenaView]:
    """Return this user's arenas, of one job or all, one node or all, in the order of their paths.

    Raises ArenaError when arena_dir itself cannot be used. What else is amiss is logged and left
    out.
    """
    views = []
    for node, name in arena_folders(arena_dir, job, node_id):
        try:
            with node.child(name, create=False) as folder:
                view = _view(folder)
        except FileNotFoundError:
            continue  # removed since it was listed
        except ArenaError as error:
            log.warning("%s", str(error))
            continue
        if job is None or view.head is None or view.head.job == job:
            views.append(view)
    return views


def left_over(
    arena_dir: str | Path, job: str, node_id: str, *, ranks: int, position: int
) -> list[ArenaView]:
    """Return the arenas of positions that a node of ``ranks`` ranks no longer has.

    The node had more ranks once, and what they kept is as good as ever. The rank at ``position``
    answers for every ``ranks``-th of them.
    """
    return [
        view
        for view in read_arenas(arena_dir, job, node_id)
        if view.head is not None
        and view.head.position >= ranks
        and view.head.position % ranks == position
    ]


def clean(arena_dir: str | Path, job: str | None = None, *, dry_run: bool = False) -> list[str]:
    """Remove this user's arenas that no living process uses; return their paths.

    Each is locked first, so that a job that starts meanwhile either keeps it or makes a new one.
    One whose launcher's agent lives is kept: its trainer is between two incarnations and will want
    it.
    """
    removed = [
        f"{node.path}/{name}"
        for node, name in arena_folders(arena_dir, job)
        if remove_arena(node, name, dry_run=dry_run, spare_relaunched=True)
    ]
    if not dry_run:
        prune(arena_dir, job)
    return removed


def remove_arena(
    node: Folder, name: str, *, dry_run: bool = False, spare_relaunched: bool = False
) -> bool:
    """Remove one arena if no living process uses it; tell if it was, or would be (``dry_run``)."""
    try:
        taken = try_claim(node.child(name, create=False))
    except FileNotFoundError:
        return False
    except ArenaError as error:
        log.warning("%s", str(error))
        return False
    if taken is None:
        return False
    head = taken.head
    if spare_relaunched and head is not None and Process(head.agent_pid, head.agent_start).alive:
        log.warning("%s is kept: its agent, pid %d, lives", taken.folder.path, head.agent_pid)
        dry_run, spared = True, True
    else:
        spared = False
    if dry_run:
        taken.release()
    else:
        remove_claimed(taken)
        node.remove_child(name)
    return not spared


def remove_claimed(taken: Claim) -> None:
    """Unlink every file of an arena that we have, and release it. The empty directory stays.

    A file of another user's stays too: it can only have been put there by the system's hand.
    """
    for name in taken.folder.names():
        if name == HEAD or is_slot_file(name):
            try:
                taken.folder.unlink(name)
            except ArenaError as error:
                log.warning("%s", str(error))
    # Last: until here whoever opens the arena waits for our lock, and then finds its file gone.
    taken.folder.unlink(LOCK)
    taken.release()


def prune(arena_dir: str | Path, job: str | None = None) -> None:
    """Remove directories of ours that are empty; one that is in use is not."""
    with open_arena_dir(arena_dir) as base:
        try:
            with user_folder(base, create=False) as user:
                for name in _job_names(user, job):
                    _prune_job(user, name)
        except FileNotFoundError:
            return
        base.remove_child(f"planaria-{os.geteuid()}")


def _prune_job(user: Folder, name: str) -> None:
    for jobs in _children(user, [name]):
        for node in _children(jobs, jobs.names()):
            for arena in node.names():
                node.remove_child(arena)
        for node_name in jobs.names():
            jobs.remove_child(node_name)
    user.remove_child(name)


def _job_names(user: Folder, job: str | None) -> list[str]:
    return user.names() if job is None else [folder_name(job)]


def arena_folders(
    arena_dir: str | Path, job: str | None, node_id: str | None = None
) -> Iterator[tuple[Folder, str]]:
    """Yield (node's directory, name in it) of each arena; the next step closes the directory."""
    with open_arena_dir(arena_dir) as base:
        try:
            user = user_folder(base, create=False)
        except FileNotFoundError:
            return
        with user:
            for jobs in _children(user, _job_names(user, job)):
                nodes = jobs.names() if node_id is None else [folder_name(node_id)]
                for node in _children(jobs, nodes):
                    for name in filter(_ARENA_NAME.fullmatch, node.names()):
                        yield node, name


def _children(folder: Folder, names: list[str]) -> Iterator[Folder]:
    for name in names:
        try:
            child = folder.child(name, create=False)
        except FileNotFoundError:
            continue
        except ArenaError as error:
            log.warning("%s", str(error))
            continue
        with child:
            yield child


def _view(folder: Folder) -> ArenaView:
    head, problem = read_head(folder)
    if problem:
        log.warning("%s", problem)
    slots = {}
    for number, kind in listed_slots(folder.names()):
        try:
            slot = _view_slot(folder, number, kind, head.job if head else None)
        except FileNotFoundError:
            continue  # dropped since it was listed
        except ArenaError as error:
            log.warning("%s", str(error))
            continue
        if slot is not None:
            slots[number] = slot
    alive = head is not None and Process(head.pid, head.pid_start).alive
    return ArenaView(path=folder.path, head=head, problem=problem, slots=slots, alive=alive)


def _view_slot(folder: Folder, number: int, kind: str, job: str | None) -> SlotView | None:
    """Map one slot and read its record; FileNotFoundError when it was dropped meanwhile."""
    name, path = data_name(number, kind), f"{folder.path}/{record_name(number)}"
    descriptor = folder.file(name, write=False)
    try:
        info = os.fstat(descriptor)
        if info.st_blocks * 512 < info.st_size:
            return None  # reading a hole allocates it, and is a SIGBUS where there is no room
        data = map_file(descriptor, info.st_size, write=False)
        records = FrameFile(folder.file(record_name(number), write=False), path)
        try:
            record = read_record(records, data.size, job)
        finally:
            records.close()
        # The number may have been given to a new slot: its record appears after the old data went.
        if not folder.leads_to(name, descriptor):
            raise FileNotFoundError(f"{folder.path}/{name}")
    finally:
        os.close(descriptor)
    return SlotView(number=number, kind=kind, capacity=data.size, record=record, data=data)
