"""However the demo ends, it leaves no process and no file on tmpfs, and ends in time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from replica.demo.trees import NODE_VARIABLE, processes_of

pytestmark = [pytest.mark.real, pytest.mark.long]

DEADLINE_S = 90


@pytest.fixture
def demo(tmp_path, arena_dir):
    """Start a demo whose directories are the test's own; return it once a worker's agent runs."""
    (tmp_path / "work").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "replica.demo.cluster", "--nodes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "PLANARIA_ARENA_DIR": str(arena_dir),
            "TMPDIR": str(tmp_path / "work"),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])
            ),
        },
    )
    try:
        wait_for_line(process, "starting the nodes")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for_line(process, text):
    """Read the demo's story up to a sentence."""
    deadline = time.monotonic() + DEADLINE_S
    while select.select([process.stdout], [], [], deadline - time.monotonic())[0]:
        if text in (line := process.stdout.readline()):
            return
        assert line, f"the demo ended before it said {text!r}"
    raise AssertionError(f"the demo did not say {text!r}")


def wait_until(condition, what):
    """Poll until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {DEADLINE_S} s: {what}"
        time.sleep(0.02)
    return found


def run_id_of(arena_dir):
    """Return the id of the only run in the test's arena directory."""
    (directory,) = arena_dir.iterdir()
    return directory.name.removeprefix("planaria-demo-")


def agents_of(run_id):
    """Return the processes of a run's nodes by node."""
    found = processes_of(run_id)
    return {process.environ()[NODE_VARIABLE]: process for process in found}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing(demo, arena_dir, tmp_path, number):
    """Ctrl-C or SIGTERM while nodes run: exit code 130, no process, no arena, no work directory."""
    run_id = run_id_of(arena_dir)
    wait_until(lambda: len(agents_of(run_id)) == 2, "two agents")
    demo.send_signal(number)
    assert demo.wait(DEADLINE_S) == 130
    assert processes_of(run_id) == []
    assert list(arena_dir.iterdir()) == []
    assert list((tmp_path / "work").iterdir()) == []


def test_killed_demo_leaves_nothing(demo, arena_dir):
    """SIGKILL of the demo itself: its store process ends the rest and removes the arenas."""
    run_id = run_id_of(arena_dir)
    wait_until(lambda: len(agents_of(run_id)) == 2, "two agents")
    demo.kill()
    wait_until(lambda: not list(arena_dir.iterdir()), "arenas removed")
    assert processes_of(run_id) == []


def test_failed_demo_names_its_work_directory_and_leaves_nothing_else(demo, arena_dir, tmp_path):
    """An agent that dies unplanned: exit code 4, the sentence names it, logs are kept and named."""
    run_id = run_id_of(arena_dir)
    agent = wait_until(lambda: agents_of(run_id).get("node-1"), "an agent")
    psutil.Process(agent.pid).kill()
    told, _ = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 4
    assert "the demo failed: ended with an error: node-1 (exit code -9)" in told
    (kept,) = (tmp_path / "work").iterdir()
    assert f"logs and journals kept in {kept}" in told
    assert processes_of(run_id) == []
    assert list(arena_dir.iterdir()) == []


def test_demo_without_a_place_for_arenas_says_so(tmp_path):
    """No tmpfs: one sentence and exit code 4, before anything is started."""
    ended = subprocess.run(
        [sys.executable, "-m", "replica.demo.cluster"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env={**os.environ, "PLANARIA_ARENA_DIR": str(tmp_path / "absent")},
    )
    assert ended.returncode == 4
    assert "no directory for the arenas" in ended.stdout
