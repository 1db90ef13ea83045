"""Ctrl-C in a trainer whose background process is at work: the call ends at once, and all is well.

The trainer is this process, where a real signal strikes the main thread; its handler raises what no
``except Exception`` catches. The moments are those of the process, which stays at them, or those of
the trainer's own answers to it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest
import torch

import replica
from replica.arena import read_arenas
from replica.at_exit import THREAD_PREFIX
from replica.line import Line
from replica.mappings import Mappings
from replica.serving import Serving
from replica.snapshot import LoadPlan, Snapshot
from replica.ticket import Ticket
from tests.replica.arena_tools import mappings
from tests.replica.background_tools import background_processes, commit
from tests.replica.inprocess import COMMIT_S
from tests.replica.pool import worker_environment
from tests.replica.strikes import Interrupted

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.usefixtures("interrupts")]

TIMEOUT_S = 60.0
"""Deadline of the Checkpointers: what is over much sooner did not wait for it."""
SOON_S = TIMEOUT_S / 3


@pytest.fixture
def alone(arena_dir):
    """Return a maker of the only rank of a job; in the end nothing of any of them is left."""
    made = []

    def maker(mode="process", **options):
        given = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "timeout_s": TIMEOUT_S}
        given |= {"redundancy": "none", "random_states": False, "background": mode}
        state = {"w": torch.zeros(100_000)}
        made.append((state, replica.Checkpointer(state, **given | options)))
        return made[-1]

    yield maker
    for _, one in made:
        one.close()


def close_soon(one, arena_dir) -> None:
    """Close in much less than any deadline: no process, no thread and no mapping of it stays."""
    started_s = time.monotonic()
    one.close()
    one.close()
    assert time.monotonic() - started_s < SOON_S
    assert background_processes() == []
    left = [one for one in threading.enumerate() if one.name.startswith(f"{THREAD_PREFIX}backg")]
    for thread in left:
        thread.join(SOON_S)
    assert [thread.name for thread in left if thread.is_alive()] == []
    gc.collect()
    assert mappings(arena_dir) == 0


def check_next_start(alone, arena_dir, steps, *, free=True) -> None:
    """The arena is free, for any process if ``free``, and one of the steps is found."""
    assert not (free and any(view.alive for view in read_arenas(arena_dir)))
    state, again = alone("thread")
    found = again.restore()
    assert found in steps
    assert float(state["w"][0]) == (found or 0)
    close_soon(again, arena_dir)


def interrupted(call) -> None:
    """The call is broken off at once."""
    started_s = time.monotonic()
    with pytest.raises(Interrupted):
        call()
    assert time.monotonic() - started_s < SOON_S


@pytest.mark.parametrize("where", ["", "replica.arena.Arena.allocate"])
def test_while_it_starts(alone, arena_dir, faults, where):
    """Before the process is ready, and while it opens: it does not stay, and the next one opens."""
    job = {"where": where} if where else {}
    faults.do("stay" if where else "stay_here", word="there", **job)
    state, one = alone()
    faults.interrupt_at("there")
    interrupted(one.start)
    assert background_processes() == []
    assert not any(view.alive for view in read_arenas(arena_dir))
    commit(state, one, 1)
    close_soon(one, arena_dir)
    check_next_start(alone, arena_dir, [1])


def test_while_a_process_is_launched(alone, arena_dir, strike):
    """Just before the wait for the launch: the process that comes into being then is ended."""
    struck = strike(threading.Event, "wait")
    _, one = alone()
    interrupted(one.start)
    assert struck
    close_soon(one, arena_dir)
    assert list(arena_dir.iterdir()) == []


def test_while_it_saves(alone, arena_dir, faults):
    """In the process's part of a save: a later step is committed."""
    state, one = alone()
    commit(state, one, 1)
    faults.do("stay", where="replica.staging.Stager._copy", word="copying")
    faults.interrupt_at("copying")
    interrupted(partial(one.save, 2))
    commit(state, one, 3)
    close_soon(one, arena_dir)
    check_next_start(alone, arena_dir, [3])


def test_while_a_save_waits_for_the_one_before(alone, arena_dir, faults, strike):
    """``save(when_busy="wait")``, ``ticket.wait`` and ``close`` are broken off; closing is soon."""
    state, one = alone()
    commit(state, one, 1)
    faults.do("stay", where="replica.encode.EncodePass.run", word="held")
    ticket = one.save(2)
    faults.hear("held")
    faults.do("stay", where="replica.driver.Driver.wait_ready", word="waiting")
    faults.interrupt_at("waiting")
    interrupted(partial(one.save, 3, when_busy="wait"))
    strike(Ticket, "_over")
    interrupted(partial(ticket.wait, "committed", COMMIT_S))
    faults.do("stay", where="replica.driver.Driver.wait_decided", word="closing")
    faults.interrupt_at("closing")
    interrupted(one.close)
    close_soon(one, arena_dir)
    assert ticket.failed
    # The held save has ended with its process, which had no time to give the arena back.
    check_next_start(alone, arena_dir, [1, 2], free=False)


def test_while_it_restores(alone, arena_dir, faults):
    """Before the live objects are touched: they are as they were, and the same call then works."""
    state, one = alone()
    commit(state, one, 1)
    close_soon(one, arena_dir)
    state, one = alone()
    faults.do("stay", where="replica.fetch.Fetcher.run", word="fetching")
    faults.interrupt_at("fetching")
    interrupted(one.restore)
    assert float(state["w"][0]) == 0
    faults.do("go_on")
    assert one.restore() == 1
    commit(state, one, 2)
    close_soon(one, arena_dir)
    check_next_start(alone, arena_dir, [2])


SAVE = [
    (Serving, "answer", False),
    (Mappings, "view", True),
    (Snapshot, "begin_capture", False),
    (Snapshot, "begin_capture", True),
    (Line, "_next", True),
    (Line, "_send", False),
    (Line, "_send", True),
]


def test_in_each_part_of_the_trainers_of_a_save(alone, arena_dir, strike):
    """Broken off at each of its steps, one after another, the next save is committed each time."""
    state, one = alone()
    commit(state, one, 1)
    step = 1
    for owner, name, after in SAVE:
        struck = strike(owner, name, after=after)
        interrupted(partial(one.save, step + 1))
        assert struck
        commit(state, one, step + 2)
        step += 2
    close_soon(one, arena_dir)
    check_next_start(alone, arena_dir, [step])


@pytest.mark.parametrize(("owner", "name"), [(Snapshot, "prepare"), (LoadPlan, "commit")])
def test_in_the_trainers_part_of_a_restore(alone, arena_dir, strike, owner, name):
    """Before and after the live objects were touched: closing is soon, the next start restores."""
    state, one = alone()
    commit(state, one, 1)
    close_soon(one, arena_dir)
    state, one = alone()
    struck = strike(owner, name, after=name == "commit")
    interrupted(one.restore)
    assert struck
    close_soon(one, arena_dir)
    check_next_start(alone, arena_dir, [1])


@pytest.mark.parametrize("name", ["_send", "_next", "hang_up"])
def test_in_the_trainers_part_of_closing(alone, arena_dir, strike, caplog, name):
    """A second ``close`` ends what the first has left, and says nothing of a process that is gone.

    Also where only the wait for the process's end was broken off.
    """
    state, one = alone()
    commit(state, one, 1)
    struck = strike(Line, name, after=name == "_next")
    interrupted(one.close)
    assert struck
    close_soon(one, arena_dir)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    check_next_start(alone, arena_dir, [1])


TERMINAL = """
import json, os, sys
import torch, replica
state = {"w": torch.zeros(10)}
one = replica.Checkpointer(
    state, job="job", node_id="a", arena_dir=sys.argv[1],
    redundancy="none", random_states=False, background="process",
)
one.save(1).wait("committed", 60)
print(one._engine._line.pid, flush=True)
try:
    sys.stdin.read()
except KeyboardInterrupt:
    pass
one.save(2).wait("committed", 60)
print(json.dumps(one.status()["committed_step"]), flush=True)
sys.stdin.read()
"""


def test_ctrl_c_and_ctrl_z_at_a_terminal(arena_dir):
    """What a terminal sends to all of a job is the trainer's to answer: it saves once more, ends.

    Both processes get SIGINT, SIGQUIT's and SIGTSTP's like for the process alone: it goes on. The
    second Ctrl-C ends the trainer, and the process with it.
    """
    script = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, str(arena_dir)],
        env=worker_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
        text=True,
    )
    try:
        pid = int(script.stdout.readline())
        for number in (signal.SIGTSTP, signal.SIGTTOU, signal.SIGTTIN, signal.SIGQUIT):
            os.kill(pid, number)
        for target in (script.pid, pid):
            os.killpg(target, signal.SIGINT)
        assert json.loads(script.stdout.readline()) == 2
        for target in (script.pid, pid):
            os.killpg(target, signal.SIGINT)
        _, err = script.communicate(timeout=SOON_S)
    finally:
        script.kill()
    assert script.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1, err
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], SOON_S)
    assert not psutil.pid_exists(pid)
    assert [view.head.committed.step for view in read_arenas(arena_dir)] == [2]
