"""Who may have an arena: one living job of a name per host; an orphan gives way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from replica.procs import identify
from tests.replica.control import background
from tests.replica.pool import worker_environment

pytestmark = pytest.mark.real

AGENT = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
ORPHAN = """
import json, os, sys
import torch, replica
checkpointer = replica.Checkpointer(
    {"weights": torch.full((8,), 5.0)},
    job="job", node_id="a", arena_dir=sys.argv[1], redundancy="none", background=sys.argv[2],
)
checkpointer.save(5).wait("committed", 60)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def orphan(arena_dir):
    """Yield the pid of a trainer whose agent was killed, ended with the test at the latest."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, sys.executable, "-c", ORPHAN, str(arena_dir), background()],
        env=worker_environment() | {"TORCHELASTIC_RUN_ID": "job"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with agent.stdin, agent.stdout:
        pid = int(agent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        agent.kill()
        agent.wait()
        yield pid
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def test_an_orphan_is_ended_and_its_arena_adopted(real, orphan):
    """A trainer outlives its agent: the next start of the job ends it and finds its last step."""
    assert identify(orphan) is not None
    world = real.world("a")
    world[0].call("make_bare", elements=8, node_id="a", **real.options(redundancy="none"))
    assert world.each("restore") == [5]
    assert world.each("bare_values") == [[5.0] * 8]
    assert identify(orphan) is None


def test_two_jobs_on_one_host(real):
    """A second live job of the name is refused on all ranks, by pid; one of another name is not."""
    first = real.open("ab")
    assert first.each("commit", step=1) == ["committed"] * 2
    second = real.open("cb")
    for kind, text in second.fail("start"):
        assert kind == "ArenaBusy"
        assert f"pid {first[1].pid}" in text
    second.make(**real.options(job="other"))
    assert second.each("restore") == [None] * 2
    first.begin("commit", step=2)
    second.begin("commit", step=7)
    assert [worker.result() for worker in first.workers + second.workers] == ["committed"] * 4
    assert first.each("restore") == [2] * 2
    assert second.each("restore") == [7] * 2
    assert all(first.each("state_is", step=2) + second.each("state_is", step=7))
