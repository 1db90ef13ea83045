"""Planaria's front door: ``Checkpointer`` and what it raises."""

from __future__ import annotations

from erasure.errors import PlanariaError
from recovery.errors import LayoutError
from recovery.session import RestoreAborted, RestoreHalfDone
from replica.checkpointer import Checkpointer
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
