"""What the kill matrix and its sample cover, counted."""

from __future__ import annotations

from itertools import product

from replica.fault_points import POINTS
from tests.kills.cases import (
    ARENAS,
    BYSTANDER,
    FAULTS,
    LAYOUTS,
    ROLES,
    SAMPLED,
    matrix,
    ranks_in_role,
    sample,
)


def test_the_matrix_is_complete_where_it_says_so():
    """Every role, phase, fault and arena stands once; ids are unique; all roles can be played."""
    cases = matrix()
    cells = [(case.phase, case.role, case.fault, case.arena) for case in cases]
    assert sorted(cells) == sorted(product(POINTS, ROLES, FAULTS, ARENAS))
    assert len({case.id for case in cases}) == len(cases)
    assert all(ranks_in_role(case.role, case.redundancy, case.nodes) for case in cases)


def test_layouts_rotate_through_the_matrix():
    """Every layout meets every phase, and every role that it has with either arena."""
    layouts = [f"{redundancy} on {nodes}" for redundancy, nodes in LAYOUTS]
    assert {(case.layout, case.phase) for case in matrix()} == set(product(layouts, POINTS))
    roles = {
        (f"{redundancy} on {nodes}", role, arena)
        for (redundancy, nodes), role, arena in product(LAYOUTS, ROLES, ARENAS)
        if ranks_in_role(role, redundancy, nodes)
    }
    assert {(case.layout, case.role, case.arena) for case in matrix()} == roles
    assert any(role == BYSTANDER for _, role, _ in roles)


def test_the_sample_has_every_phase():
    """The cases of ``make test`` are of the matrix: each phase, every role, fault and arena."""
    cases = sample()
    assert set(cases) <= set(matrix())
    assert tuple(case.phase for case in cases) == SAMPLED
    assert {point.split(".")[0] for point in SAMPLED} == {point.split(".")[0] for point in POINTS}
    assert {case.role for case in cases} == set(ROLES)
    assert {(case.fault, case.arena) for case in cases} == set(product(FAULTS, ARENAS))
