"""Making an arena's directory ours alone: its lock, and who is made to give it up.

A directory is ours while this process holds ``fcntl.lockf`` on its ``lock`` file. Such a lock is
not inherited by a fork, ends with the process, and is dropped by closing *any* descriptor of that
file in the process: so the file is opened here alone, once, and a table refuses a second claim.

A trainer that lost its launcher's agent goes on running and writing: an orphan. Who is one:

    a process of this job has the arena and ...    verdict
    it had no agent                                busy: a second job of that name
    its agent lives, and is not our parent         busy: the same
    its agent lives, and is our parent             end: the agent has replaced it by us
    its agent is gone                              end: nobody manages it any more
    its head is not written yet, or is not its own wait: look again until the deadline

A trainer with a background process has the lock by that one, which ends with it; the head names
the trainer.

One that cannot be ended keeps its directory, which counts as lost: the next sibling is used,
``<position>.1``, ``<position>.2`` and so on, always the newest that there is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import threading
import time
from dataclasses import dataclass

from recovery.errors import FormatVersionError, ManifestError
from recovery.manifest import ArenaHead, decode_head
from replica.errors import ArenaBusy
from replica.folder import Folder
from replica.frames import FrameFile
from replica.procs import Process, end, identify, my_parent, myself, whom_it_works_for

log = logging.getLogger("planaria")

LOCK, HEAD = "lock", "head"
_FLOCK = struct.Struct("@hhqqi")
_POLL_S = 0.01

END, BUSY, WAIT = "end", "busy", "wait"

_claimed: set[tuple[int, int]] = set()
_claimed_lock = threading.Lock()


def _forget_claims() -> None:
    """Start empty in a forked child: locks stay with the parent."""
    global _claimed_lock  # noqa: PLW0603 - another thread may hold it at the fork
    _claimed.clear()
    _claimed_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_claims)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A directory that is ours until ``release``; ``head`` is what its last owner wrote, if any."""

    folder: Folder
    descriptor: int
    head: ArenaHead | None
    fresh: bool
    """The directory was empty: there was nothing to adopt."""

    def release(self) -> None:
        """Give the directory back. Nobody may write through mappings of its files after this."""
        os.close(self.descriptor)
        _forget(self.folder)
        self.folder.close()


@dataclass(frozen=True)
class Verdict:
    """What to do about the process that has an arena, and why."""

    action: str
    reason: str


def judge(head: ArenaHead | None, job: str, holder: Process, parent: Process | None) -> Verdict:
    """Decide by the table above; looks up whether the holder's agent lives, and nothing else."""
    if head is None or (head.pid, head.pid_start) != (holder.pid, holder.start):
        return Verdict(WAIT, f"pid {holder.pid} has the arena's lock and has not written its head")
    if head.job != job:
        return Verdict(BUSY, f"pid {holder.pid} has this arena for another job, {head.job!r}")
    second = "a second job of this name on this host: stop it, or give this one another name"
    if not head.agent_pid:
        return Verdict(
            BUSY, f"pid {holder.pid} of job {job!r} is alive and no launcher's: {second}"
        )
    agent = Process(head.agent_pid, head.agent_start)
    if agent == parent:
        return Verdict(END, f"its agent, pid {agent.pid}, has started us in its place")
    if agent.alive:
        return Verdict(
            BUSY,
            f"pid {holder.pid} of job {job!r} is alive under its agent, pid {agent.pid}: {second}",
        )
    return Verdict(END, f"its agent, pid {agent.pid}, is gone")


def claim(node: Folder, position: int, *, job: str, timeout_s: float) -> Claim | None:
    """Claim the arena of ``position`` in a node's directory; create it where there is none.

    None when a directory vanished underneath (a clean-up ran): open anew from the top. Raises
    ArenaBusy, naming the pid, when a living process that is no orphan has it.
    """
    deadline = time.monotonic() + timeout_s
    siblings = sibling_numbers(node.names(), position)
    number = siblings[-1] if siblings else 0
    while True:
        name = sibling_name(position, number)
        taken = _claim_folder(node.child(name, create=True), job, deadline)
        if taken is None:
            log.warning(
                "%s/%s counts as lost: a process that cannot be ended has it", node.path, name
            )
            number += 1
        elif node.leads_to(name, taken.folder.descriptor) and taken.folder.leads_to(
            LOCK, taken.descriptor
        ):
            return taken
        else:
            taken.release()
            return None


def try_claim(folder: Folder) -> Claim | None:
    """Claim an arena that nobody uses, at once; None if this or another living process has it.

    Takes the folder over: it is closed with the claim, or now.
    """
    if not _remember(folder):
        folder.close()
        return None
    descriptor = -1
    try:
        descriptor = folder.file(LOCK, create=True)
        head = read_head(folder)[0]
        used = head is not None and Process(head.pid, head.pid_start).alive
        if not used and _lock(descriptor) and folder.leads_to(LOCK, descriptor):
            return Claim(folder=folder, descriptor=descriptor, head=head, fresh=False)
    except BaseException:
        _abandon(folder, descriptor)
        raise
    _abandon(folder, descriptor)
    return None


def sibling_name(position: int, number: int) -> str:
    """Return the directory name of a position's n-th arena."""
    return f"{position}.{number}" if number else str(position)


def sibling_numbers(names: list[str], position: int) -> list[int]:
    """Return the numbers of a position's arenas among directory names, rising."""
    pattern = re.compile(rf"{position}(?:\.([1-9]\d{{0,8}}))?")
    return sorted(int(match[1] or 0) for match in map(pattern.fullmatch, names) if match)


def read_head(folder: Folder) -> tuple[ArenaHead | None, str]:
    """Return (head, "") or (None, why there is none), without a lock.

    (head, what is wrong): it may not be the last, which is damaged or was never finished.
    """
    try:
        frames = FrameFile(folder.file(HEAD, write=False), f"{folder.path}/{HEAD}")
    except FileNotFoundError:
        return None, f"{folder.path} has no head"
    try:
        raw, maimed = frames.read(), frames.maimed()
    finally:
        frames.close()
    if raw is None:
        return None, f"{folder.path}/{HEAD} is damaged"
    broken = f"{folder.path}/{HEAD}: one of its two frames is damaged or was never finished"
    try:
        return decode_head(raw), broken if maimed else ""
    except FormatVersionError as error:
        return None, f"{folder.path} is skipped: {error}"
    except ManifestError as error:
        return None, f"{folder.path}/{HEAD} is not valid: {error}"


def _claim_folder(folder: Folder, job: str, deadline: float) -> Claim | None:
    """Claim one directory, taking the folder over; None if an orphan has it and cannot be ended."""
    if not _remember(folder):
        folder.close()
        raise _open_here(folder)
    descriptor = -1
    try:
        descriptor = folder.file(LOCK, create=True)
        if _await_lock(folder, descriptor, job, deadline):
            head, why = read_head(folder)
            fresh = folder.names() == [LOCK]
            if head is None and not fresh:
                log.warning("%s", why)
            return Claim(folder=folder, descriptor=descriptor, head=head, fresh=fresh)
    except BaseException:
        _abandon(folder, descriptor)
        raise
    _abandon(folder, descriptor)
    return None


def _open_here(folder: Folder) -> ArenaBusy:
    return ArenaBusy(
        f"{folder.path} is open in this process, pid {myself().pid}: close it there first"
    )


def _await_lock(folder: Folder, descriptor: int, job: str, deadline: float) -> bool:
    """Get the lock, ending an orphan that has it; False if that fails before the deadline."""
    parent = my_parent()
    while True:
        locked = _lock(descriptor)
        head = read_head(folder)[0]
        pid = 0 if locked else _holder_pid(descriptor)
        holder = _last_owner(head) if locked else _owner(identify(pid), head)
        if locked and holder is None:
            return True
        if holder is not None and holder == myself():
            raise _open_here(folder)
        verdict = _unseen(pid) if holder is None else judge(head, job, holder, parent)
        if verdict.action == BUSY:
            raise ArenaBusy(f"{folder.path}: {verdict.reason}")
        left_s = deadline - time.monotonic()
        if verdict.action == END and holder is not None:
            failure = end(holder, left_s)
            if failure:
                log.warning("%s: %s (%s)", folder.path, failure, verdict.reason)
                return False
            log.warning("%s: ended pid %d: %s", folder.path, holder.pid, verdict.reason)
        elif left_s <= 0:
            raise ArenaBusy(f"{folder.path}: {verdict.reason}, and the deadline has passed")
        else:
            time.sleep(_POLL_S)


def _last_owner(head: ArenaHead | None) -> Process | None:
    """Return the head's process if it lives and is not us: it may write, lock or no lock."""
    if head is None:
        return None
    owner = Process(head.pid, head.pid_start)
    return owner if owner.alive and owner != myself() else None


def _owner(holder: Process | None, head: ArenaHead | None) -> Process | None:
    """Return the trainer that the head names when the lock is with its background process."""
    if holder is None or head is None:
        return holder
    return whom_it_works_for(holder, Process(head.pid, head.pid_start))


def _unseen(pid: int) -> Verdict:
    who = f"pid {pid}, which is ending," if pid > 0 else "a process outside this pid namespace"
    return Verdict(WAIT, f"{who} has the arena's lock")


def _lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _holder_pid(descriptor: int) -> int:
    """Return the pid that has the lock; 0 if nobody has it, or somebody in another namespace."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else max(0, pid)


def _remember(folder: Folder) -> bool:
    """Enter a directory in this process's table; False if it is there already."""
    with _claimed_lock:
        if folder.key in _claimed:
            return False
        _claimed.add(folder.key)
        return True


def _forget(folder: Folder) -> None:
    with _claimed_lock:
        _claimed.discard(folder.key)


def _abandon(folder: Folder, descriptor: int) -> None:
    """Undo a claim that was not completed."""
    if descriptor >= 0:
        os.close(descriptor)
    _forget(folder)
    folder.close()
