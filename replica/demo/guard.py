"""An audit hook that keeps a worker out of other nodes' arenas.

On one machine all nodes share one tmpfs, so a worker could read a peer's memory as a file and call
that a transfer. The hook makes such an open fail, and notes it, so that the demo can fail as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


def is_foreign(path: str, *, own: str, all_arenas: str) -> bool:
    """Say whether ``path`` (absolute) lies among the arenas of a run but not in the node's own."""
    inside = os.path.commonpath([path, all_arenas]) == all_arenas
    return inside and os.path.commonpath([path, own]) != own


def guard_arenas(own: Path, note: Callable[[str], None]) -> None:
    """Make every later open under a sibling of ``own`` raise PermissionError in this process.

    Opens through a directory's descriptor carry a relative path and pass; the directory itself had
    to be opened before, and was checked then. An audit hook cannot be removed again.

    Args:
        own: this node's arena directory, absolute and without symbolic links; its parent holds one
            directory per node.
        note: called with the path before the error is raised.
    """
    own_text, parent = str(own), str(own.parent)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100 - text: quick, runs often
        if is_foreign(path, own=own_text, all_arenas=parent):
            note(path)
            raise PermissionError(f"{path} is another node's arena; own: {own_text}")

    sys.addaudithook(hook)
