"""When a rank has the base mended: why, under which name, and how often it tries (rule P10)."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.mend import DONE, FAILED, GIVEN_UP, PART, MendOutcome, mend_name, parse_name

FAILURES_MAX = 8
"""So often in a row mending is tried before the next save; each time after a longer pause."""
KEPT_ATTEMPTS = 3
"""So many mends may end short before an older generation that was kept meanwhile is given up."""


@dataclass
class MendAgenda:
    """Whether a mend is due, and the parts of the next one's name.

    ``due``: why this rank calls for one, or "". ``failures``: how many in a row came to nothing.
    """

    due: str = ""
    restores: int = 0
    sequence: int = 0
    attempt: int = 0
    failures: int = 0
    not_before_s: float = 0.0

    @property
    def name(self) -> str:
        """Name of the next mend: the same on all ranks."""
        return mend_name(self.restores, self.sequence, self.attempt)

    def after(self, why: str, *, restores: int | None = None, sequence: int | None = None) -> None:
        """A restore or a save has ended: names count from there, ``why`` says whether to mend."""
        self.restores = self.restores if restores is None else restores
        self.sequence = max(self.sequence, sequence or 0)
        self.due, self.attempt, self.failures, self.not_before_s = why, 0, 0, 0.0

    def call(self, why: str) -> None:
        """This rank wants the base mended."""
        self.due = self.due or why

    def missed(self, raw: bytes) -> str:
        """The name that was called, if it is of a mend that this rank has not been in; else "".

        Raises RecoveryError for what is no name.
        """
        called = parse_name(raw)
        if called[0] != self.restores or called < (self.restores, self.sequence, self.attempt):
            return ""
        return mend_name(*called)

    def join(self, name: str) -> None:
        """Take part in the mend of this name: a rank that missed a save counts from below."""
        _, self.sequence, self.attempt = parse_name(name.encode())

    def wants(self, now_s: float, *, kept: bool) -> str:
        """Why this rank is to begin a mend now, or "".

        ``kept``: an older generation is kept, so no save comes that could make mending needless.
        """
        if self.due and (self.failures < FAILURES_MAX or kept) and now_s >= self.not_before_s:
            return self.due
        return ""

    def ended(self, outcome: MendOutcome, now_s: float, timeout_s: float) -> None:
        """Remember how it ended: the next attempt comes after a pause, or not at all."""
        self.attempt += 1
        if outcome.state == DONE:
            self.due, self.failures = "", 0
        elif outcome.state != GIVEN_UP:
            self.failures += 1
            self.not_before_s = now_s + timeout_s * min(self.failures, FAILURES_MAX)

    def is_last(self, outcome: MendOutcome) -> bool:
        """Whether mending has ended short so often that saves must not wait for it any longer.

        The same on all ranks: the count is in the name, the end is one for all. A save that misses
        a rank cannot be committed, so while one is lost nothing is given up for it.
        """
        short = outcome.agreed and outcome.state in (PART, FAILED)
        return short and self.attempt >= KEPT_ATTEMPTS
