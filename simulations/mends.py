"""Mends, watched from outside: what is said to be protected again is (P10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recovery.manifest import Generation
from recovery.mend import DONE, MendOutcome
from simulations.truth import claims, holdings, tolerance

if TYPE_CHECKING:
    from simulations.process import Process
    from simulations.world import World


class Mends:
    """A part of the checker."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._began_s: dict[str, float] = {}
        self._judged: set[str] = set()

    def began(self, name: str) -> None:
        """A rank takes part in a mend."""
        if name not in self._judged:
            self._began_s.setdefault(name, self._world.now_s)

    def ended(self, process: Process, base: Generation, outcome: MendOutcome) -> None:
        """Done means: all of it is in place, but for what faults took meanwhile (P10)."""
        checker, debt = self._world.checker, self._world.checker.debt
        checker.counts[f"mends {outcome.state}"] += 1
        words = f"{outcome.state} {outcome.protection} {outcome.reason}"
        self._world.tell(f"{process.name} mended {base.describe()}: {words}")
        checker.promises.protection(process, base, outcome.protection)
        truth = debt.truths.get(base.id)
        if truth is None or process.group is not self._world.launcher.group:
            return  # what an orphan says is about a job that nobody is in
        if outcome.state != DONE:
            if truth is not debt.owed and debt.as_good(truth, debt.owed):
                debt.adopt(truth)
            return
        # The end of a mend is one for all ranks: it is held against what is there once.
        name = f"{process.nonce}/{process.mend_name}"
        began_s = self._began_s.pop(name, None)
        if began_s is None:
            return
        # Who comes late reads that end when other things may be true.
        self._judged.add(name)
        found = holdings(truth, self._world.everywhere())
        unseen = claims(truth, self._world.everywhere())
        for owner, items in found.items():
            # What a fault took meanwhile, and damage that nobody can see who does not read it.
            ghosts = {
                item
                for item in truth.damage.get(owner, set()) | unseen[owner]
                if debt.hit_since(truth, owner, item, began_s)
                or (item in unseen[owner] and debt.is_damage(truth, owner, item))
            }
            if tolerance(truth, items | ghosts) < truth.survives:
                checker.violation(
                    "P10",
                    f"{process.name}: {base.describe()} is said to be mended and of owner {owner} "
                    f"there is only {sorted(items)}",
                )
            truth.damage[owner] = ghosts
        if debt.owed is None or truth.generation > debt.owed.generation:
            debt.owed = truth

    def gave_up(self, process: Process, kept: Generation) -> None:
        """Mending has ended short so often that saves go on without what was kept.

        Said in the log as an error: from here on less is owed.
        """
        checker, debt = self._world.checker, self._world.checker.debt
        checker.counts["kept generations given up"] += 1
        if debt.owed is not None and debt.owed.generation == kept:
            base = process.ledger.base
            debt.adopt(debt.truths.get(base.id) if base is not None else None)

    def scrubbed(self, _: Process) -> None:
        """A damaged slot was found between saves."""
        self._world.checker.counts["slots withdrawn by scrubbing"] += 1
