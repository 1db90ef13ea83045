"""``background="process"``: a life of a Checkpointer, and the ends of the two processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import replica
from replica.arena import Arena, read_arenas
from replica.config import BACKGROUND
from replica.group import MemoryGroup
from replica.launch import BOOT
from replica.procs import identify
from tests.replica.arena_tools import OPEN
from tests.replica.background_tools import pid_of
from tests.replica.inprocess import COMMIT_S, outcomes
from tests.replica.pool import worker_environment

pytestmark = pytest.mark.real

SOON_S = 20.0
"""For a process to end: far more than it takes on a busy machine, far less than any deadline."""
STANDSTILL_S = 2.0


class Moody:
    """A user's object, whose ``state_dict`` raises ``mood`` while it has one."""

    def __init__(self) -> None:
        self.value, self.mood = 0, None

    def state_dict(self):
        """Say the value, or raise."""
        if self.mood is not None:
            raise self.mood
        return {"value": self.value}

    def load_state_dict(self, state):
        """Take a value."""
        self.value = state["value"]


@pytest.fixture
def make(arena_dir):
    """Return a maker of Checkpointers of a world of one, closed with the test."""
    made: list[replica.Checkpointer] = []

    def maker(state, *, mode="process", **options):
        given = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "timeout_s": 30.0}
        given |= {"redundancy": "none", "random_states": False, "background": mode}
        made.append(replica.Checkpointer(state, **given | options))
        return made[-1]

    yield maker
    for one in made:
        with contextlib.suppress(replica.PlanariaError):
            one.close()


def await_end(pid: int) -> None:
    """Wait until a process has ended and nobody has to bury it any more."""
    limit = time.monotonic() + SOON_S
    while psutil.pid_exists(pid) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid), psutil.Process(pid).status()


def test_a_life_is_the_same_in_both_modes(make, arena_dir, caplog):
    """Saves, refusals, a state that grows, failures, a restore: results, errors, events, log lines.

    What is seen with a thread and with a process is the same, word for word.
    """
    caplog.set_level(logging.INFO, logger="planaria")
    seen, said = {}, {}
    for mode in BACKGROUND:
        (arena_dir / mode).mkdir()
        caplog.clear()
        seen[mode] = life(partial(make, mode=mode, arena_dir=str(arena_dir / mode)))
        said[mode] = sorted(
            (record.levelname, re.sub(r"[0-9a-f]{8}\b|/\S+", "#", record.getMessage()))
            for record in caplog.records
            if "erasure code" not in record.getMessage()  # said once in every process
        )
    assert seen["process"] == seen["thread"]
    assert said["process"] == said["thread"]
    kinds = [one[0] for one in seen["process"] if type(one) is tuple and type(one[0]) is str]
    expected = ["StateError"] * 2 + ["ConfigError"] * 3 + ["SaveFailed", "RestoreAborted"]
    assert kinds == [*expected, "ConfigError"]
    assert ("WARNING", "step 8 cannot be staged") in said["process"]


def life(make) -> list:
    """Live one; what was seen."""
    seen, events = [], []
    moody = Moody()
    state = {"w": torch.zeros(1000), "n": {"a": [0]}, "moody": moody}

    def tell(call) -> None:
        try:
            seen.append(call())
        except Exception as error:  # noqa: BLE001 - what it is, is seen
            seen.append((type(error).__name__, str(error).replace(str(os.getpid()), "PID")))

    with make(state, on_event=events.append, interval_steps=2, when_busy="wait") as one:
        tell(one.start)
        tell(one.restore)
        moody.mood = ValueError("not yet")
        tell(lambda: one.save(2))
        moody.mood = None
        state["bad"] = object()
        tell(lambda: one.save(2))
        del state["bad"]
        for step in (2, 3, 4, 4):
            state["w"].fill_(step)
            state["n"]["a"].append(step)
            moody.value = step
            ticket = one.save(step)
            state["w"].fill_(-1)
            ticket.wait("committed", COMMIT_S)
            seen.append((ticket.step, ticket.skipped, ticket.reason, ticket.done))
        tell(lambda: one.save(2).step)
        tell(lambda: one.save(-1))
        tell(lambda: one.save(6, when_busy="never"))
        state["w"] = torch.full((200_000,), 6.0)
        tell(lambda: one.save(6).wait("committed", COMMIT_S))
        moody.mood = ValueError("a bad day")
        tell(lambda: one.save(8).wait("committed", COMMIT_S))
        moody.mood = None
        status = one.status()
        seen.append({name: status[name] for name in ("committed_step", "saves_aborted", "rank")})
        seen.append(status["last_error"])
        with pytest.raises(replica.ArenaBusy, match=f"open in this process, pid {os.getpid()}"):
            make({"x": 1}).start()
        state["w"] = torch.zeros(3)
        tell(one.restore)
        state["w"] = torch.zeros(200_000)
        tell(one.restore)
        seen.append((float(state["w"][-1]), state["n"], moody.value))
    seen.append([(event["event"], event["step"], event.get("outcome")) for event in events])
    seen.append(one.status())
    tell(lambda: one.save(10))
    return seen


def test_a_save_without_a_restore_is_told_by_the_trainers_log(make, caplog):
    """What the background process finds in memory and will overwrite, is warned of here."""
    with make({"x": 1}, mode="thread") as one:
        one.save(7).wait("committed", COMMIT_S)
    with make({"x": 1}) as one:
        one.save(1).wait("committed", COMMIT_S)
    assert "step 7 of job 'job' is in memory, and restore() was not called" in caplog.text


def test_a_group_of_threads_is_refused_on_every_rank(arena_dir):
    """Ranks of one process have no group that a second process could join: ConfigError on all."""
    groups = MemoryGroup.make(2)

    def start(rank):
        options = {"job": "job", "arena_dir": str(arena_dir), "node_id": f"node-{rank}"}
        replica.Checkpointer({"x": 1}, group=groups[rank], background="process", **options).start()

    for error in outcomes(2, start):
        assert isinstance(error, replica.ConfigError)
        assert "MemoryGroup of 2 ranks" in str(error)
    assert list(arena_dir.iterdir()) == []


def test_the_process_is_killed(make, caplog):
    """SIGKILL amid saves: the tickets name pid and signal, training goes on, all that was is whole.

    With ``on_error="raise"`` the next save raises instead. A new Checkpointer finds the last step.
    """
    state = {"w": torch.zeros(1000)}
    one = make(state)
    state["w"].fill_(1)
    one.save(1).wait("committed", COMMIT_S)
    pid, line, found = pid_of(one), one._engine._line, []

    def look(record):
        if "no further step is saved" in record.getMessage():
            found.append(line.lost)
        return True

    caplog.handler.addFilter(look)
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    await_end(pid)
    how = rf"background process, pid {pid}, was killed by signal 9"
    late = one.save(2)
    assert late.failed
    with pytest.raises(replica.SaveFailed, match=how):
        late.wait()
    assert how in caplog.text
    # Whoever finds it lost finds that it was told.
    assert found == [""]
    status = one.status()
    assert (status["committed_step"], status["saves_failed_in_a_row"]) == (1, 1)
    assert pid_in(status["broken"]) == pid_in(status["last_error"]) == pid
    with pytest.raises(replica.RestoreAborted, match=how):
        one.restore()
    one.close()
    assert one.status() == {"open": False}
    again = make(state, on_error="raise")
    assert again.restore() == 1
    os.kill(pid_of(again), signal.SIGKILL)
    await_end(pid_of(again))
    with pytest.raises(replica.SaveFailed, match="was killed by signal 9"):
        again.save(2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_save_in_a_compiled_function_is_no_part_of_it(make, mode):
    """The compiler leaves it out, and neither traces into it nor runs it as its own operations."""
    state = {"w": torch.zeros(300, 300)}
    one = make(state, mode=mode)

    @torch.compile(backend="eager")
    def step(number):
        state["w"].add_(1)
        return one.save(number, when_busy="wait")

    for number in (1, 2, 3):
        step(number).wait("committed", COMMIT_S)
    state["w"].zero_()
    assert one.restore() == 3
    assert state["w"].eq(3).all()


def pid_in(text: str) -> int:
    """Return the pid that a sentence names."""
    return int(text.partition("pid ")[2].partition(",")[0])


def test_signals_to_the_process(make):
    """What a launcher or Ctrl-C sends to all processes does not end it: a save still commits.

    SIGSTOP: a save under way ends by the deadline and names the process; training goes on.
    """
    one = make({"w": torch.zeros(10)}, timeout_s=STANDSTILL_S)
    one.save(1).wait("committed", COMMIT_S)
    pid = pid_of(one)
    assert os.getpgid(pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    one.save(2).wait("committed", COMMIT_S)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    ticket = one.save(3)
    assert time.monotonic() - started < STANDSTILL_S + SOON_S
    assert ticket.failed
    assert f"pid {pid}" in ticket.reason
    assert f"not answered for {STANDSTILL_S} s" in ticket.reason
    one.close()


def test_it_starts_without_what_only_a_trainer_needs():
    """Of torch's distributed tensors, half of the time to load all, it loads nothing."""
    code = f"{BOOT}; import replica.background; print(*sys.modules)"
    command = [sys.executable, "-c", code, "\n".join(sys.path)]
    loaded = set(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    )
    assert "replica.engine" in loaded
    assert not loaded & {"replica.snapshot", "torch.distributed.tensor", "torch.distributed.fsdp"}


def test_a_listener_that_exits_is_told_by_the_next_save(make, caplog):
    """on_event calls sys.exit(): nothing is saved any more, and the ticket says why."""

    def exits(event):
        raise SystemExit(f"at {event['step']}")

    one = make({"w": torch.zeros(10)}, on_event=exits)
    one.save(1)
    await_end(pid_of(one))
    with pytest.raises(replica.SaveFailed, match="SystemExit: at 1"):
        one.save(2).wait()
    assert "no further save in this process" in caplog.text


ORPHANED = """
import json, os, signal, sys, time
import torch, replica
one = replica.Checkpointer(
    {"w": torch.full((1000,), 5.0)}, job="job", node_id="a", arena_dir=sys.argv[1],
    redundancy="none", random_states=False, background="process",
)
one.save(5).wait("committed", 60)
loader = os.fork()
if loader == 0:
    os.setsid()
    time.sleep(600)
print(json.dumps([one._engine._line.pid, loader]), flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raise":
    os.kill(loader, signal.SIGKILL)
    os.waitpid(loader, 0)
    raise RuntimeError("the script's own")
"""


def test_the_trainer_ends(arena_dir, make):
    """Killed with a forked child alive that has its descriptors, or by an error of its own.

    The process ends with it, its arena is free at once, and the next start restores. The script
    keeps its exit code, says nothing on standard output and only its own traceback on the other.
    """
    codes = {"kill": -signal.SIGKILL, "raise": 1}
    scripts = {ending: orphaned(arena_dir / ending, ending) for ending in codes}
    for ending, script in scripts.items():
        pid, loader = json.loads(script.stdout.readline())
        try:
            assert script.wait(SOON_S) == codes[ending]
            await_end(pid)
            assert (identify(loader) is not None) == (ending == "kill")
            if ending == "kill":
                state = {"w": torch.zeros(1000)}
                with make(state, arena_dir=str(arena_dir / ending)) as again:
                    assert again.restore() == 5
                assert float(state["w"][0]) == 5.0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(loader, signal.SIGKILL)
        out, err = script.communicate(timeout=SOON_S)
        assert out == ""
        assert err.count("Traceback") == (ending == "raise"), err


def orphaned(arena_dir, ending) -> subprocess.Popen:
    """Start a script that commits a step, says two pids and ends so."""
    arena_dir.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", ORPHANED, str(arena_dir), ending],
        env=worker_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_head_names_the_trainer(make, arena_dir):
    """Who looks at the arena sees the trainer's pid; another start is refused by that."""
    one = make({"w": torch.zeros(10)})
    one.start()
    (view,) = read_arenas(arena_dir)
    assert (view.head.pid, view.alive) == (os.getpid(), True)
    code = (
        "import sys, json; from replica.arena import Arena\n"
        "Arena.open(sys.argv[1], **json.loads(sys.argv[2]))"
    )
    asked = OPEN | {"node_id": "a", "job": "job", "timeout_s": 5.0}
    other = subprocess.run(
        [sys.executable, "-c", code, str(arena_dir), json.dumps(asked)],
        env=worker_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ArenaBusy" in other.stderr
    assert f"pid {os.getpid()} of job 'job' is alive" in other.stderr
    one.close()
    (view,) = read_arenas(arena_dir)
    assert (view.head.pid, view.alive) == (0, False)
    Arena.open(arena_dir, **asked).close()
    assert not [path for path in Path("/proc/self/fd").iterdir() if "scratch" in str(path)]
