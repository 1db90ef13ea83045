"""The job whose arenas are kept in ``tests/data``: four nodes of one rank, two committed steps.

``state_of`` gives the one right state of every rank after a step, with every kind of value whose
bytes a format describes. A folder ``format-N`` has what version N of the format made of it:

    arenas.tar.gz   the arena directory, byte for byte, owned by nobody in particular
    expected.json   what is in it, in words and digests

A folder is made once, when its format is released, and never again.
"""

from __future__ import annotations

import datetime as dt
import gzip
import hashlib
import io
import os
import tarfile
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recovery.manifest import FORMAT_VERSION
from replica.frames import decode_frame

FORMAT = FORMAT_VERSION
DATA = Path(__file__).resolve().parent
JOB = "kept"
NODES = ["node-0", "node-1", "node-2", "node-3"]
REDUNDANCY = "stripe:2+1"
STEPS = (7, 8)
ARCHIVE, EXPECTED = "arenas.tar.gz", "expected.json"
_USER = "planaria-0"


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Return the state of a rank after a step; 0 is before the first."""
    base = torch.arange(12 + rank, dtype=torch.float32) * (step + 1)
    return {
        "weights": base,
        "views": [base[:4], base[2:6]],
        "half": torch.full((3,), step + 0.5, dtype=torch.bfloat16),
        "flags": torch.tensor([bool(step), True, False]),
        "complex": torch.tensor([complex(rank, step)], dtype=torch.complex128),
        "nothing": torch.empty((0, 3), dtype=torch.int16),
        "array": np.arange(5, dtype="<i8") + step,
        "plain": {
            "step": step,
            ("tuple", 3): [1.5, None, True, -(1 << 80), "text \u00e9"],
            "bytes": bytes(range(16)),
            "when": dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC),
        },
        "ordered": OrderedDict([("b", 1), ("a", float("inf"))]),
        "last": deque([step], maxlen=3),
    }


def folder_of(version: int) -> Path:
    """Name the folder of a format version."""
    return DATA / f"format-{version}"


def pack(arena_dir: Path, archive: Path) -> None:
    """Write an arena directory into an archive, the same bytes for the same files."""
    (user,) = arena_dir.iterdir()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(user.rglob("*")):
            info = tarfile.TarInfo(f"{_USER}/{path.relative_to(user).as_posix()}")
            info.mode = 0o700 if path.is_dir() else 0o600
            if path.is_dir():
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = path.stat().st_size
                tar.addfile(info, io.BytesIO(path.read_bytes()))
    archive.write_bytes(gzip.compress(raw.getvalue(), 9, mtime=0))


def unpack(version: int, arena_dir: Path) -> None:
    """Lay the arenas of a format version out as this user's own."""
    for name, content in members(version):
        path = arena_dir / f"planaria-{os.geteuid()}" / name
        if content is None:
            path.mkdir(parents=True, mode=0o700)
        else:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(content)
            path.chmod(0o600)


def members(version: int) -> list[tuple[str, bytes | None]]:
    """List (path below the user's directory, content; None for a directory)."""
    found: list[tuple[str, bytes | None]] = []
    with tarfile.open(folder_of(version) / ARCHIVE) as tar:
        for info in tar:
            name = info.name.removeprefix(f"{_USER}/")
            file = tar.extractfile(info) if info.isfile() else None
            found.append((name, file.read() if file is not None else None))
    return found


def frames_of(name: str) -> list[bytes]:
    """Return every payload in the present format's ``head`` or ``record`` files, none twice."""
    found: dict[bytes, None] = {}
    for path, raw in members(FORMAT):
        if raw is not None and path.endswith((f"/{name}", f".{name}")):
            frames = (decode_frame(raw[start:]) for start in (0, len(raw) // 2))
            found |= {frame[1]: None for frame in frames if frame is not None and frame[1]}
    return list(found)


def sha256(content: bytes) -> str:
    """Digest a file by something that is not ours."""
    return hashlib.sha256(content).hexdigest()


def said_of(value: Any) -> str:
    """Give any value of a state as text, bits and types included."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"{value.dtype}{tuple(value.shape)}:{raw.hex()}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape}:{value.tobytes().hex()}"
    if isinstance(value, dict):
        inside = ", ".join(f"{key!r}: {said_of(item)}" for key, item in value.items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list | deque):
        return f"{type(value).__name__}({', '.join(map(said_of, value))})"
    return repr(value)
