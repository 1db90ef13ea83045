"""The cases of the kill matrix: which rank fails where, how, and what is left of its node.

The full product of layouts, roles, phases, faults and arenas would take hours. So for every phase
each (role, fault, arena) stands once, and the layouts rotate beneath them, so that every phase
meets every layout, and every layout every role with either arena. ``test_cases.py`` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import cycle, product

from recovery.layout import Layout, make_layout, parse_redundancy
from recovery.topology import Topology
from replica.fault_points import POINTS

LAYOUTS = (
    ("copies:1", "ab"),
    ("copies:1", "abc"),
    ("copies:1", "abcd"),
    ("copies:2", "abc"),
    ("stripe:1+1", "abc"),
    ("stripe:1+1", "aabbcc"),
    ("stripe:2+1", "abcd"),
    ("stripe:2+1", "abcde"),
    ("stripe:3+1", "abcde"),
    ("stripe:2+2", "abcde"),
    ("stripe:4+1", "abcdef"),
)
"""Redundancy and the node of each rank: 2 to 6 nodes, once two ranks on each, once two groups."""
ROOT, HOLDER, BYSTANDER = "root", "holder", "bystander"
ROLES = (ROOT, HOLDER, BYSTANDER)
"""Rank 0, a rank that holds for it, and one that does not. Every rank is an owner besides."""
FAULTS = ("kill", "stop")
"""SIGKILL at the point; SIGSTOP at the point and SIGKILL once the others have named it."""
ARENAS = ("kept", "deleted")
"""Only the process is lost, or its node with all that is on it."""


@dataclass(frozen=True)
class Case:
    """One fault. Its id is what ``-k`` selects it by."""

    phase: str
    role: str
    fault: str
    arena: str
    redundancy: str
    nodes: str

    @property
    def id(self) -> str:
        return f"{self.phase}-{self.role}-{self.fault}-{self.arena}-{self.redundancy}-{self.nodes}"

    @property
    def layout(self) -> str:
        return f"{self.redundancy} on {self.nodes}"


def layout_of(redundancy: str, nodes: str) -> Layout:
    """Place the fragments of a world whose rank r is on ``nodes[r]``; all shards alike."""
    topology = Topology(tuple(nodes))
    parsed = parse_redundancy(redundancy, len(topology.nodes))
    return make_layout(parsed, topology, [1000] * topology.world)


def ranks_in_role(role: str, redundancy: str, nodes: str) -> tuple[int, ...]:
    """List the ranks that may play a role: none where every other rank holds for rank 0."""
    holders = {fragment.holder for fragment in layout_of(redundancy, nodes).sent_by(0)}
    others = set(range(1, len(nodes)))
    found = {ROOT: {0}, HOLDER: holders, BYSTANDER: others - holders}[role]
    return tuple(sorted(found))


def cells_of(number: int, phase: str) -> list[Case]:
    """List the cases of one phase, the ``number``-th: twelve of them, and all layouts in them."""
    open_to_all = [one for one in LAYOUTS if ranks_in_role(BYSTANDER, *one)]
    others = [one for one in LAYOUTS if one not in open_to_all]
    turn, count = number % len(open_to_all), len(ARENAS) * len(FAULTS)
    # Bystanders take the layouts that have any. One of those, another one each time, is put among
    # the rest for the root and the holders, at a role and an arena that change every fourth time.
    rest = others[number % len(others) :] + others[: number % len(others)]
    rest.insert(2 * (number // count % count) + number % 2, open_to_all[turn])
    layouts = rest + open_to_all[turn:] + open_to_all[:turn]
    cells = product(ROLES, ARENAS, FAULTS)
    return [
        Case(phase, role, fault, arena, *layout)
        for (role, arena, fault), layout in zip(cells, layouts, strict=True)
    ]


@cache
def matrix() -> tuple[Case, ...]:
    """Every case, by phase."""
    return tuple(case for number, phase in enumerate(POINTS) for case in cells_of(number, phase))


@cache
def with_the_store() -> tuple[Case, ...]:
    """Cases in which the store dies with rank 0."""
    points = ("save.offer", "save.last_chunk", "save.held", "save.commit", "save.release")
    layouts = cycle([("copies:1", "ab"), ("stripe:2+1", "abcd"), ("stripe:1+1", "abc")])
    arenas = cycle(ARENAS)
    return tuple(
        Case(point, ROOT, fault, next(arenas), *next(layouts))
        for fault, point in product(FAULTS, points)
    )


SAMPLED = tuple(
    point
    for point in POINTS
    if point not in ("save.offer", "save.held", "mend.report", "mend.result")
)
"""One point for each phase; those left out lie just beside another one."""
SAMPLE_RANKS_MAX = 4


@cache
def sample() -> tuple[Case, ...]:
    """One case of the matrix for each phase, in small worlds."""
    found = []
    for number, phase in enumerate(SAMPLED):
        small = [c for c in matrix() if c.phase == phase and len(c.nodes) <= SAMPLE_RANKS_MAX]
        found.append(small[number % len(small)])
    return tuple(found)
