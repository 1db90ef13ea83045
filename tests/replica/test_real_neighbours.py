"""Other jobs, dead lives of our own and strangers on the network, between real processes."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from replica.arena import read_arenas
from replica.errors import ArenaError

pytestmark = pytest.mark.real

JOBS = ("one", "two", "three")


def kill(real, world):
    """Kill every rank of a world at once; fresh workers in their place."""
    for worker in world.workers:
        os.kill(worker.pid, signal.SIGKILL)
    for worker in world.workers:
        worker.died()
        real.pool.remove(worker)


def bytes_of(arena_dir, job):
    """Return how many bytes lie in the arenas of a job."""
    return sum(view.bytes_allocated for view in read_arenas(arena_dir, job))


def test_a_killed_job_finds_its_own_and_no_other_does(real):
    """Two jobs of one user on one host save the same steps; one is killed with SIGKILL.

    The living one goes on. The killed one, started again under its name, has its last step back,
    bit for bit; under a new name it finds nothing. Nothing that is not its own changes meanwhile.
    """
    one, two = (real.open("ab", job=job) for job in JOBS[:2])
    for step in (1, 2):
        two.begin("commit", step=step)
        assert one.each("commit", step=step) == ["committed"] * 2
        assert [worker.result() for worker in two.workers] == ["committed"] * 2
    used = bytes_of(real.arena_dir, "one")
    kill(real, one)
    three = real.open("ab", job="three")
    assert three.each("restore") == [None] * 2
    assert two.each("commit", step=3) == ["committed"] * 2
    three.leave()
    again = real.open("ab", three.workers, job="one")
    assert again.each("restore") == [2] * 2
    assert all(again.each("state_is", step=2))
    assert bytes_of(real.arena_dir, "one") == used
    assert two.each("restore") == [3] * 2
    assert all(two.each("state_is", step=3))


def test_lives_that_were_killed_leave_what_one_life_uses(real):
    """Three lives of a job are killed after a commit each: the arenas are as large as after one."""
    sizes, steps = [], []
    for life in range(3):
        world = real.open("a", redundancy="none")
        steps += world.each("restore")
        assert world.each("commit", step=10 + life) == ["committed"]
        sizes.append(sorted((v.path, v.bytes_allocated) for v in read_arenas(real.arena_dir)))
        kill(real, world)
    assert steps == [None, 10, 11]
    assert sizes[0] == sizes[1] == sizes[2]


def listening(pid):
    """Return the TCP ports on which a process or a child of it listens, by the kernel's list."""
    inodes = set()
    pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
    for path in (path for one in pids for path in Path(f"/proc/{one}/fd").iterdir()):
        target = str(path.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            ports.add(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))  # noqa: S104
    return sorted(ports)


NOISE = [b"", b"\0" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(1 << 16)]


def test_strangers_on_our_ports_change_nothing(real):
    """Noise is sent to every port that a rank listens on, between and during saves.

    Saves commit and restores are right all the same, whether a stranger hangs up or stays.
    """
    world = real.open("ab")
    assert world.each("commit", step=1) == ["committed"] * 2
    ports = [place for worker in world.workers for place in listening(worker.pid)]
    assert ports, "gloo listens for its pairs, or this test looks in the wrong place"
    held = []
    for step in (2, 3):
        world.begin("commit", step=step)
        for place in ports:
            for noise in NOISE:
                try:
                    stranger = socket.create_connection(place, timeout=5.0)
                    held.append(stranger)
                    stranger.sendall(noise)
                except OSError:
                    continue  # hung up on, or nobody listens there any more: as good
        assert held
        assert [worker.result() for worker in world.workers] == ["committed"] * 2
    assert world.each("restore") == [3] * 2
    assert all(world.each("state_is", step=3))
    for stranger in held:
        stranger.close()
    assert world.each("commit", step=4) == ["committed"] * 2
    again = real.reopen(world)
    assert again.each("restore") == [4] * 2
    assert all(again.each("state_is", step=4))


def test_a_directory_that_another_user_made_first_is_refused_by_all(real):
    """Another user has made what would be our directory: all ranks refuse it, and it stays."""
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's directory")
    place = real.arena_dir / f"planaria-{os.geteuid()}"
    place.mkdir(mode=0o755)
    (place / "job").mkdir()
    os.chown(place, 65534, 65534)
    world = real.open("ab")
    for kind, text in world.fail("start"):
        assert kind == ArenaError.__name__
        assert f"{place} belongs to user 65534" in text
    assert [path.name for path in place.iterdir()] == ["job"]
    os.chown(place, 0, 0)
