"""Bad input between real processes: one clear error on every rank, and nothing is lost."""

from __future__ import annotations

import contextlib
import re

import pytest

pytestmark = pytest.mark.real


def test_a_value_that_cannot_be_carried_is_named_everywhere(real):
    """Only rank 1's state has a lock: both ranks raise StateError with rank, key path and type."""
    world = real.open("ab")
    world.each("poison", ranks=[1])
    for kind, text in world.fail("start"):
        assert kind == "StateError"
        assert all(word in text for word in ("rank 1", "nested", "bad", "lock"))
    world.each("cure", ranks=[1])
    assert world.each("commit", step=1) == ["committed"] * 2
    world.each("poison", ranks=[1])
    for outcome in world.each("commit", step=2):
        assert "rank 1" in outcome
        assert "bad" in outcome
    world.each("cure", ranks=[1])
    assert world.each("restore") == [1] * 2
    assert world.each("commit", step=3) == ["committed"] * 2


def test_ranks_that_differ_are_refused(real):
    """Another format or option, too few nodes, no name: refused at start, on both ranks alike."""
    world = real.world("ab")
    world.make(**real.options())
    world[1].call("make", owner=1, step=0, node_id="b", **real.options(timeout_s=19.0))
    check_refused(world, "ConfigError", r"timeout_s differs: rank 0 on node a .* rank 1 on node b")
    world.make(**real.options(redundancy="stripe:3+1"))
    check_refused(world, "LayoutError", r"stripe:3\+1.*5 nodes.*2")
    world.make(**real.options(job=None))
    check_refused(world, "ConfigError", r"PLANARIA_JOB")
    world[1].call("pretend", module="opening", name="FORMAT_VERSION", value=99)
    world.make(**real.options())
    check_refused(
        world, "ConfigError", r"format differs: rank 0 on node a .* rank 1 on node b has 99"
    )


def check_refused(world, kind, pattern):
    """Every rank raises the same kind of error, in words that match."""
    for found, text in world.fail("start"):
        assert found == kind
        assert re.search(pattern, text), text


def test_another_world_size_is_refused(real):
    """A job saved by two ranks is started with three: each says both numbers and what to do."""
    world = real.open("ab")
    assert world.each("commit", step=1) == ["committed"] * 2
    world.leave()
    larger = real.open("abc", [*world.workers, *real.pool.take(1)])
    for kind, text in larger.fail("restore"):
        assert kind == "ConfigError"
        assert "saved by 2 ranks" in text
        assert "has 3" in text
        assert "planaria clean" in text
    larger.each("give_up")
    again = real.open("ab", world.workers)
    assert again.each("restore") == [1] * 2


def test_a_full_tmpfs_is_an_error_on_every_rank(real, tmpfs_of_4_mib):
    """No room at start, and none left when a shard grows: ArenaFull with bytes, never SIGBUS."""
    here = {"arena_dir": str(tmpfs_of_4_mib), "redundancy": "copies:1"}
    world = real.open("ab", elements=200_000, **here)
    for kind, text in world.fail("start"):
        assert kind == "ArenaFull"
        needed, available = (
            int(re.search(rf"(\d+) bytes {word}", text)[1]) for word in ("needed", "available")
        )
        assert needed > 8 * 800_000 > 4 << 20 >= available > 0
    world.make(**real.options(elements=1000, **here))
    assert world.each("commit", step=1) == ["committed"] * 2
    filler = tmpfs_of_4_mib / "filler"
    fill(filler)
    world.each("resize", elements=50_000)
    for outcome in world.each("commit", step=2):
        assert re.search(r"rank \d: ArenaFull: .* \d+ bytes needed, \d+ bytes free", outcome), (
            outcome
        )
    world.each("resize", elements=1000)
    assert world.each("restore") == [1] * 2
    assert all(world.each("state_is", step=1))
    filler.unlink()
    world.each("resize", elements=50_000)
    assert world.each("commit", step=3) == ["committed"] * 2
    assert world.each("restore") == [3] * 2


def test_a_holder_without_room_refuses_what_it_is_offered(real, tmpfs_of_4_mib):
    """Only rank 1's shard grows and rank 0's tmpfs is full: both name rank 0, and step 1 stays."""
    roomy = str(real.arena_dir)
    world = real.world("ab")
    dirs = (str(tmpfs_of_4_mib), roomy)
    for rank, place in enumerate(dirs):
        options = real.options(arena_dir=place, redundancy="copies:1", elements=1000)
        world[rank].call("make", owner=rank, step=0, node_id=world.nodes[rank], **options)
    assert world.each("commit", step=1) == ["committed"] * 2
    fill(tmpfs_of_4_mib / "filler")
    world.each("resize", ranks=[1], elements=50_000)
    for outcome in world.each("commit", step=2):
        assert re.search(r"rank 0.* \d+ bytes needed, \d+ bytes free", outcome), outcome
    world.each("resize", ranks=[1], elements=1000)
    assert world.each("restore") == [1] * 2


def fill(path):
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
