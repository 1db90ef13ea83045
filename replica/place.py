"""Where the work behind ``save`` runs, when the caller leaves that open.

In a process of its own wherever one can be had: it neither waits for the lock of the trainer's
interpreter nor makes the training wait for it (``docs/performance.md`` has the figures).
"""

from __future__ import annotations

import logging
import os

from replica.config import Options
from replica.group import Group, MemoryGroup, TorchGroup

log = logging.getLogger("planaria")


def background_of(options: Options, group: Group) -> str:
    """What was chosen, "thread" or "process", or else the better of those that work here."""
    if options.background != "auto":
        return options.background
    why = _no_process(group)
    if not why:
        return "process"
    log.info("the work behind save runs on a thread of rank %d's trainer: %s", group.rank, why)
    return "thread"


def _no_process(group: Group) -> str:
    """Why there can be no process beside a rank of this group; empty where there can."""
    alone = isinstance(group, MemoryGroup) and group.world == 1
    if not alone and not (isinstance(group, TorchGroup) and group.store_address() is not None):
        return "its process group has no TCPStore, which a second process could reach"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"this system cannot watch a process by a descriptor ({error})"
    return ""
