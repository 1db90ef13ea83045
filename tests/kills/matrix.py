"""The whole kill matrix, run by ``make kills``; pytest does not collect this file by itself.

    make kills ARGS='-k save.ack-root'

repeats some cases; ``PLANARIA_TEST_SEED`` repeats the choice of the victim among the ranks that may
play its role, and of the ranks' new numbers.
"""

from __future__ import annotations

import pytest

from tests.kills.cases import matrix, with_the_store
from tests.kills.trial import StoreTrial, Trial

pytestmark = pytest.mark.real


@pytest.mark.parametrize("case", matrix(), ids=lambda case: case.id)
def test_a_rank_is_lost(case, real, rng, record_property):
    """One rank fails at one point: the others name it in time, and nothing committed is lost."""
    record_property("phase", case.phase)
    record_property("layout", case.layout)
    Trial(real, case, rng).check()


@pytest.mark.parametrize("case", with_the_store(), ids=lambda case: case.id)
def test_the_store_is_lost_with_rank_0(case, real, rng, record_property):
    """Rank 0 fails and the store in its process: the others skip saves, nothing is lost."""
    record_property("phase", f"{case.phase}, store")
    record_property("layout", case.layout)
    StoreTrial(real, case, rng).check()
