"""What rank 0 writes once for all ranks: from equal bytes every rank makes the same plan (P18)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recovery.errors import RecoveryError, Unrecoverable
from recovery.inventory import (
    Choice,
    Holding,
    Inventory,
    Report,
    choose,
    encode_report,
    merge_reports,
    reports_from,
    without,
)
from recovery.manifest import Generation
from recovery.plan import Rejected, RestorePlan, make_plan, protection
from recovery.topology import Topology
from recovery.tree import dump, load, name_ranks


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
        odd = sorted({h.rank for h in self.inventory.holdings if h.rank >= topology.world})
        if odd:
            raise RecoveryError(
                f"the frozen inventory names {name_ranks(odd)} of {topology.world} ranks"
            )
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
        reason = "; ".join([choice.reason, *notes])
        choice = replace(choice, reason=reason, **_kept(inventory, choice, topology))
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


def _kept(inventory: Inventory, choice: Choice, topology: Topology) -> dict[str, Any]:
    """The older generation that survives most losses, if more than the chosen one; the newest such.

    Not just the next older one: an attempt in between, that few losses would end, must not cost it.
    """
    chosen = choice.generation
    if chosen is None or choice.world != topology.world:
        return {}
    ours = protection(inventory, chosen, topology)
    known = {h.generation for h in inventory.holdings if h.world == topology.world}
    older = [g for g in known if g < chosen and g.id not in inventory.failures]
    theirs, best = max(
        ((protection(inventory, g, topology), g) for g in older), default=(-1, chosen)
    )
    return {"kept": best, "kept_protection": theirs} if theirs > ours else {}


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
            "generation": _plain(generation),
            "kept": _plain(frozen.choice.kept),
            "kept_protection": frozen.choice.kept_protection,
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
        inventory = merge_reports(reports_from(body["reports"]))
        generation, kept = (
            Generation(*body[name]) if body[name] else None for name in ("generation", "kept")
        )
        lost = {int(owner): str(cause) for owner, cause in body["lost"]}
        told = (int(body["world"]), str(body["reason"]), lost)
        choice = Choice(generation, *told, kept, int(body["kept_protection"]))
        rejected = frozenset((owner, tuple(fragments)) for owner, fragments in body["rejected"])
    # An infinite number is an OverflowError.
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecoveryError(f"the frozen inventory is not valid: {error!r}") from error
    return Frozen(inventory, choice, rejected)


def _plain(generation: Generation | None) -> list[Any] | None:
    return None if generation is None else [generation.epoch, generation.step, generation.id]
