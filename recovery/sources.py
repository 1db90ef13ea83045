"""What rank 0 knows of the sources of one restore: what is damaged, and what only did not come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.errors import RecoveryError
from recovery.frozen import Frozen, freeze
from recovery.inventory import Holding, Inventory, without
from recovery.manifest import Generation
from recovery.plan import Rejected, RestorePlan
from recovery.topology import Topology
from recovery.tree import name_ranks
from recovery.vote import Named, Verdict

SILENCES_MAX = 2
"""So often sources are asked again whose bytes are there and only did not come."""


@dataclass(frozen=True)
class Sources:
    """``inventory``: all that is not damaged. ``silent``: those of it whose bytes did not come.

    Bytes that did not come are not lost. Silent sources are left out while the same generation can
    be had without them, and asked again as soon as, without them, there is only an older one: that
    would be the new base (P18). ``give_up``: why all ranks must give up, or "".
    """

    inventory: Inventory
    topology: Topology
    rejected: Mapping[Generation, Rejected]
    silent: frozenset[Holding] = frozenset()
    silences: int = 0
    give_up: str = ""

    def freeze(self) -> Frozen:
        """What the next attempt starts from."""
        return self._freeze(without(self.inventory, self.silent))

    def after(self, plan: RestorePlan, before: Rejected, verdict: Verdict) -> Sources:
        """After an attempt with ``plan``; ``before``: the sets that it knew to decode wrong."""
        try:
            left = without(self.inventory, _named(self.inventory, plan, verdict.bad))
            silent = self.silent | set(_named(left, plan, verdict.silent))
        except RecoveryError as error:
            # Only rank 0 knows; raised here alone, the others would wait for its next word.
            return Sources(self.inventory, self.topology, self.rejected, give_up=str(error))
        rejected = {**self.rejected, plan.generation: before | verdict.wrong}
        silent &= set(left.holdings)
        found = Sources(left, self.topology, rejected, silent, self.silences)
        ours, best = found.freeze().choice.generation, found._freeze(left).choice.generation
        if ours == best or best is None:
            return found
        again = Sources(left, self.topology, rejected, frozenset(), self.silences + 1)
        return again if again.silences <= SILENCES_MAX else again._mute(best, silent)

    def _freeze(self, inventory: Inventory) -> Frozen:
        return freeze(inventory, self.topology, self.rejected)

    def _mute(self, generation: Generation, silent: frozenset[Holding]) -> Sources:
        names = name_ranks(sorted({h.rank for h in silent if h.generation == generation}))
        text = (
            f"{generation.describe()} is there, but its bytes did not come from {names}; "
            "to go back behind it would lose it, so start again"
        )
        return Sources(self.inventory, self.topology, self.rejected, give_up=text)


def _named(inventory: Inventory, plan: RestorePlan, reads: Sequence[Named]) -> list[Holding]:
    names = set(reads)
    found = [
        h
        for h in inventory.holdings
        if h.generation == plan.generation and (h.owner, h.fragment, h.rank) in names
    ]
    if len(found) < len(names):
        raise RecoveryError(f"vote names {sorted(names)}, which the inventory does not hold")
    return found
