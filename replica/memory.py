"""How much memory a node has for arenas, and whether it is enough: facts first, then a pure check.

Three limits stand between a rank and its arena: the size of the tmpfs, the memory of the machine,
and the control group (a container's limit). A tmpfs page counts against all three; scratch memory
of the processes against the last two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replica.errors import ArenaError
from replica.folder import open_arena_dir

TMPFS, CGROUP, RAM, FILESYSTEM = "tmpfs", "cgroup", "ram", "filesystem"

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """What one process sees of its node's memory at one moment."""

    tmpfs_free_bytes: int | None
    """Free bytes of the arena's file system; None: it has no limit of its own."""
    ram_available_bytes: int
    """What the kernel could give without swapping (MemAvailable)."""
    cgroup_free_bytes: int | None
    """Up to the nearest limit of a control group, page cache counted as free; None: no limit."""
    device: int
    """Device number of the arena's file system: ranks with the same one share its free bytes."""
    filesystem: str
    """Its type, ``tmpfs`` as a rule."""
    boot_id: str
    """Names this boot of this machine."""


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """The outcome for one node; the bytes are those of the scarcest kind, ``limit``."""

    ok: bool
    limit: str
    needed_bytes: int
    available_bytes: int | None
    sentence: str
    """Fit for a log when ok, for an error when not."""


def memory_facts(arena_dir: str | Path) -> MemoryFacts:
    """Look at the memory behind ``arena_dir``. Raises ArenaError when it cannot be used."""
    with open_arena_dir(arena_dir) as folder:
        space, device = os.fstatvfs(folder.descriptor), os.fstat(folder.descriptor).st_dev
    return MemoryFacts(
        tmpfs_free_bytes=space.f_bavail * space.f_frsize if space.f_blocks else None,
        ram_available_bytes=ram_available_bytes(),
        cgroup_free_bytes=cgroup_free_bytes(),
        device=device,
        filesystem=filesystem_of(device),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
    )


def check_memory(
    facts: MemoryFacts,
    *,
    node: str,
    arena_dir: str,
    arena_bytes: int,
    present_bytes: int = 0,
    scratch_bytes: int = 0,
) -> MemoryCheck:
    """Decide whether the arenas of all ranks of a node, and their scratch memory, have room.

    ``arena_bytes``: what the arenas of the node's ranks come to; ``present_bytes`` of them are
    allocated already. ``scratch_bytes``: ordinary memory that a restore may take at most.
    """
    if facts.filesystem not in _MEMORY_FILESYSTEMS:
        return MemoryCheck(
            ok=False,
            limit=FILESYSTEM,
            needed_bytes=arena_bytes,
            available_bytes=0,
            sentence=f"node {node}: {arena_dir} is on {facts.filesystem}, and {arena_bytes} bytes "
            "of arenas are kept in memory: set arena_dir= or PLANARIA_ARENA_DIR to a tmpfs",
        )
    files = max(0, arena_bytes - present_bytes)
    limits = (
        (TMPFS, files, facts.tmpfs_free_bytes),
        (CGROUP, files + scratch_bytes, facts.cgroup_free_bytes),
        (RAM, files + scratch_bytes, facts.ram_available_bytes),
    )
    bounded = [
        (free - needed, limit, needed, free) for limit, needed, free in limits if free is not None
    ]
    slack, limit, needed, free = min(bounded, key=lambda one: one[0])
    what = f"node {node}: {needed} bytes needed ({files} for arenas, {needed - files} of scratch)"
    return MemoryCheck(
        ok=slack >= 0,
        limit=limit,
        needed_bytes=needed,
        available_bytes=free,
        sentence=f"{what}, {free} bytes available: {_say(limit, arena_dir, ok=slack >= 0)}",
    )


def _say(limit: str, arena_dir: str, *, ok: bool) -> str:
    if limit == TMPFS:
        where, cure = f"the file system of {arena_dir}", "enlarge it (docker: --shm-size)"
    elif limit == CGROUP:
        where, cure = "the control group", "raise the container's or job's memory limit"
    else:
        where, cure = "the machine's memory", "use a smaller state, or more nodes"
    if ok:
        return f"{where} is the nearest limit"
    return f"{where} has too little: {cure}, or choose a redundancy that takes less"


def ram_available_bytes(proc: Path = Path("/proc")) -> int:
    """Read MemAvailable."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    if found is None:
        raise ArenaError(
            f"{proc / 'meminfo'} has no MemAvailable: a Linux kernel of 3.14 or later has"
        )
    return int(found[1]) * 1024


def filesystem_of(device: int, proc: Path = Path("/proc")) -> str:
    """Return the type of the mounted file system with this device number, else "unknown"."""
    number = f"{os.major(device)}:{os.minor(device)}"
    types = [mount.kind for mount in _mounts(proc) if mount.device == number]
    return types[-1] if types else "unknown"


def cgroup_free_bytes(proc: Path = Path("/proc"), root: Path = Path("/")) -> int | None:
    """Return the least that any memory control group above us has left; None without a limit.

    Both versions are looked at, since hybrid systems mount both; each group is followed up to the
    mount, since any level may carry a limit. ``root`` is put before mount points (another root in
    tests).
    """
    frees = [
        free
        for mount, path in _memory_groups(proc)
        for level in _levels(root / mount.point.lstrip("/"), mount.root, path)
        if (free := _group_free_bytes(level, version=2 if mount.kind == "cgroup2" else 1))
        is not None
    ]
    return min(frees, default=None)


@dataclass(frozen=True)
class _Mount:
    device: str
    root: str
    point: str
    kind: str
    options: frozenset[str]


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _read(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 5 and len(right) >= 3:
            root, point = (re.sub(r"\\([0-7]{3})", _octal, text) for text in left[3:5])
            yield _Mount(left[2], root, point, right[0], frozenset(right[2].split(",")))


def _octal(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def _memory_groups(proc: Path) -> Iterator[tuple[_Mount, str]]:
    """Yield (mount, path of our group) of each hierarchy that may limit memory."""
    paths = {}
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for mount in _mounts(proc):
        ours = mount.kind == "cgroup2" or (mount.kind == "cgroup" and "memory" in mount.options)
        if ours and mount.kind in paths:
            yield mount, paths[mount.kind]


def _levels(point: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield our group's directory and those above it, up to the mount point.

    A container often sees the host's path while its own group is what is mounted: then the mount
    point is our group.
    """
    base = mounted.rstrip("/")
    inside = path.removeprefix(base) if path == base or path.startswith(f"{base}/") else ""
    names = [name for name in inside.split("/") if name]
    if ".." in names:
        names = []
    for depth in range(len(names), -1, -1):
        yield point.joinpath(*names[:depth])


def _group_free_bytes(group: Path, *, version: int) -> int | None:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        2: ("memory.max", "memory.current", ""),
    }
    limit_name, usage_name, prefix = names[version]
    limit = _number(group / limit_name)
    usage = _number(group / usage_name)
    if limit is None or usage is None or limit >= _NO_LIMIT_BYTES:
        return None
    # tmpfs pages are counted as anonymous, so all of these are page cache that the kernel can drop.
    cache = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in _read(group / "memory.stat").splitlines())
    droppable = sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in cache)
    return max(0, limit - usage + droppable)


def _number(path: Path) -> int | None:
    """Return the number in a control file; None if there is no file, or it says "max"."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """Return a file's text, "" if it is missing: which files there are depends on the kernel."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
