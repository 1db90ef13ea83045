"""Planaria's front door: ``Checkpointer`` and what it raises.

The command ``planaria`` imports this package too, and must not wait seconds for torch to look at
some files; a background process never needs the face. There ``Checkpointer`` is imported when it is
first asked for. Everywhere else that happens at once. (Late, after ``init_process_group``, would
not do: with ``DTensor`` come functions of torch's whose defaults then hold the default process
group until the interpreter's end, where its destruction ends a forked child by a segmentation
fault. Seen.)
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from erasure.errors import PlanariaError
from recovery.errors import LayoutError
from recovery.session import RestoreAborted, RestoreHalfDone
from replica.config import Options
from replica.errors import (
    ArenaBusy,
    ArenaError,
    ArenaFull,
    ConfigError,
    PeerError,
    SaveFailed,
    StateError,
    StoreError,
)
from replica.ticket import Ticket

if TYPE_CHECKING:
    from replica.checkpointer import Checkpointer

__all__ = [
    "ArenaBusy",
    "ArenaError",
    "ArenaFull",
    "Checkpointer",
    "ConfigError",
    "LayoutError",
    "Options",
    "PeerError",
    "PlanariaError",
    "RestoreAborted",
    "RestoreHalfDone",
    "SaveFailed",
    "StateError",
    "StoreError",
    "Ticket",
]

_WITHOUT_FACE = {"planaria", "planaria-background"}

# Hidden from type checkers, for whom it would make every misspelt name of this package right.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the face."""
        if name != "Checkpointer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from replica.checkpointer import Checkpointer  # noqa: PLC0415 - see the module's docstring

        globals()[name] = Checkpointer
        return Checkpointer

    def __dir__() -> list[str]:
        """Name what is exported, imported or not, and nothing that this file needs itself."""
        return [*__all__]

    if PurePath(sys.argv[0] if sys.argv else "").name not in _WITHOUT_FACE:
        __getattr__("Checkpointer")
