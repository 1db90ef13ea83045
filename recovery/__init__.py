"""Pure decisions of Planaria: layouts, records, inventories, plans, commit and restore sessions.

Nothing here touches memory, network, disk, clock or environment.
"""

from __future__ import annotations

from recovery.errors import (
    FormatVersionError,
    LayoutError,
    ManifestError,
    RecoveryError,
    Unrecoverable,
)
from recovery.inventory import Choice, Holding, Inventory, Report, choose
from recovery.layout import Layout, Redundancy, make_layout, parse_redundancy
from recovery.manifest import ArenaHead, Generation, SlotRecord
from recovery.plan import Read, Rebuild, RestorePlan, make_plan, protection
from recovery.topology import Topology

__all__ = [
    "ArenaHead",
    "Choice",
    "FormatVersionError",
    "Generation",
    "Holding",
    "Inventory",
    "Layout",
    "LayoutError",
    "ManifestError",
    "Read",
    "Rebuild",
    "RecoveryError",
    "Redundancy",
    "Report",
    "RestorePlan",
    "SlotRecord",
    "Topology",
    "Unrecoverable",
    "choose",
    "make_layout",
    "make_plan",
    "parse_redundancy",
    "protection",
]
