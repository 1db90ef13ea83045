"""What a rank knows of its generations, and what follows for its memory: the state table.

A rank's view of the newest generation is one of five states. The table says what may happen in
each; every other event is a programming error and raises. What may be *reused* follows from the
state alone (rule P1): until the decision has been read, neither the slots of the new generation nor
those of the base may be touched.

              staged   held    committed   aborted
    ADMITTED  STAGED   -       -           ABORTED
    STAGED    -        HELD    -           ABORTED
    HELD      -        -       COMMITTED   ABORTED
    COMMITTED and ABORTED are final: the next generation starts anew at ADMITTED.

The base may be mended meanwhile (rule P10): a save that is admitted then waits behind that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from recovery.errors import RecoveryError
from recovery.manifest import Generation

ADMITTED, STAGED, HELD, COMMITTED, ABORTED = "admitted", "staged", "held", "committed", "aborted"

TRANSITIONS: Mapping[str, Mapping[str, str]] = {
    ADMITTED: {STAGED: STAGED, ABORTED: ABORTED},
    STAGED: {HELD: HELD, ABORTED: ABORTED},
    HELD: {COMMITTED: COMMITTED, ABORTED: ABORTED},
    COMMITTED: {},
    ABORTED: {},
}


@dataclass(frozen=True)
class Ledger:
    """What a rank knows: the base (newest generation that must be kept) and the newest attempt.

    ``kept``: an older generation that is better protected than a restored base and must be kept
    until that is mended, to ``kept_protection`` losses at least (P10). ``mending``: the base is
    being mended.
    """

    base: Generation | None = None
    current: Generation | None = None
    state: str = ABORTED
    kept: Generation | None = None
    kept_protection: int = -1
    mending: bool = False

    @property
    def decided(self) -> bool:
        """The decision of the newest attempt has been read."""
        return self.state in (COMMITTED, ABORTED)

    @property
    def idle(self) -> bool:
        """Nothing writes to the arena: no undecided attempt, no mend."""
        return self.decided and not self.mending

    @property
    def may_admit(self) -> bool:
        """A new generation may be begun (P2): nothing is undecided or has to come first."""
        return self.decided and self.kept is None

    def admit(self, generation: Generation) -> Ledger:
        if not self.may_admit:
            after = f" and {self.kept} must be kept" if self.kept else ""
            raise RecoveryError(
                f"{generation.describe()} admitted while {self.current} is {self.state}{after}"
            )
        return replace(self, current=generation, state=ADMITTED)

    def rebase(
        self, base: Generation | None, kept: Generation | None = None, kept_protection: int = -1
    ) -> Ledger:
        """After a restore: what was restored must be kept until a newer one is committed."""
        if not self.idle:
            raise RecoveryError(f"rebased on {base} while {self.current} is {self.state}")
        return replace(self, base=base, kept=kept, kept_protection=kept_protection)

    def mend(self) -> Ledger:
        """Begin to mend the base."""
        if not self.idle or self.base is None:
            raise RecoveryError(f"mend of {self.base} while {self.current} is {self.state}")
        return replace(self, mending=True)

    def mended(self, protection: int) -> Ledger:
        """The mend is over; the base now survives ``protection`` losses (-1: as before)."""
        enough = self.kept is not None and protection >= max(0, self.kept_protection)
        return replace(self, mending=False, kept=None if enough else self.kept)

    def give_up_kept(self) -> Ledger:
        """The base cannot be mended as far as that: saves go on without ``kept``."""
        return replace(self, kept=None)

    def apply(self, event: str) -> Ledger:
        """The ledger after ``event``; one that is not in the table raises and changes nothing."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise RecoveryError(f"event {event!r} in state {self.state!r} of {self.current}")
        if after == COMMITTED:
            return replace(self, base=self.current, state=after, kept=None)
        return replace(self, state=after)

    def reusable(self, generation: Generation | None) -> bool:
        """May a slot that holds ``generation`` (None: nothing) be overwritten now?"""
        if generation is None:
            return True
        if generation in (self.base, self.kept):
            return False
        return self.decided or generation != self.current
