"""What is owed: the generation that the next restore must at least bring, and what it has lost.

Faults take items of generations; what nobody else may do is take more. ``Truth.damage`` says what
faults took since a generation was last fully protected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recovery.manifest import Generation, SlotRecord
from simulations.truth import WHOLE, Item, Truth, claims, holdings, sealed_slots, tolerance

if TYPE_CHECKING:
    from simulations.memory import Node, Slot
    from simulations.world import World


class Debt:
    """The truths by generation id, and which of them is ``owed``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.truths: dict[str, Truth] = {}
        self.owed: Truth | None = None
        self.started_s = 0.0
        """When the present incarnation began."""
        self._damaged_at: dict[tuple[str, int, str, int], float] = {}

    def slot_hit(self, node: Node, slot: Slot) -> None:
        """A fault takes what a slot holds."""
        if slot.record is not None:
            self.item_hit(node, slot.record)

    def item_hit(self, node: Node, record: SlotRecord) -> None:
        """The same, by what the slot's record says."""
        truth = self.truths.get(record.generation.id)
        if truth is None:
            return
        item = (node.name, record.fragment)
        truth.hit(record.owner, item)
        self._damaged_at[truth.generation.id, record.owner, *item] = self._world.now_s
        if truth is self.owed:
            self._world.checker.full_commits = 0

    def node_hit(self, node: Node) -> None:
        """A fault takes a node."""
        for _, _, slot in sealed_slots([node]):
            self.slot_hit(node, slot)

    def affordable(self, node: Node, owner: int | None = None) -> bool:
        """Whether what is owed survives the loss of a node, or of one owner's items on it."""
        owed = self.owed
        if owed is None:
            return True
        here = {node.name, *(gone.name for gone in self.away())}
        for one, items in holdings(owed, self._world.everywhere()).items():
            if owner is not None and one != owner:
                continue
            lost = {name for name, _ in items if name in here} | owed.nodes_hit(one)
            if len(lost) > owed.survives:
                return False
        return True

    def as_good(self, truth: Truth, owed: Truth | None) -> bool:
        """Whether what was restored survives as much as what was owed (P10)."""
        if owed is None:
            return True
        nodes = self._world.launcher.nodes
        # Damage that came after the inventory, or that nobody sees who does not read it, is no
        # reason to keep the older one.
        since_s = self.started_s
        unseen = {
            owner: {item for item in items if self.is_damage(truth, owner, item)}
            | {
                i
                for i in truth.damage.get(owner, set())
                if self.hit_since(truth, owner, i, since_s)
            }
            for owner, items in claims(truth, nodes).items()
        }
        mine = min(
            tolerance(truth, items | unseen[owner])
            for owner, items in holdings(truth, nodes).items()
        )
        # More than was promised, by copies that happen to lie about, need not be kept.
        theirs = min(
            min(tolerance(owed, items), owed.survives - len(self._nodes_lost(owed, owner)))
            for owner, items in holdings(owed, nodes).items()
        )
        return mine >= theirs

    def is_damage(self, truth: Truth, owner: int, item: Item) -> bool:
        """Whether a fault has been at an item of a generation."""
        return (truth.generation.id, owner, *item) in self._damaged_at

    def hit_since(self, truth: Truth, owner: int, item: Item, since_s: float) -> bool:
        """Whether a fault has been at it since then."""
        return self._damaged_at.get((truth.generation.id, owner, *item), -1.0) >= since_s

    def adopt(self, truth: Truth | None) -> None:
        """From now on this is owed, as far as it is protected now."""
        self.owed = truth
        if truth is None:
            return
        found = holdings(truth, self._world.launcher.nodes)
        for owner, items in found.items():
            missing = max(0, truth.survives - tolerance(truth, items))
            truth.damage[owner] = self._newest_damage(truth, owner, missing, items)

    def _newest_damage(self, truth: Truth, owner: int, nodes: int, there: set[Item]) -> set[Item]:
        """What faults took last from so many nodes; what else is missing was never there.

        A node that has something, regrown since, is none of them: its loss is still to come.
        """
        kept: set[Item] = set()
        names = {name for name, _ in there}
        known = sorted(
            (item for item in truth.damage.get(owner, set()) if item[0] not in names),
            key=lambda item: (
                self._damaged_at.get((truth.generation.id, owner, *item), 0.0),
                item,
            ),
        )
        for item in reversed(known):
            if len({name for name, _ in kept | {item}}) <= nodes:
                kept.add(item)
        have = len({name for name, _ in kept})
        return kept | {(f"never-{n}", WHOLE) for n in range(nodes - have)}

    def excused(self, owed: Truth) -> bool:
        """Whether faults took more than the code can lose, nodes that are away included."""
        return any(
            len(self._nodes_lost(owed, owner)) > owed.survives for owner in range(owed.world)
        )

    def _nodes_lost(self, truth: Truth, owner: int) -> set[str]:
        """Nodes with something of an owner that faults took, or that cannot be used now."""
        away = {node.name for node in self.away()}
        items = holdings(truth, self._world.everywhere())[owner]
        return truth.nodes_hit(owner) | {name for name, _ in items if name in away}

    def away(self) -> list[Node]:
        """Nodes that live, and that the job cannot use."""
        launcher = self._world.launcher
        gone = [node for node in launcher.spares if node.alive]
        return gone + [
            node
            for node in launcher.nodes
            if node.name in launcher.leaving or (node.alive and node.partitioned)
        ]

    def failed_to_load(self, generation: Generation) -> bool:
        """Whether the script itself failed at a generation twice: it is passed over (P19)."""
        return any(
            identity == generation.id and count >= 2
            for node in self._world.everywhere()
            for arena in node.arenas.values()
            for identity, _, count in arena.head.attempts
        )
