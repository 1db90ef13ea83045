"""What rank 0 writes once for all ranks: from equal bytes every rank makes the same plan (P18)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recovery.errors import RecoveryError, Unrecoverable
from recovery.inventory import (
    Choice,
    Holding,
    Inventory,
    Report,
    choose,
    decode_reports,
    encode_report,
    merge_reports,
    without,
)
from recovery.manifest import Generation
from recovery.plan import Rejected, RestorePlan, make_plan
from recovery.topology import Topology
from recovery.tree import dump, load


@dataclass(frozen=True)
class Frozen:
    """What rank 0 wrote: the chosen generation's holdings; sets that decode to a wrong shard."""

    inventory: Inventory
    choice: Choice
    rejected: Rejected = frozenset()

    def plan(self, topology: Topology) -> RestorePlan | None:
        generation = self.choice.generation
        if generation is None or self.choice.world != topology.world:
            return None
        return make_plan(self.inventory, generation, topology, self.rejected)


def freeze(
    inventory: Inventory,
    topology: Topology,
    rejected: Mapping[Generation, Rejected] | None = None,
) -> Frozen:
    """The newest generation that a plan exists for, with only its own holdings kept.

    ``rejected``: sets that decoded to a wrong shard, by generation: they say nothing of any other.
    """
    notes: list[str] = []
    while True:
        choice = choose(inventory)
        own = tuple(h for h in inventory.holdings if h.generation == choice.generation)
        if notes:
            reason = f"{choice.reason}; {'; '.join(notes)}"
            choice = Choice(choice.generation, choice.world, reason, choice.lost)
        kept = Inventory(own, inventory.committed, inventory.failures)
        sets = (rejected or {}).get(choice.generation) if choice.generation else None
        frozen = Frozen(kept, choice, sets or frozenset())
        try:
            frozen.plan(topology)
        except Unrecoverable as error:
            notes.append(str(error))
            inventory = without(inventory, own)
        else:
            return frozen


def encode_frozen(frozen: Frozen) -> bytes:
    """What the store carries; what was committed and what failed to load is in the reason."""
    by_rank: dict[int, list[Holding]] = {}
    for holding in frozen.inventory.holdings:
        by_rank.setdefault(holding.rank, []).append(holding)
    reports = [encode_report(Report(rank, tuple(held))) for rank, held in sorted(by_rank.items())]
    generation = frozen.choice.generation
    return dump(
        {
            "reports": reports,
            "generation": [generation.epoch, generation.step, generation.id]
            if generation
            else None,
            "world": frozen.choice.world,
            "reason": frozen.choice.reason,
            "lost": sorted(frozen.choice.lost.items()),
            "rejected": sorted([owner, list(fragments)] for owner, fragments in frozen.rejected),
        }
    )


def decode_frozen(raw: bytes) -> Frozen:
    """What rank 0 wrote, or RecoveryError."""
    body = load(raw, "the frozen inventory")
    try:
        inventory = merge_reports(decode_reports(dump(body["reports"])))
        generation = Generation(*body["generation"]) if body["generation"] else None
        lost = {int(owner): str(cause) for owner, cause in body["lost"]}
        choice = Choice(generation, int(body["world"]), str(body["reason"]), lost)
        rejected = frozenset((owner, tuple(fragments)) for owner, fragments in body["rejected"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecoveryError(f"the frozen inventory is not valid: {error}") from error
    return Frozen(inventory, choice, rejected)
