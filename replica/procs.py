"""Processes by identity: no pid is mistaken for its successor's; and an end with a deadline.

The kernel hands pids out again; together with the start time (clock ticks since boot, from
``/proc/PID/stat``) a pid names one process for as long as the machine runs.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_GONE_STATES = {"Z", "X", "x"}
_trainer = 0
"""Pid of the trainer that this background process works for; 0: this is no such process."""


@dataclass(frozen=True)
class Process:
    """One process of this machine since its boot."""

    pid: int
    start: int
    """Clock ticks from boot to its start."""

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return identify(self.pid) == self


def identify(pid: int) -> Process | None:
    """Return the identity of the process that has this pid now; None if it is gone or a zombie."""
    if pid <= 0:
        return None
    fields = _stat(pid)
    return None if not fields or fields[0] in _GONE_STATES else Process(pid, int(fields[19]))


def whom_it_works_for(process: Process, trainer: Process) -> Process:
    """Return ``trainer`` if ``process`` is a child of it, its background process, else itself."""
    return trainer if process.alive and _parent_of(process.pid) == trainer.pid else process


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; nothing when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The command's name stands in brackets and may itself contain brackets and blanks.
    return text[text.rindex(")") + 2 :].split()


def _parent_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def myself() -> Process:
    """Return the identity of the calling process, or of the trainer that it works for."""
    me = identify(_trainer or os.getpid())
    if me is None:
        raise ProcessLookupError(
            "this process is not in /proc: is another pid namespace mounted there?"
        )
    return me


def work_for(trainer: int) -> None:
    """Say that this process works for its parent, the trainer of this pid, and ends with it.

    From then on the trainer is who this process is to others: whoever ends it ends both.
    """
    global _trainer  # noqa: PLW0603 - one per process, for as long as it lives
    _trainer = trainer


def my_parent() -> Process | None:
    """Return the identity of the trainer's parent; None where it is outside this pid namespace."""
    return identify(_parent_of(_trainer) if _trainer else os.getppid())


def my_agent(environ: Mapping[str, str]) -> Process | None:
    """Return the launcher's agent above us: the parent if torchrun started us, else None."""
    return my_parent() if environ.get("TORCHELASTIC_RUN_ID") else None


def end(process: Process, timeout_s: float) -> str:
    """End a process of this user by SIGKILL and wait until all its threads are gone.

    Returns "" when it has ended, or had before; else the reason why not. Never touches a process
    that merely has the same pid, nor one of another user (which root could end by mistake).
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return ""
    except OSError as error:
        return f"pid {process.pid} cannot be opened: {error.strerror}"
    try:
        # Checked after the descriptor is had: from here on it can name no other process.
        if not process.alive:
            return ""
        if _user_of(process.pid) not in (os.geteuid(), None):
            return f"pid {process.pid} belongs to another user"
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return _await_end(descriptor, process.pid, timeout_s)
    except ProcessLookupError:
        return ""
    except PermissionError as error:
        return f"pid {process.pid} cannot be ended: {error.strerror}"
    finally:
        os.close(descriptor)


def _await_end(descriptor: int, pid: int, timeout_s: float) -> str:
    waiter = select.poll()
    waiter.register(descriptor, select.POLLIN)
    if waiter.poll(max(0.0, timeout_s) * 1000):
        return ""
    return f"pid {pid} still runs {timeout_s:.1f} s after SIGKILL"


def _user_of(pid: int) -> int | None:
    """Return the real user id of a process, None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    uid = next(line for line in lines.splitlines() if line.startswith("Uid:"))
    return int(uid.split()[1])
