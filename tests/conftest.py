"""What every test shares: one seed for the session, hypothesis profiles, arenas that clean up.

Every random choice follows from one number, printed first and, after a failure, last.
``PLANARIA_TEST_SEED=N`` replays it; ``PLANARIA_TEST_PROFILE`` picks dev, ci or deep.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from replica import checkpointer

TMPFS = Path("/dev/shm")

settings.register_profile("dev", deadline=None, print_blob=True, max_examples=30)
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=100)
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(
    os.environ.get("PLANARIA_TEST_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

SEED = int(os.environ.get("PLANARIA_TEST_SEED") or secrets.randbits(32))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Hand the session's seed to hypothesis too, unless its own option names another."""
    if config.getoption("--hypothesis-seed", default=None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_collection_modifyitems(items):
    """Leave the long ones to CI, and to who asks for them."""
    if os.environ.get("CI") or os.environ.get("PLANARIA_TEST_LONG"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(
                pytest.mark.skip(reason="long: runs where CI or PLANARIA_TEST_LONG is set")
            )


def pytest_report_header():
    """Print the seed first."""
    return f"seed: {SEED} (PLANARIA_TEST_SEED={SEED} repeats this run)"


def pytest_terminal_summary(terminalreporter):
    """Print the seed last, when something failed."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"repeat with: PLANARIA_TEST_SEED={SEED} make test", red=True)


@pytest.fixture
def rng(request):
    """Return a numpy Generator of this test's own, the same whatever other tests run."""
    return np.random.default_rng([SEED, *request.node.nodeid.encode()])


@pytest.fixture(autouse=True)
def on_threads(monkeypatch):
    """Where a test says nothing, the work behind ``save`` is in its own process, to be seen.

    What starts as a script of its own has the default.
    """
    monkeypatch.setattr(
        checkpointer,
        "background_of",
        lambda options, _: "thread" if options.background == "auto" else options.background,
    )


@pytest.fixture
def arena_dir(tmp_path):
    """Yield a fresh directory on tmpfs (on disk where there is none), removed afterwards."""
    if not (TMPFS.is_dir() and os.access(TMPFS, os.W_OK)):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="planaria-test-", dir=TMPFS))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
