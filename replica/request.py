"""What the training thread hands to the background thread, and what is counted there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from recovery.manifest import Generation
from replica.arena import Slot
from replica.source import Captured
from replica.ticket import Ticket

log = logging.getLogger("planaria")

FAILED_LOUD = 5
"""So many failed saves in a row are said loudly, and again whenever their number has doubled."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A staged generation, or with ``refusal`` one that this rank could not stage and aborts."""

    generation: Generation
    sequence: int
    admission_key: str
    ticket: Ticket
    slot: Slot | None
    captured: Captured | None
    """What was captured into the slot, of which some may still be copied."""
    copy_s: float
    refusal: str = ""

    @property
    def shard_bytes(self) -> int:
        """Bytes of the image in the slot."""
        return self.captured.nbytes if self.captured is not None else 0


@dataclass
class Counts:
    """Saves of this incarnation, by how they ended, and the newest failure."""

    committed: int = 0
    aborted: int = 0
    skipped: int = 0
    mended: int = 0
    damaged: int = 0
    last_error: str = ""
    failed_in_a_row: int = 0
    loud: bool = False
    """Whether this rank is the one that speaks of what concerns all."""

    def note_committed(self) -> None:
        """Count a save that was committed."""
        self.committed += 1
        self.failed_in_a_row = 0

    def note_aborted(self, step: int, reason: str, base: Generation | None) -> None:
        """Count a save that all ranks gave up."""
        self.aborted += 1
        self.note_failed(step, reason, base, loud=self.loud)

    def note_failed(self, step: int, reason: str, base: Generation | None, *, loud: bool) -> None:
        """Count a save that failed; say so when it is one of many in a row.

        Training goes on, so that nothing else may ever draw attention to it.
        """
        self.last_error = reason
        self.failed_in_a_row += 1
        count = self.failed_in_a_row
        if loud and count % FAILED_LOUD == 0 and (count // FAILED_LOUD).bit_count() == 1:
            kept = f"step {base.step} is the newest that is safe" if base else "no step is safe yet"
            log.error(
                "%d saves in a row have failed, the last one at step %d: %s. Training goes on, and "
                "%s: what comes after it would be lost with a node. See to the rank or the store "
                "that is named there, or write a checkpoint of your own and restart the job",
                count,
                step,
                reason,
                kept,
            )
