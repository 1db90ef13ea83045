"""What ``save`` returns: how far one save has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from replica.changes import Changes
from replica.errors import ConfigError, SaveFailed

STAGES = ("staged", "held", "committed")


class Ticket:
    """One save.

    Its stages: "staged" (copied; the caller may change the state), "held" (my fragments are kept
    by my peers), "committed" (everybody's are).
    ``limit_s``: how long a ``wait`` without a limit of its own lasts at most.
    ``skipped``: nothing was saved at this step, and ``reason`` says why; that is no error.
    """

    def __init__(self, step: int, *, skipped: bool = False, reason: str = "") -> None:
        self.step = step
        self.skipped = skipped
        self.reason = reason
        self.limit_s = 0.0
        self._stage = -1
        self._failed = False
        self._changes = Changes()
        self._tell: Callable[[Ticket], None] | None = None

    def __repr__(self) -> str:
        with self._changes.lock:
            reached = STAGES[self._stage] if self._stage >= 0 else "admitted"
            if self.skipped or self._failed:
                reached = f"{'skipped' if self.skipped else 'failed'}: {self.reason}"
        return f"<Ticket of step {self.step}: {reached}>"

    @property
    def done(self) -> bool:
        """Committed, failed or skipped."""
        with self._changes.lock:
            return self._over()

    @property
    def failed(self) -> bool:
        """The save was given up; ``reason`` says why."""
        with self._changes.lock:
            return self._failed

    def wait(self, stage: str = "committed", timeout_s: float | None = None) -> None:
        """Return when ``stage`` is reached, or at once for a skipped save.

        ``timeout_s`` None: as long as the save may take by its deadlines, and its decision.
        Raises SaveFailed when the save was given up, TimeoutError naming the stage reached so far.
        """
        if stage not in STAGES:
            raise ConfigError(f"stage is {stage!r}, expected one of {STAGES}")
        wanted = STAGES.index(stage)
        timeout_s = self._wait_for(wanted, timeout_s)
        with self._changes.lock:
            if self._stage >= wanted or self.skipped:
                return
            if self._failed:
                raise SaveFailed(f"step {self.step} was not committed: {self.reason}")
            reached = STAGES[self._stage] if self._stage >= 0 else "admitted"
            raise TimeoutError(f"step {self.step} is {reached} after {timeout_s} s, not {stage}")

    def _wait_for(self, wanted: int, timeout_s: float | None) -> float:
        """Wait for a stage or the end; how long that may have lasted.

        The copy in a trainer learns its limit a moment after it was made.
        """
        started_s = time.monotonic()
        while True:
            limit_s = self.limit_s if timeout_s is None else timeout_s
            left_s = started_s + limit_s - time.monotonic()
            over = self._changes.wait_for(lambda: self._stage >= wanted or self._over(), left_s)
            if over or timeout_s is not None or limit_s == self.limit_s:
                return limit_s

    def advance(self, stage: str) -> None:
        """For the driver: ``stage`` is reached."""
        with self._changes.lock:
            self._stage = max(self._stage, STAGES.index(stage))
            self._changes.tell()
        self._told()

    def fail(self, reason: str) -> None:
        """For the driver: the save is given up."""
        with self._changes.lock:
            self._failed, self.reason = True, reason
            self._changes.tell()
        self._told()

    def watch(self, tell: Callable[[Ticket], None]) -> None:
        """Have ``tell`` called now and after every change, in whichever thread makes it."""
        self._tell = tell
        tell(self)

    def facts(self) -> dict[str, Any]:
        """All that it says, in plain values, for a copy of it in another process."""
        with self._changes.lock:
            names = ("step", "skipped", "reason", "limit_s")
            return {name: getattr(self, name) for name in names} | {
                "stage": self._stage,
                "failed": self._failed,
            }

    def follow(self, facts: Mapping[str, Any]) -> None:
        """Become what ``facts`` of the original say; older ones change nothing."""
        with self._changes.lock:
            if self._over():
                return
            self.skipped, self._failed = facts["skipped"] is True, facts["failed"] is True
            self.reason, self.limit_s = str(facts["reason"]), float(facts["limit_s"])
            self._stage = min(max(self._stage, int(facts["stage"])), len(STAGES) - 1)
            self._changes.tell()

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self)

    def _over(self) -> bool:
        return self.skipped or self._failed or self._stage == len(STAGES) - 1
