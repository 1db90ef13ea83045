"""Layouts: the rule that turns owners into stripes and fragments into holders.

Every layout is a set of stripes. A stripe has k data fragments and m parity fragments, each kept by
one holder; any k distinct ones give the owner's shard back. The owner keeps its whole shard
besides, so an owner is lost only when its own node *and* m + 1 holders' nodes die: m + 1 nodes may
be lost.

    copies:r     k = 1, m = r - 1: every fragment is a whole copy
    stripe:k+m   fragments of ceil(S / k) bytes

Groups are made of nodes, k + m + 1 or more each (rule P20): owner on node x of a group of s nodes,
fragment i on node x + 1 + i (mod s), at the rank of that node which is planned to hold the fewest
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from erasure.code import MAX_FRAGMENTS, Code
from erasure.errors import CodeError
from recovery.errors import LayoutError
from recovery.topology import Topology

AUTO_MAX_K = 6


@dataclass(frozen=True)
class Redundancy:
    """``copies:r``, ``stripe:k+m`` or ``none``: n fragments of a code beside the own copy."""

    kind: str
    k: int
    m: int

    @property
    def code(self) -> Code:
        return Code(self.k, self.m)

    @property
    def n(self) -> int:
        return 0 if self.kind == "none" else self.k + self.m

    @property
    def nodes_needed(self) -> int:
        return self.n + 1

    @property
    def survivable_nodes(self) -> int:
        """How many nodes may be lost at one instant."""
        return 0 if self.kind == "none" else self.m + 1

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        return f"copies:{self.n}" if self.kind == "copies" else f"stripe:{self.k}+{self.m}"


NONE = Redundancy("none", 1, 0)


def parse_redundancy(text: str, nodes: int) -> Redundancy:
    """The redundancy named by ``text`` for a job of ``nodes`` nodes.

    ``text`` is "auto", "none", "copies:r" or "stripe:k+m".
    "auto": one node -> none; two -> copies:1; more -> stripe:k+1 with k = min(6, nodes - 2), which
    survives two losses.
    Raises LayoutError for text of another form, a code out of range, or too few nodes.
    """
    found = _auto(nodes) if text == "auto" else _parse(text)
    if found.kind != "none" and nodes < found.nodes_needed:
        puts = "1 fragment on 1 node" if found.n == 1 else f"{found.n} fragments on {found.n} nodes"
        raise LayoutError(
            f"redundancy {text!r} puts {puts} other than the owner's and so needs "
            f"{found.nodes_needed} nodes, but this job has {nodes}; "
            f"use {str(_auto(nodes))!r}, which they can carry, or add nodes"
        )
    return found


def _auto(nodes: int) -> Redundancy:
    if nodes <= 1:
        return NONE
    if nodes == 2:
        return Redundancy("copies", 1, 0)
    return Redundancy("stripe", min(AUTO_MAX_K, nodes - 2), 1)


def _parse(text: str) -> Redundancy:
    if text == "none":
        return NONE
    copies = re.fullmatch(r"copies:([0-9]{1,3})", text)
    stripe = re.fullmatch(r"stripe:([0-9]{1,3})\+([0-9]{1,3})", text)
    if copies:
        r = int(copies[1])
        if not 1 <= r <= MAX_FRAGMENTS:
            raise LayoutError(
                f"redundancy {text!r}: expected copies:r with r from 1 to {MAX_FRAGMENTS}, "
                "or 'none' for no copies on other nodes"
            )
        return Redundancy("copies", 1, r - 1)
    if stripe:
        k, m = int(stripe[1]), int(stripe[2])
        try:
            Code(k, m)
        except CodeError as error:
            raise LayoutError(f"redundancy {text!r}: {error}") from error
        return Redundancy("stripe", k, m)
    raise LayoutError(f"redundancy {text!r} is not one of 'auto', 'none', 'copies:r', 'stripe:k+m'")


@dataclass(frozen=True, order=True)
class Fragment:
    """Fragment ``index`` (below k data, else parity) of ``owner``'s shard, kept by ``holder``."""

    owner: int
    index: int
    holder: int


@dataclass(frozen=True)
class Stripe:
    """The fragments of one owner and the rank that does the arithmetic (here always the owner)."""

    owner: int
    code: Code
    fragments: tuple[Fragment, ...]
    encoder: int


@dataclass(frozen=True)
class Layout:
    """Every stripe of a job. Frozen, sorted by owner, printable."""

    redundancy: Redundancy
    topology: Topology
    groups: tuple[tuple[str, ...], ...]
    stripes: tuple[Stripe, ...]

    def sent_by(self, rank: int) -> tuple[Fragment, ...]:
        """Fragments that ``rank`` sends, by index."""
        return self.stripes[rank].fragments

    @cached_property
    def _held(self) -> dict[int, tuple[Fragment, ...]]:
        found: dict[int, list[Fragment]] = {rank: [] for rank in range(self.topology.world)}
        for stripe in self.stripes:
            for fragment in stripe.fragments:
                found[fragment.holder].append(fragment)
        return {rank: tuple(sorted(held)) for rank, held in found.items()}

    def held_by(self, rank: int) -> tuple[Fragment, ...]:
        """Fragments that ``rank`` keeps for others, by (owner, index)."""
        return self._held[rank]

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Ranks that ``rank`` exchanges bytes with in a save, sorted."""
        to = {fragment.holder for fragment in self.sent_by(rank)}
        return tuple(sorted(to | {fragment.owner for fragment in self.held_by(rank)}))

    def group_of(self, rank: int) -> int:
        """Number of the coding group that ``rank`` is in."""
        node = self.topology.node_of_rank[rank]
        return next(number for number, group in enumerate(self.groups) if node in group)

    def ranks_of_group(self, number: int) -> tuple[int, ...]:
        """Ranks of a coding group, rising."""
        by_node = self.topology.ranks_by_node
        return tuple(sorted(rank for node in self.groups[number] for rank in by_node[node]))

    def arena_bytes(self, rank: int, sizes: Sequence[int]) -> int:
        """Arena bytes of ``rank`` for two generations; ``sizes[owner]`` are shard bytes."""
        code = self.redundancy.code
        held = sum(code.length(f.index, sizes[f.owner]) for f in self.held_by(rank))
        return 2 * (sizes[rank] + held)

    def describe(self) -> str:
        lines = [f"{self.redundancy} on {self.topology.describe()}"]
        for stripe in self.stripes:
            holders = ", ".join(f"{f.index}->{f.holder}" for f in stripe.fragments)
            lines.append(f"owner {stripe.owner}: {holders or 'own copy only'}")
        return "\n".join(lines)


def make_groups(nodes: Sequence[str], size_min: int) -> tuple[tuple[str, ...], ...]:
    """``nodes`` cut into as many runs of ``size_min`` or more as can be, the remainder spread."""
    count = max(1, len(nodes) // size_min)
    base, extra = divmod(len(nodes), count)
    groups, start = [], 0
    for index in range(count):
        stop = start + base + (index < extra)
        groups.append(tuple(nodes[start:stop]))
        start = stop
    return tuple(groups)


def make_layout(redundancy: Redundancy, topology: Topology, sizes: Sequence[int]) -> Layout:
    """Place every fragment. ``sizes[owner]``: planned shard bytes, which balance a node's ranks."""
    if len(sizes) != topology.world:
        raise LayoutError(f"{len(sizes)} sizes for {topology.world} ranks")
    if redundancy.n and len(topology.nodes) < redundancy.nodes_needed:
        raise LayoutError(
            f"{redundancy} needs {redundancy.nodes_needed} nodes, got {len(topology.nodes)}"
        )
    code, groups = redundancy.code, make_groups(topology.nodes, redundancy.nodes_needed)
    load = [0] * topology.world
    stripes: dict[int, Stripe] = {}
    for group in groups:
        for place, node in enumerate(group):
            for owner in topology.ranks_by_node[node]:
                fragments = []
                for index in range(redundancy.n):
                    target = topology.ranks_by_node[group[(place + 1 + index) % len(group)]]
                    holder = min(target, key=lambda rank: (load[rank], rank))
                    load[holder] += code.length(index, sizes[owner])
                    fragments.append(Fragment(owner, index, holder))
                stripes[owner] = Stripe(owner, code, tuple(fragments), encoder=owner)
    return Layout(
        redundancy, topology, groups, tuple(stripes[rank] for rank in range(topology.world))
    )
