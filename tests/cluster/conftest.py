"""The cluster of the whole session, and its loan to one test."""

from __future__ import annotations

from itertools import count

import pytest

from tests.cluster.clusters import Cluster
from tests.cluster.nodes import why_not

RANKS, SPARE = 4, 1
_NUMBERS = count()


@pytest.fixture(scope="session")
def machine():
    """Yield the nodes of the session; skip where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cluster = Cluster(RANKS + SPARE)
    yield cluster
    cluster.end()


@pytest.fixture
def cluster(machine):
    """Yield healthy, empty nodes to one test."""
    yield machine
    machine.clear()


@pytest.fixture
def job():
    """Return a job's name that no other test has: the store outlives the test."""
    return f"job-{next(_NUMBERS)}"
