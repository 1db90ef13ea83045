"""Which steps are saved: one decision of all ranks for each (rule P2)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from recovery.actions import CompareSet
from recovery.errors import RecoveryError
from recovery.ledger import Ledger


@dataclass(frozen=True)
class Admission:
    """The one decision of all ranks whether a step is saved (P2)."""

    take: bool
    sequence: int

    def encode(self) -> bytes:
        return f"{'take' if self.take else 'skip'}:{self.sequence}".encode()


def admission_key(step: int, restores: int = 0, skips: int = 0) -> str:
    """Store key of the admission of ``step``, which all ranks have skipped so many times before.

    A restore before it may have led back over it.
    """
    return f"admit/{restores}/{step}" + (f"/{skips}" if skips else "")


def propose(sequence: int, ledger: Ledger) -> Admission:
    """What the first rank to arrive proposes: take only if nothing has to come first."""
    return Admission(ledger.may_admit, sequence + 1 if ledger.may_admit else sequence)


def parse_admission(raw: bytes) -> Admission:
    """The admission that the store holds, or RecoveryError."""
    word, _, number = raw.decode("ascii", "replace").partition(":")
    if word not in ("take", "skip") or not number.isdecimal() or len(number) > 18:
        raise RecoveryError(f"admission is {raw[:64]!r}, expected take:N or skip:N")
    return Admission(word == "take", int(number))


def admit_session(
    step: int, restores: int, sequence: int, ledger: Ledger, skips: int = 0
) -> Generator[Any, Any, Admission]:
    """Ask whether ``step`` is saved; what the first rank to arrive decided."""
    mine = propose(sequence, ledger)
    raw = yield CompareSet(admission_key(step, restores, skips), mine.encode())
    return parse_admission(raw)
