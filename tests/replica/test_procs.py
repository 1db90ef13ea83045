"""A process is known by pid and start time, and ended only when it is surely the one meant."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from replica import procs
from replica.procs import Process, end, identify, my_agent, my_parent, myself
from tests.replica.arena_tools import descriptors

WAITER = "import sys; print('up', flush=True); sys.stdin.readline()"


@pytest.fixture
def waiter():
    """Yield a process that runs until it is told or killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_process_keeps_its_identity_while_it_lives(waiter):
    """Two looks give one identity; after the end there is none, and the old one is not alive."""
    found = identify(waiter.pid)
    assert found == identify(waiter.pid)
    assert found.alive
    waiter.kill()
    waiter.wait()
    assert identify(waiter.pid) is None
    assert not found.alive


def test_a_zombie_is_gone(waiter):
    """A process that has ended and was not waited for keeps its pid and is not alive."""
    found = identify(waiter.pid)
    waiter.kill()
    os.waitid(os.P_PID, waiter.pid, os.WEXITED | os.WNOWAIT)
    assert not found.alive
    assert identify(waiter.pid) is None


@pytest.mark.parametrize("name", ["a) R 1 2 3 (b", "x y", ")", "((("])
def test_a_command_name_full_of_brackets_is_no_obstacle(name):
    """The name in /proc/PID/stat may be anything: a child renames itself and is identified."""
    code = (
        "import sys; open('/proc/self/comm', 'w').write(sys.argv[1]); "
        "print(open('/proc/self/stat').read().rsplit(')', 1)[1].split()[19], flush=True); "
        "sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        start = int(child.stdout.readline())
        assert identify(child.pid) == Process(child.pid, start)
        child.stdin.close()


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_no_process_has_an_impossible_pid(pid):
    """Pid 0 stands for nobody in a head, and must never be found alive."""
    assert identify(pid) is None
    assert not Process(pid, 0).alive


def test_we_and_our_parent_are_alive():
    """The two identities that go into a head are those of this process and its parent."""
    assert myself() == Process(os.getpid(), myself().start)
    assert my_parent() == identify(os.getppid())


@pytest.mark.parametrize(
    ("environ", "has_agent"),
    [({}, False), ({"TORCHELASTIC_RUN_ID": ""}, False), ({"TORCHELASTIC_RUN_ID": "job"}, True)],
)
def test_only_a_launcher_is_an_agent(environ, has_agent):
    """The parent counts as an agent when torchrun's variable is set, and not for a plain script."""
    assert my_agent(environ) == (my_parent() if has_agent else None)


def test_ending_kills_and_waits(waiter):
    """After end() returns "" the process is gone at once, killed by SIGKILL."""
    assert end(identify(waiter.pid), 10) == ""
    assert identify(waiter.pid) is None
    assert waiter.wait() == -signal.SIGKILL


def test_ending_what_has_ended_is_no_error(waiter):
    """A process that is gone by itself, reaped or not, counts as ended."""
    found = identify(waiter.pid)
    waiter.kill()
    os.waitid(os.P_PID, waiter.pid, os.WEXITED | os.WNOWAIT)
    assert end(found, 0) == ""
    waiter.wait()
    assert end(found, 0) == ""


def test_a_stranger_with_the_same_pid_is_left_alone(waiter):
    """An identity with another start time is somebody who died: the pid's heir is not killed."""
    found = identify(waiter.pid)
    assert end(dataclasses.replace(found, start=found.start - 1), 10) == ""
    assert found.alive


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_left_alone_even_by_root():
    """Root could kill anyone; a process whose user is another is refused with its pid."""
    command = [sys.executable, "-c", f"import os; os.setuid(65534); {WAITER}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        assert f"pid {child.pid} belongs to another user" in end(identify(child.pid), 10)
        child.stdin.close()
    assert child.returncode == 0


def test_a_process_that_does_not_end_is_reported_at_the_deadline(waiter, monkeypatch):
    """With the signal lost on its way, end() gives up at its deadline, naming pid and seconds."""
    monkeypatch.setattr(procs.signal, "pidfd_send_signal", lambda *_: None)
    started = time.monotonic()
    assert end(identify(waiter.pid), 0.05) == f"pid {waiter.pid} still runs 0.1 s after SIGKILL"
    assert 0.05 <= time.monotonic() - started < 5


def test_ending_leaks_no_descriptor(waiter):
    """Every way through end() closes the descriptor of the process: counted before and after."""
    found, before = identify(waiter.pid), descriptors()
    end(dataclasses.replace(found, start=0), 1)
    end(found, 10)
    end(found, 10)
    assert descriptors() <= before
