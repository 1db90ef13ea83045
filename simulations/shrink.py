"""From a failing run to a small one that fails in the same way."""

from __future__ import annotations

import time
from dataclasses import replace

from simulations.config import Config, Fault
from simulations.runs import PASS, Result, run

SHRINK_S = 60.0
SUFFIXES = (1, 2, 3, 5, 8, 13)
SEEDS = 24
"""With another seed the same few faults meet other moments: so many are tried."""
CALM_SETTINGS = ("skewed", "store_on_rank0", "grow_at", "interval", "ranks_per_node")
DETAILS = ("after_s", "other", "by_s", "amount", "nth", "for_s", "rank", "node")


class Shrinker:
    """``best`` is the smallest run so far that breaks the same rule, ``found`` what came of it."""

    def __init__(self, config: Config, result: Result, limit_s: float) -> None:
        self.best, self.found = config, result
        self._rule = rule_of(result)
        self._ends_s = time.monotonic() + limit_s

    @property
    def over(self) -> bool:
        return time.monotonic() > self._ends_s

    def try_one(self, candidate: Config) -> bool:
        """Keep a candidate that fails in the same way."""
        if self.over or candidate == self.best:
            return False
        outcome = run(candidate)
        if rule_of(outcome) != self._rule:
            return False
        self.best, self.found = candidate, outcome
        return True

    def cut_front(self) -> None:
        """The last faults alone, from a few other seeds too."""
        config = self.best
        for size in SUFFIXES:
            for seed in range(config.seed, config.seed + SEEDS):
                faults = config.faults[-size:]
                if size < len(config.faults) and self.try_one(
                    replace(config, seed=seed, faults=faults)
                ):
                    return

    def remove(self) -> None:
        """Leave out runs of faults, then single ones."""
        size = max(1, len(self.best.faults) // 2)
        while size and not self.over:
            start = 0
            while start < len(self.best.faults):
                faults = self.best.faults
                kept = faults[:start] + faults[start + size :]
                if not self.try_one(replace(self.best, faults=kept)):
                    start += size
            size //= 2

    def simplify(self) -> None:
        """Set what does not matter back to its default."""
        for name in CALM_SETTINGS:
            self.try_one(replace(self.best, **{name: getattr(Config(seed=0), name)}))
        for index in range(len(self.best.faults)):
            for name in DETAILS:
                faults = list(self.best.faults)
                faults[index] = replace(faults[index], **{name: getattr(Fault(kind=""), name)})
                self.try_one(replace(self.best, faults=tuple(faults)))


def shrink(config: Config, result: Result, limit_s: float = SHRINK_S) -> tuple[Config, Result]:
    """A smaller run that breaks the same rule, and what came of it."""
    shrinker = Shrinker(config, result, limit_s)
    shrinker.try_one(replace(config, faults=config.faults[: result.last_fault]))
    shrinker.cut_front()
    shrinker.remove()
    shrinker.simplify()
    return shrinker.best, shrinker.found


def rule_of(result: Result) -> str:
    """The rule that was broken first; "?" for a run that came to no verdict."""
    if result.violation:
        return result.violation.rule
    return "" if result.verdict == PASS else "?"
