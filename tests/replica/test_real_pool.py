"""The tests' own workers: one that hangs is shown and replaced, one that fails says how."""

from __future__ import annotations

import pytest

from tests.replica.pool import JobFailed

pytestmark = pytest.mark.real


def test_a_worker_that_hangs_is_shown_and_replaced(real):
    """A job that never ends fails at its deadline with the stack; the pool then lends another."""
    (worker,) = real.pool.take(1)
    with pytest.raises(AssertionError, match=r"(?s)did not give an answer.*in hang"):
        worker.call("hang", deadline_s=0.2)
    fresh = real.pool.replace(worker)
    assert worker.process.returncode is not None
    assert fresh.pid != worker.pid
    assert fresh.call("reset") == "clean"


def test_a_job_that_raises_says_what(real):
    """The kind, the sentence and the stack of an exception arrive, and the worker works on."""
    (worker,) = real.pool.take(1)
    with pytest.raises(JobFailed, match=r"(?s)KeyError.*in settle") as failed:
        worker.call("settle", step=77)
    assert (failed.value.kind, failed.value.text) == ("KeyError", "77")
    assert worker.call("reset") == "clean"
