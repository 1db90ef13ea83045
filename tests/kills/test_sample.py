"""A sample of the kill matrix (see ``matrix.py``): one case for each phase."""

from __future__ import annotations

import pytest

from tests.kills.cases import sample
from tests.kills.trial import Trial

pytestmark = pytest.mark.real


@pytest.mark.parametrize("case", sample(), ids=lambda case: case.id)
def test_a_rank_is_lost(case, real, rng):
    """One rank fails at one point: the others name it in time, and nothing committed is lost."""
    Trial(real, case, rng, deadline_s=2.0).check()
