"""Fixtures of the arena's tests: other processes, a full file system, an opened arena."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import partial

import pytest

from replica import copies, device_copy, fault_points
from replica.arena import Arena
from tests.replica.arena_tools import OPEN, Children
from tests.replica.background_tools import Faults
from tests.replica.control import ADDRESS
from tests.replica.fake_device import FakeDevice
from tests.replica.pool import Pool
from tests.replica.strikes import raise_interrupted, strike_at
from tests.replica.worlds import Host


@pytest.fixture
def children():
    """Start processes for a test and end them with it."""
    started = Children()
    yield started
    started.end_all()


@pytest.fixture
def open_arena(arena_dir):
    """Return a function that opens an arena, options changed at will, closed with the test."""
    opened = []

    def open_it(directory=arena_dir, **changes) -> Arena:
        opened.append(Arena.open(directory, **OPEN | changes))
        return opened[-1]

    yield open_it
    for arena in opened:
        arena.close()


@pytest.fixture
def small_tmpfs(arena_dir):
    """Yield a tmpfs of 2 MiB of the test's own; only root may mount one."""
    yield from mounted_tmpfs(arena_dir / "small", "2m")


@pytest.fixture
def tmpfs_of_4_mib(arena_dir):
    """Yield one of 4 MiB."""
    yield from mounted_tmpfs(arena_dir / "small", "4m")


def mounted_tmpfs(point, size):
    """Mount a tmpfs of a size, yield where, and unmount it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs of a given size needs root")
    point.mkdir()
    mounted = subprocess.run(
        [
            shutil.which("mount") or "mount",
            "-t",
            "tmpfs",
            f"-osize={size},mode=700",
            "tmpfs",
            point,
        ],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    yield point
    # Lazily: a mapping that a failed test still holds must not keep the directory busy.
    subprocess.run([shutil.which("umount") or "umount", "--lazy", point], check=True)


POOL = pytest.StashKey[Pool]()


def pytest_collection_finish(session):
    """Start the workers, if a test wants them: they import torch while other tests run."""
    pool = session.config.stash.setdefault(POOL, Pool(5))
    wanted = not session.config.option.collectonly
    if wanted and any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
        pool.warm()


def pytest_unconfigure(config):
    """End the workers, even those that no test has used."""
    if POOL in config.stash:
        config.stash[POOL].end()


@pytest.fixture(scope="session")
def pool(pytestconfig):
    """Return the warm workers of the whole session."""
    return pytestconfig.stash[POOL]


@pytest.fixture
def real(pool, arena_dir):
    """Return a host on which worlds of real processes are made."""
    host = Host(pool, arena_dir)
    yield host
    host.close()


@pytest.fixture
def faults(monkeypatch):
    """Return the faults of background processes of this one."""
    monkeypatch.setenv(ADDRESS, "")
    yield Faults()
    fault_points.load_in_background("")


@pytest.fixture
def interrupts():
    """Have SIGUSR1 raise ``Interrupted``."""
    former = signal.signal(signal.SIGUSR1, raise_interrupted)
    yield
    signal.signal(signal.SIGUSR1, former)


@pytest.fixture
def strike(interrupts, monkeypatch):
    """Return a function that has the signal strike at the first passage of a method of ours."""
    return partial(strike_at, monkeypatch)


@pytest.fixture
def device(monkeypatch):
    """Have every tensor of two elements or more count as one of a fake GPU."""
    fake = FakeDevice()
    monkeypatch.setattr(copies, "on_host", lambda value: value.numel() < 2)
    monkeypatch.setattr(device_copy, "CudaLane", fake.make_lane)
    monkeypatch.setattr(device_copy, "LOCKS", fake.locks)
    return fake
