"""What the library says of itself, held against the truth: protection, "nothing was changed"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recovery.manifest import Generation
from recovery.session import RestoreAborted
from simulations.truth import claims, holdings, tolerance

if TYPE_CHECKING:
    from simulations.process import Process
    from simulations.world import World


class Promises:
    """A part of the checker. ``_unchanged``: incarnations in which a rank said so, and which."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unchanged: dict[int, str] = {}
        self._changed: dict[int, str] = {}

    def protection(self, process: Process, generation: Generation | None, told: int) -> None:
        """So many nodes may be lost: never more than is true of what nobody knows as damaged."""
        world = self._world
        truth = world.checker.truths.get(generation.id) if generation is not None else None
        if truth is None or process.group is not world.launcher.group:
            return  # what an orphan says is about a job that nobody is in
        names = {node.name for node in world.launcher.nodes}
        nodes = [node for node in world.everywhere() if node.name in names]
        found, unseen = holdings(truth, nodes), claims(truth, nodes)
        for owner, items in found.items():
            lost = {item for item in truth.damage.get(owner, set()) if item[0] in names}
            most = tolerance(truth, items | unseen[owner] | lost)
            if told > most:
                world.checker.violation(
                    "protection",
                    f"{process.name} says that {told} more nodes may be lost and owner {owner} of "
                    f"{truth.generation.describe()} survives {most}",
                )

    def fully_protected(self) -> bool:
        """Whether what is owed survives all that its code can, on the nodes of the job."""
        owed = self._world.checker.owed
        if owed is None:
            return True
        names = {node.name for node in self._world.launcher.nodes}
        nodes = [node for node in self._world.everywhere() if node.name in names]
        found = holdings(owed, nodes).values()
        return all(tolerance(owed, items) >= owed.survives for items in found)

    def loaded(self, process: Process) -> None:
        """A rank changes its live state: nobody may have said that nobody does."""
        number = process.group.number
        self._changed.setdefault(number, process.name)
        self._compare(number)

    def ended(self, process: Process, error: Exception) -> None:
        """A script ends: with RestoreAborted no live object of any rank was changed (P19)."""
        if isinstance(error, RestoreAborted):
            self._unchanged.setdefault(process.group.number, process.name)
            self._compare(process.group.number)

    def _compare(self, number: int) -> None:
        if number in self._changed and number in self._unchanged:
            self._world.checker.violation(
                "P19",
                f"{self._unchanged[number]} says that nothing was changed and "
                f"{self._changed[number]} has loaded",
            )
