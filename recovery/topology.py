"""Which ranks live on which node.

A node is lost as a whole, so it is the failure domain. Nodes are named by their ids and ordered by
their lowest rank; ids are never compared to find an order, since a replacement brings a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recovery.errors import LayoutError


@dataclass(frozen=True)
class Topology:
    """``node_of_rank[r]`` is the id of the node that rank r runs on."""

    node_of_rank: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.node_of_rank:
            raise LayoutError("a topology needs at least one rank")

    @property
    def world(self) -> int:
        return len(self.node_of_rank)

    @cached_property
    def ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each node in rising order; nodes in the order of their lowest rank."""
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.node_of_rank):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.ranks_by_node)

    def position(self, rank: int) -> int:
        """Place of ``rank`` among the ranks of its node; an arena is keyed by it."""
        return self.ranks_by_node[self.node_of_rank[rank]].index(rank)

    def same_node(self, a: int, b: int) -> bool:
        return self.node_of_rank[a] == self.node_of_rank[b]

    def describe(self) -> str:
        parts = [f"{node}: ranks {list(ranks)}" for node, ranks in self.ranks_by_node.items()]
        return f"{self.world} ranks on {len(self.nodes)} nodes ({'; '.join(parts)})"
