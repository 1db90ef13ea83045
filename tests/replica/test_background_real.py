"""Some of the tests of real processes once more, with the work in background processes.

All of them: ``PLANARIA_TEST_BACKGROUND=process make test ARGS="-m real"``.
"""

from __future__ import annotations

import pytest

from tests.kills.cases import matrix
from tests.kills.trial import Trial
from tests.replica import test_real_resume
from tests.replica.control import MODE

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def in_processes(monkeypatch):
    """Give every Checkpointer of a test a background process."""
    monkeypatch.setenv(MODE, "process")


def test_training_that_lost_a_node_goes_on_bit_for_bit(real):
    """FSDP2, AdamW, schedule, loader, random states, captured and loaded across the line."""
    test_real_resume.test_a_resumed_run_is_the_uninterrupted_run(real)


def test_a_rank_is_lost(real, rng):
    """A case of the kill matrix: trainer and process die together, their bytes half sent."""
    cases = [case for case in matrix() if case.phase == "save.last_chunk" and case.fault == "kill"]
    case = next(case for case in cases if len(case.nodes) == 2)
    Trial(real, case, rng, deadline_s=4.0).check()
