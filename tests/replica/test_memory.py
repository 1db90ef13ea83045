"""Facts about memory are read right from every kind of control group, and the check is exact."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica import memory
from replica.errors import ArenaError
from replica.memory import (
    MemoryFacts,
    cgroup_free_bytes,
    check_memory,
    filesystem_of,
    memory_facts,
    ram_available_bytes,
)

GIB = 1 << 30
FACTS = MemoryFacts(
    tmpfs_free_bytes=8 * GIB,
    ram_available_bytes=20 * GIB,
    cgroup_free_bytes=12 * GIB,
    device=1,
    filesystem="tmpfs",
    boot_id="b",
)
SIZES = st.integers(0, 64 * GIB)


def check(facts, **sizes):
    """Check with a node and a directory whose names the sentence must repeat."""
    return check_memory(facts, node="n7", arena_dir="/dev/shm", **sizes)


@pytest.mark.parametrize(
    ("sizes", "limit", "needed", "available"),
    [
        ({"arena_bytes": 8 * GIB}, "tmpfs", 8 * GIB, 8 * GIB),
        ({"arena_bytes": 9 * GIB, "present_bytes": GIB}, "tmpfs", 8 * GIB, 8 * GIB),
        (
            {"arena_bytes": 6 * GIB, "scratch_bytes": 6 * GIB},
            "cgroup",
            12 * GIB,
            12 * GIB,
        ),
    ],
)
def test_the_last_byte_fits_and_one_more_is_refused(sizes, limit, needed, available):
    """Exactly what is available passes; one byte more fails, naming both numbers and the node."""
    fits = check(FACTS, **sizes)
    assert (fits.ok, fits.limit, fits.needed_bytes, fits.available_bytes) == (
        True,
        limit,
        needed,
        available,
    )
    refused = check(FACTS, **sizes | {"arena_bytes": sizes["arena_bytes"] + 1})
    assert (refused.ok, refused.limit, refused.needed_bytes) == (False, limit, needed + 1)
    for part in ("n7", str(needed + 1), str(available)):
        assert part in refused.sentence


def test_the_refusal_says_what_to_do():
    """Each limit has its own remedy in the sentence, so that the user knows which knob to turn."""
    small = {
        "tmpfs_free_bytes": "--shm-size",
        "cgroup_free_bytes": "memory limit",
        "ram_available_bytes": "more nodes",
    }
    for field, cure in small.items():
        verdict = check(replace(FACTS, **{field: 10}), arena_bytes=GIB)
        assert not verdict.ok
        assert cure in verdict.sentence


def test_limits_that_are_not_there_do_not_refuse():
    """Neither a tmpfs without a size nor a missing control group limit stands in the way."""
    facts = replace(FACTS, tmpfs_free_bytes=None, cgroup_free_bytes=None)
    verdict = check(facts, arena_bytes=20 * GIB)
    assert (verdict.ok, verdict.limit) == (True, "ram")


def test_a_directory_on_disk_is_refused():
    """An arena on a disk file system would be slow without a word: it is refused by its type."""
    verdict = check(replace(FACTS, filesystem="ext4"), arena_bytes=1)
    assert not verdict.ok
    assert "ext4" in verdict.sentence


@given(st.tuples(SIZES, SIZES, SIZES), st.tuples(st.none() | SIZES, st.none() | SIZES, SIZES))
def test_the_check_agrees_with_three_comparisons(needs, limits):
    """For drawn sizes the verdict equals the three inequalities written out."""
    (arena, present, scratch), (tmpfs, cgroup, ram) = needs, limits
    facts = replace(
        FACTS, tmpfs_free_bytes=tmpfs, cgroup_free_bytes=cgroup, ram_available_bytes=ram
    )
    files = max(0, arena - present)
    right = (
        (tmpfs is None or files <= tmpfs)
        and (cgroup is None or files + scratch <= cgroup)
        and files + scratch <= ram
    )
    verdict = check(facts, arena_bytes=arena, present_bytes=present, scratch_bytes=scratch)
    assert verdict.ok == right
    assert (verdict.needed_bytes <= verdict.available_bytes) == right


class Machine:
    """A made-up /proc and control-group tree under one directory."""

    def __init__(self, root):
        self.root, self.proc = root, root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.mounts, self.groups = [], []

    def mount(self, kind: str, root: str, point: str, options: str) -> None:
        """Add a line to mountinfo."""
        line = f"9 1 0:9 {root} {point} rw,relatime shared:1 - {kind} {kind} {options}\n"
        self.mounts.append(line)

    def group(self, path: str, stat: str = "", **numbers: object) -> None:
        """Write control files: ``memory_max=5`` becomes memory.max with 5 in it."""
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.stat").write_text(stat)
        for name, number in numbers.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{number}\n")

    def free(self, *groups: str) -> int | None:
        """Ask what is free for a process in these groups."""
        (self.proc / "self" / "cgroup").write_text("".join(f"{g}\n" for g in groups))
        (self.proc / "self" / "mountinfo").write_text("".join(self.mounts))
        return cgroup_free_bytes(self.proc, self.root)


@pytest.fixture
def machine(tmp_path):
    """Return an empty made-up machine."""
    return Machine(tmp_path)


def test_version_2_counts_droppable_cache_as_free(machine):
    """Limit less use, plus file pages of both lists; anonymous, shmem and slab pages stay used."""
    machine.mount("cgroup2", "/", "/sys/fs/cgroup", "rw")
    stat = "anon 500\nfile 90\nshmem 60\ninactive_file 20\nactive_file 10\nslab 7\n"
    machine.group("/sys/fs/cgroup/a", stat, memory_max=1000, memory_current=600)
    assert machine.free("0::/a") == 1000 - 600 + 20 + 10


def test_the_tightest_level_counts(machine):
    """A limit on any group above ours binds; levels that say "max" or have no files do not."""
    machine.mount("cgroup2", "/", "/sys/fs/cgroup", "rw")
    machine.group("/sys/fs/cgroup/a", memory_max=1000, memory_current=950)
    machine.group("/sys/fs/cgroup/a/b", memory_max="max", memory_current=900)
    machine.group("/sys/fs/cgroup/a/b/c", memory_max=700, memory_current=100)
    assert machine.free("0::/a/b/c") == 50


def test_version_1_and_its_no_limit(machine):
    """Version 1 has other file names, totals over the tree, and a huge number for "no limit"."""
    machine.mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory")
    stat = "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 5\n"
    group = "/sys/fs/cgroup/memory/job"
    machine.group(group, stat, memory_limit_in_bytes=500, memory_usage_in_bytes=400)
    assert machine.free("4:cpu,memory:/job", "3:cpu:/other") == 135
    machine.group(group, stat, memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=4)
    assert machine.free("4:cpu,memory:/job") is None


def test_a_hybrid_machine_is_bound_by_either_version(machine):
    """Both versions mounted, as systemd's hybrid mode does: the smaller of the two counts."""
    machine.mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory")
    machine.mount("cgroup2", "/", "/sys/fs/cgroup/unified", "rw")
    machine.group("/sys/fs/cgroup/memory", memory_limit_in_bytes=90, memory_usage_in_bytes=10)
    machine.group("/sys/fs/cgroup/unified/x", memory_max=70, memory_current=10)
    assert machine.free("5:memory:/", "0::/x") == 60


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../..", "/elsewhere"])
def test_in_a_container_the_mount_point_is_our_group(machine, path):
    """Whatever path the host's view gives, the group that is mounted for the container is read."""
    machine.mount("cgroup2", "/docker/abc", "/sys/fs/cgroup", "rw")
    machine.group("/sys/fs/cgroup", memory_max=64, memory_current=60)
    assert machine.free(f"0::{path}") == 4


def test_use_above_the_limit_leaves_nothing(machine):
    """A limit lowered below present use gives 0 bytes, not a negative number."""
    machine.mount("cgroup2", "/", "/sys/fs/cgroup", "rw")
    machine.group("/sys/fs/cgroup/a", memory_max=10, memory_current=20)
    assert machine.free("0::/a") == 0


def test_without_control_groups_there_is_no_limit(machine):
    """A machine that mounts none, or whose kernel has none, has no limit of that kind."""
    assert machine.free() is None
    assert cgroup_free_bytes(machine.root / "nowhere", machine.root) is None


def test_mount_points_with_blanks_are_read(machine):
    """Mountinfo writes a blank as backslash 040: the control files are found there all the same."""
    machine.mount("cgroup2", "/", "/sys/my\\040groups", "rw")
    machine.group("/sys/my groups", memory_max=9, memory_current=1)
    assert machine.free("0::/") == 8


def test_ram_without_the_kernels_estimate_is_an_error(machine):
    """MemAvailable is read in kilobytes; a meminfo without it is an ArenaError, not a crash."""
    (machine.proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   3 kB\n")
    assert ram_available_bytes(machine.proc) == 3072
    (machine.proc / "meminfo").write_text("MemTotal: 9 kB\n")
    with pytest.raises(ArenaError, match="MemAvailable"):
        ram_available_bytes(machine.proc)


def test_the_facts_of_this_machine_are_plausible(arena_dir):
    """Real facts agree with the operating system's own: device, free bytes, boot, positive RAM."""
    facts = memory_facts(arena_dir)
    assert facts.device == arena_dir.stat().st_dev
    assert facts.filesystem == filesystem_of(facts.device) != "unknown"
    assert re.fullmatch(r"[0-9a-f-]{36}", facts.boot_id)
    assert 0 < facts.ram_available_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.tmpfs_free_bytes is None or facts.tmpfs_free_bytes > 0
    assert facts.cgroup_free_bytes is None or facts.cgroup_free_bytes >= 0


def test_a_missing_directory_is_named(tmp_path):
    """The facts of a directory that does not exist are an error that names it."""
    with pytest.raises(ArenaError, match="nowhere does not exist"):
        memory_facts(tmp_path / "nowhere" / "below")


def test_a_file_system_that_is_not_mounted_is_unknown(machine):
    """A device number that mountinfo does not list gives "unknown", which the check refuses."""
    assert filesystem_of(os.makedev(0, 9), machine.proc) == "unknown"
    assert memory.filesystem_of(os.makedev(250, 250)) == "unknown"
