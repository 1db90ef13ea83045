"""One process has an arena; who is an orphan is ended, anybody else alive is a second job (P13)."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.manifest import ArenaHead
from replica import claim as claim_module
from replica.arena import Arena, read_arenas
from replica.claim import BUSY, END, WAIT, judge, sibling_numbers
from replica.errors import ArenaBusy
from replica.procs import Process, end, identify, my_parent, myself
from tests.replica.arena_tools import OPEN, PREAMBLE

TORCHRUN = {"TORCHELASTIC_RUN_ID": "job"}

OWNER = """
arena = Arena.open(DIR, **OPEN)
slot = arena.slots.get(0) or arena.allocate(4096, "own")
slot.data[:] = 7
arena.update_head(epoch=3)
say([os.getpid(), arena.path])
wait()
arena.close()
say("closed")
wait()
"""

# Starts one trainer under itself, as torchrun's agent does.
AGENT = """
import subprocess
subprocess.Popen([sys.executable, "-c", ARGS[0], *sys.argv[1:]],
    env=os.environ | {"TORCHELASTIC_RUN_ID": "job"})
wait()
"""

ORPHAN = """
import signal
arena = Arena.open(DIR, **OPEN)
arena.allocate(4096, "own").data[:] = 7
# LOSE
say([os.getpid(), arena.path])
while True:
    signal.pause()
"""

TRY = """
import time
started = time.monotonic()
try:
    arena = Arena.open(DIR, **OPEN | (ARGS[0] if ARGS else {}))
except ArenaBusy as error:
    say(["busy", str(error), time.monotonic() - started])
else:
    slot = arena.slots.get(0)
    say(["open", arena.path, slot and int(slot.data.sum())])
wait()
"""


@pytest.fixture
def make_orphan(arena_dir, children):
    """Return a function that makes an orphan: (its identity, its arena's path)."""
    made = []

    def make(lose=""):
        agent = children.start(AGENT, arena_dir, PREAMBLE + ORPHAN.replace("# LOSE", lose))
        pid, path = agent.hear()
        made.append(identify(pid))
        agent.end()
        assert made[-1].alive
        return made[-1], path

    yield make
    for orphan in made:
        assert end(orphan, 10) == ""


# --- the rule, as a table


def head_of(holder: Process, agent: Process | None) -> ArenaHead:
    """Return the head that a trainer under this agent wrote."""
    return ArenaHead(
        job="job",
        node_id="node",
        position=0,
        incarnation="0" * 32,
        pid=holder.pid,
        pid_start=holder.start,
        agent_pid=agent.pid if agent else 0,
        agent_start=agent.start if agent else 0,
    )


GONE = Process(2**22 + 7, 1)


@pytest.mark.parametrize(
    ("agent", "parent", "action"),
    [
        (None, None, BUSY),
        (None, GONE, BUSY),
        ("us", None, BUSY),
        ("us", "parent", BUSY),
        ("us", "us", END),
        ("reused pid", "us", END),
        (GONE, None, END),
        (GONE, "us", END),
    ],
)
def test_the_rule_is_the_table(agent, parent, action):
    """Every row: no agent, a living agent that is or is not our parent, one that is gone."""
    names = {
        "us": myself(),
        "parent": my_parent(),
        "reused pid": replace(myself(), start=myself().start - 1),
    }
    holder = Process(4321, 99)
    head = head_of(holder, names.get(agent, agent))
    verdict = judge(head, "job", holder, names.get(parent, parent))
    assert verdict.action == action
    if action == BUSY:
        assert "pid 4321" in verdict.reason


def test_a_head_that_is_not_the_holders_says_nothing_about_it():
    """Another pid, another start time, or no head at all: wait until the holder has written its."""
    holder = Process(4321, 99)
    for head in (None, head_of(GONE, None), head_of(replace(holder, start=98), GONE)):
        verdict = judge(head, "job", holder, None)
        assert (verdict.action, "pid 4321" in verdict.reason) == (WAIT, True)


def test_a_holder_for_another_job_is_never_ended():
    """A head that names another job: busy, even though that trainer is an orphan."""
    holder = Process(4321, 99)
    assert judge(head_of(holder, GONE), "other", holder, None).action == BUSY


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        ([], []),
        (["0"], [0]),
        (["0.10", "0.2", "0", "1", "00", "0.0", "0.02", "0.x", "10.3"], [0, 2, 10]),
        (["0.3"], [3]),
    ],
)
def test_siblings_are_numbered_not_spelt(names, numbers):
    """Only canonical names of this position count, in the order of their numbers."""
    assert sibling_numbers(names, 0) == numbers


# --- with real processes


def test_a_living_trainer_without_agent_is_a_second_job(arena_dir, children, open_arena):
    """Its pid is named at once, it lives on and keeps the arena until it closes it."""
    owner = children.start(OWNER, arena_dir)
    pid, path = owner.hear()
    with pytest.raises(ArenaBusy, match=f"pid {pid} of job 'job' is alive and no launcher's"):
        open_arena()
    owner.tell()
    assert owner.hear() == "closed"
    arena = open_arena()
    assert (arena.path, int(arena.slots[0].data.sum()), arena.head.epoch) == (path, 7 * 4096, 3)


def test_a_trainer_under_a_living_agent_is_a_second_job(arena_dir, children, open_arena):
    """The agent is alive and not our parent (it is us): busy, with both pids, and it lives on."""
    owner = children.start(OWNER, arena_dir, env=TORCHRUN)
    pid, _ = owner.hear()
    with pytest.raises(ArenaBusy, match=f"pid {pid} .*under its agent, pid {os.getpid()}"):
        open_arena()
    assert identify(pid) is not None


def test_a_trainer_whose_agent_is_our_parent_is_ended(arena_dir, children):
    """Two trainers under one agent: the second ends the first and finds its bytes."""
    first = children.start(OWNER, arena_dir, env=TORCHRUN)
    _, path = first.hear()
    second = children.start(TRY, arena_dir, env=TORCHRUN)
    assert second.hear() == ["open", path, 7 * 4096]
    assert first.process.wait() == -signal.SIGKILL


def test_an_orphan_is_ended_and_its_arena_adopted(make_orphan, open_arena, caplog):
    """The agent was killed alone, its trainer runs on: who opens next ends it and takes over."""
    orphan, path = make_orphan()
    arena = open_arena()
    assert not orphan.alive
    assert (arena.path, int(arena.slots[0].data.sum())) == (path, 7 * 4096)
    assert f"ended pid {orphan.pid}" in caplog.text


def test_an_orphan_that_cannot_be_ended_loses_its_directory(
    make_orphan, open_arena, monkeypatch, caplog
):
    """A sibling is used, the newest one next time too; what was lost goes once the orphan has."""
    orphan, path = make_orphan()
    with monkeypatch.context() as patch:
        patch.setattr(claim_module, "end", lambda process, _: f"pid {process.pid} is stuck")
        arena = open_arena(timeout_s=1.0)
    assert (arena.path, arena.fresh, arena.slots) == (f"{path}.1", True, {})
    assert f"pid {orphan.pid} is stuck" in caplog.text
    assert f"{path} counts as lost" in caplog.text
    arena.allocate(100, "own")
    arena.close()
    arena = open_arena()
    assert (arena.path, arena.fresh, len(arena.slots)) == (f"{path}.1", False, 1)
    assert orphan.alive
    assert Path(path, "slot-0.safetensors").exists()
    arena.close()
    assert end(orphan, 10) == ""
    assert open_arena().path == f"{path}.1"
    assert not Path(path).exists()


def test_an_orphan_that_lost_its_lock_is_found_by_its_head(make_orphan, open_arena):
    """A stray close of the lock file drops the lock: the living owner in the head still counts."""
    orphan, path = make_orphan("os.close(os.open(f'{arena.path}/lock', os.O_RDONLY))")
    assert open_arena().path == path
    assert not orphan.alive


def test_a_holder_that_has_not_written_its_head_is_waited_for(arena_dir, children, open_arena):
    """Only a lock: busy at the deadline, naming the pid; given back in time, the arena is ours."""
    code = """
import fcntl
arena = Arena.open(DIR, **OPEN)
path = arena.path
arena.close()
lock = os.open(f"{path}/lock", os.O_RDWR)
fcntl.lockf(lock, fcntl.LOCK_EX)
say(os.getpid())
wait()
os.close(lock)
say("released")
wait()
"""
    holder = children.start(code, arena_dir)
    pid = holder.hear()
    with pytest.raises(ArenaBusy, match=f"pid {pid} has the arena's lock.* deadline has passed"):
        open_arena(timeout_s=0.05)
    opened = []
    opener = threading.Thread(target=lambda: opened.append(open_arena()))
    opener.start()
    holder.tell()
    assert holder.hear() == "released"
    opener.join()
    assert len(opened) == 1


def test_readers_in_the_owners_process_do_not_drop_its_lock(arena_dir, children):
    """Reading and cleaning in the process that has the arena leaves the lock with it."""
    code = """
arena = Arena.open(DIR, **OPEN)
say([len(read_arenas(DIR)), clean(DIR), clean(DIR, dry_run=True)])
try:
    Arena.open(DIR, **OPEN)
except ArenaBusy:
    say("refused")
wait()
"""
    owner = children.start(code, arena_dir)
    assert owner.hear() == [1, [], []]
    assert owner.hear() == "refused"
    outcome, text, _ = children.start(TRY, arena_dir).hear()
    assert outcome == "busy"
    assert f"pid {owner.pid}" in text


def test_a_forked_child_neither_has_nor_harms_its_parents_arena(arena_dir, children):
    """The child may not change it, cannot open it, and its close leaves lock and head alone."""
    code = """
arena = Arena.open(DIR, **OPEN)
slot = arena.allocate(100, "own")
pid = os.fork()
if pid == 0:
    answers = []
    for use in (lambda: arena.update_head(epoch=9), lambda: arena.allocate(1, "own"),
                lambda: arena.drop(slot), lambda: Arena.open(DIR, **OPEN)):
        try:
            use()
            answers.append("done")
        except ArenaError as error:
            answers.append(str(os.getppid()) in str(error))
    arena.close()
    say(answers)
    os._exit(0)
os.waitpid(pid, 0)
[view] = read_arenas(DIR)
say([view.alive, view.head.pid == os.getpid(), view.head.epoch])
wait()
"""
    owner = children.start(code, arena_dir)
    assert owner.hear() == [True, True, True, True]
    assert owner.hear() == [True, True, 0]
    assert children.start(TRY, arena_dir).hear()[0] == "busy"


def test_of_many_that_start_at_once_one_has_the_arena(arena_dir, children):
    """Six processes open one arena together: one succeeds, the others name its pid."""
    code = "wait()\n" + TRY
    starters = [children.start(code, arena_dir) for _ in range(6)]
    for starter in starters:
        starter.tell()
    answers = {starter.pid: starter.hear() for starter in starters}
    winners = [pid for pid, answer in answers.items() if answer[0] == "open"]
    assert len(winners) == 1
    losers = [answer[1] for answer in answers.values() if answer[0] == "busy"]
    assert all(f"pid {winners[0]} " in text for text in losers)


def test_a_dead_owner_leaves_no_lock(arena_dir, children, open_arena):
    """SIGKILL of the owner: the next open succeeds at once and finds what was there."""
    owner = children.start(OWNER, arena_dir)
    _, path = owner.hear()
    owner.end()
    arena = open_arena(timeout_s=0.0)
    assert (arena.path, int(arena.slots[0].data.sum())) == (path, 7 * 4096)


def test_a_hundred_killed_runs_use_no_more_than_one(arena_dir, children):
    """Owners forked and killed 100 times: the directory has the files and bytes of one run."""
    code = """
import signal
for _ in range(100):
    seen, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        arena = Arena.open(DIR, **OPEN)
        if len(arena.slots) < 2:
            arena.allocate(10_000, "own")
        os.write(ready, b"x")
        signal.pause()
    os.close(ready)
    if not os.read(seen, 1):
        sys.exit("the owner has failed")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(seen)
say([[v.bytes_allocated, sorted(os.listdir(v.path))] for v in read_arenas(DIR)])
"""
    [[allocated, names]] = children.start(code, arena_dir).hear()
    assert allocated == 20_000
    assert names == [
        "head",
        "lock",
        "slot-0.record",
        "slot-0.safetensors",
        "slot-1.record",
        "slot-1.safetensors",
    ]


def test_close_in_order_says_that_nobody_is_there(open_arena, arena_dir):
    """After close the head names no process, so that our living process is no second job."""
    open_arena(rank=0).close()
    [view] = read_arenas(arena_dir)
    assert (view.head.pid, view.head.agent_pid, view.alive) == (0, 0, False)


def test_a_failed_open_gives_the_claim_back(open_arena, monkeypatch):
    """An error after the claim, whatever it is: lock and table are free again."""

    def fail(self):
        raise RuntimeError("adopting failed")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "_adopt", fail)
        with pytest.raises(RuntimeError, match="adopting failed"):
            open_arena()
    assert open_arena(timeout_s=0.0).head.job == OPEN["job"]
