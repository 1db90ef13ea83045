"""A background process that ends or stands still where nobody asked it to: who is told, and what.

Two trainers with a process each; one of the processes is struck at a moment at which it stays.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

import replica
from replica.opening import ROUNDS
from replica.serving import Serving
from replica.snapshot import LoadPlan
from tests.replica.arena_tools import descriptors, mappings
from tests.replica.background_tools import background_processes, checkpointers, pid_of
from tests.replica.inprocess import COMMIT_S
from tests.replica.pool import failures, results, worker_environment
from tests.replica.worlds import World, names

pytestmark = [pytest.mark.real, pytest.mark.long]

TIMEOUT_S = 60.0
SOON_S = TIMEOUT_S / 3
"""Far more than what is told takes, far less than any deadline."""
PEERS_S = 10.0
"""Deadline where a rank waits in vain for one whose process is gone, as for one that is."""
KILLED = "was killed by signal 9"
WHAT_TO_DO = "restart all ranks of the job"


@pytest.fixture
def make(arena_dir):
    """Return a maker of Checkpointers of a world of one, closed with the test."""
    with checkpointers(arena_dir, TIMEOUT_S) as maker:
        yield maker


def open_two(real, timeout_s=TIMEOUT_S):
    """Join two ranks, each with a background process to come."""
    return real.open("ab", background="process", timeout_s=timeout_s)


def kill_the_process_of(worker) -> int:
    """Kill the background process of a worker; its pid."""
    (child,) = psutil.Process(worker.pid).children()
    child.kill()
    return child.pid


@pytest.mark.parametrize(
    "where",
    [
        "",
        "replica.background._Service._open_job",
        "replica.arena.Arena.allocate",
        "replica.arena.Arena.update_head",
        "replica.opening._Opening._announce",
    ],
)
def test_it_is_killed_while_the_job_opens(real, where):
    """Before it is ready, in a round of the opening, and after the last: both ranks hear it soon.

    Rank 0's trainer says so in the next round, for which rank 1 waits; after the last one rank 1 is
    open already. The same trainers can open the job afterwards.
    """
    world = open_two(real)
    if where:
        world[0].call("have_it_stay", where=where, word="there")
    else:
        world[0].call("have_it_stay_here", word="there")
    started_s = time.monotonic()
    ranks = world.begin("start")
    world[0].hear("there")
    pid = kill_the_process_of(world[0])
    last = where.endswith("_announce")
    told = failures(ranks[:1] if last else ranks)
    assert time.monotonic() - started_s < SOON_S
    for kind, text in told:
        assert kind == "PeerError"
        assert names(text, 0)
        assert all(word in text for word in (f"pid {pid}, {KILLED}", WHAT_TO_DO)), text
    if last:
        world[1].result()
    again = real.reopen(world, background="process", timeout_s=TIMEOUT_S)
    assert again.each("commit", step=1) == ["committed"] * 2


def test_the_rounds_of_an_opening_are_known(make, monkeypatch):
    """As many exchanges as ``ROUNDS`` says: where the trainer knows whether others still wait."""
    counted = []
    inner = Serving._exchange

    def exchange(self, args):
        counted.append(self.rounds)
        return inner(self, args)

    monkeypatch.setattr(Serving, "_exchange", exchange)
    make({"w": torch.zeros(3)}).start()
    assert counted == list(range(ROUNDS))


@pytest.mark.parametrize("where", ["replica.staging.Stager._copy", "replica.encode.EncodePass.run"])
def test_it_is_killed_amid_a_save(real, where):
    """In the call and behind it: both ranks' saves fail, and every further call of rank 1's too.

    Rank 1 is told at once, each time whose fault it is and what to do; rank 0 by its deadline at
    the latest, and that it is rank 1. A restart of all goes on from step 1.
    """
    world = open_two(real, timeout_s=PEERS_S)
    assert world.each("commit", step=1) == ["committed"] * 2
    world[1].call("have_it_stay", where=where, word="there")
    ranks = world.begin("commit", step=2)
    world[1].hear("there")
    started_s = time.monotonic()
    how = f"pid {kill_the_process_of(world[1])}, {KILLED}"
    assert how in ranks[1].result()
    further = world[1].call("commit", owner=1, step=3)
    assert how in further
    assert WHAT_TO_DO in further
    world[1].start("restore")
    ((kind, text),) = failures([world[1]])
    assert kind == "RestoreAborted"
    assert all(word in text for word in ("rank 1", how, WHAT_TO_DO)), text
    status = world[1].call("status")
    assert (status["committed_step"], status["protected"]) == (1, "none")
    assert how in status["broken"]
    world[1].call("give_up")
    assert time.monotonic() - started_s < PEERS_S
    other = ranks[0].result()
    assert names(other, 1), other
    world[0].call("give_up")
    again = real.open("ab", world.workers, background="process", timeout_s=TIMEOUT_S)
    assert again.each("restore") == [1] * 2
    assert all(again.each("state_is", step=1))


def test_it_is_killed_amid_a_restore(real):
    """While bytes are fetched: nothing was changed, both ranks say why, and all start anew."""
    world = open_two(real, timeout_s=PEERS_S)
    assert world.each("commit", step=1) == ["committed"] * 2
    world = real.reopen(world, background="process", timeout_s=PEERS_S)
    world.each("start")
    world[1].call("have_it_stay", where="replica.fetch.Fetcher.run", word="fetching")
    ranks = world.begin("restore")
    world[1].hear("fetching")
    started_s = time.monotonic()
    pid = kill_the_process_of(world[1])
    (mine,) = failures(ranks[1:])
    assert time.monotonic() - started_s < PEERS_S
    assert mine[0] == "RestoreAborted"
    assert f"pid {pid}, {KILLED}" in mine[1]
    assert WHAT_TO_DO in mine[1]
    assert all(world.each("state_is", ranks=[1], step=1000))
    (other,) = failures(ranks[:1])
    assert other[0] == "RestoreAborted"
    assert names(other[1], 1), other
    again = real.reopen(world, background="process", timeout_s=TIMEOUT_S)
    assert again.each("restore") == [1] * 2


def test_it_is_killed_while_live_objects_change(make, arena_dir, monkeypatch):
    """The trainer has begun to load: RestoreHalfDone, and no call but ``close`` goes on."""
    before = descriptors()
    state = {"w": torch.zeros(1000)}
    one = make(state)
    state["w"].fill_(1)
    one.save(1).wait("committed", COMMIT_S)
    pid, inner = pid_of(one), LoadPlan.commit

    def commit(self):
        inner(self)
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(LoadPlan, "commit", commit)
    with pytest.raises(replica.RestoreHalfDone, match=rf"pid {pid}, {KILLED}.*{WHAT_TO_DO}"):
        one.restore()
    for call in (one.restore, partial(one.save, 2), one.start):
        with pytest.raises(replica.ConfigError, match=rf"cannot be used any more.*pid {pid}"):
            call()
    one.close()
    monkeypatch.undo()
    gc.collect()
    assert mappings(arena_dir) == 0
    # Fewer, where one of an earlier test was still to be closed.
    assert descriptors() <= before
    again = make(state)
    assert again.restore() == 1


def test_it_stands_still_behind_a_save(make, faults):
    """SIGSTOP once ``save`` has returned: the ticket fails by the deadline and names the process.

    Between two saves nobody waits for it, and it goes on where it stood.
    """
    timeout_s = 3.0
    state = {"w": torch.zeros(1000)}
    one = make(state, timeout_s=timeout_s)
    one.save(1).wait("committed", COMMIT_S)
    child = psutil.Process(pid_of(one))
    child.suspend()
    assert one.status()["committed_step"] == 1
    child.resume()
    faults.do("stay", where="replica.encode.EncodePass.run", word="held")
    started_s = time.monotonic()
    ticket = one.save(2)
    faults.hear("held")
    child.suspend()
    with pytest.raises(replica.SaveFailed, match=rf"pid {child.pid}, .*for {timeout_s} s"):
        ticket.wait("committed", COMMIT_S)
    assert time.monotonic() - started_s < timeout_s + SOON_S
    with pytest.raises(replica.SaveFailed, match=WHAT_TO_DO):
        one.save(3).wait()
    one.close()
    assert make(state).restore() == 1


def test_a_process_that_is_busy_is_not_taken_for_one_that_stands_still(make, faults):
    """A save that takes longer than ``timeout_s``, held there, is ended by its own deadline."""
    state = {"w": torch.zeros(1000)}
    one = make(state, timeout_s=2.0)
    one.save(1).wait("committed", COMMIT_S)
    faults.do("stay", where="replica.driver.Driver._save", word="held")
    ticket = one.save(2)
    faults.hear("held")
    with pytest.raises(TimeoutError):
        ticket.wait("committed", 5.0)
    faults.do("go_on")
    with contextlib.suppress(replica.SaveFailed):
        ticket.wait("committed", COMMIT_S)
    assert background_processes()
    one.save(3, when_busy="wait").wait("committed", COMMIT_S)


def test_a_group_over_no_tcp_store(arena_dir, tmp_path):
    """Alone, over a HashStore or a FileStore, all works as with a thread."""
    for number, make_store in enumerate(
        [dist.HashStore, partial(dist.FileStore, str(tmp_path / "store"), 1)]
    ):
        dist.init_process_group("gloo", store=make_store(), rank=0, world_size=1)
        try:
            options = {"job": f"job-{number}", "arena_dir": str(arena_dir), "redundancy": "none"}
            with replica.Checkpointer({"x": 1}, background="process", **options) as one:
                one.save(1).wait("committed", COMMIT_S)
        finally:
            dist.destroy_process_group()


def test_ranks_over_a_file_are_refused(real, tmp_path):
    """Two ranks over a FileStore: ConfigError on both, that says what else to choose."""
    workers = real.pool.take(2)
    for rank, worker in enumerate(workers):
        worker.start("join_by_file", rank=rank, world=2, path=str(tmp_path / "store"))
    results(workers)
    world = World(workers, "ab")
    world.make(**real.options(background="process"))
    for kind, text in world.fail("start"):
        assert kind == "ConfigError"
        assert all(word in text for word in ("TCPStore", 'background="thread"'))


STARTING = """
import os, queue, sys, threading
import psutil, torch, replica
from tests.replica.control import Control
heard = queue.SimpleQueue()
Control(heard.put, "tests.replica.stays_in_background").do("stay_here", word="there")
one = replica.Checkpointer({"x": 1}, job="job", arena_dir=sys.argv[1], background="process")
threading.Thread(target=one.start, daemon=True).start()
heard.get()
print(*[child.pid for child in psutil.Process().children()], flush=True)
sys.stdin.read()
"""


def test_the_trainer_is_killed_while_it_starts(arena_dir):
    """The process has not come as far as its main function, and ends at once all the same."""
    script = subprocess.Popen(
        [sys.executable, "-c", STARTING, str(arena_dir)],
        env=worker_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with script.stdin, script.stdout:
        child = psutil.Process(int(script.stdout.readline()))
        script.kill()
        script.wait()
        assert psutil.wait_procs([child], SOON_S)[1] == []
    assert list(arena_dir.iterdir()) == []
