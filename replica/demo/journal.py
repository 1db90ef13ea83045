"""What a worker writes down while it trains: one JSON object a line, one file a process.

A line goes to the operating system in one write as soon as it is known, so that a SIGKILL loses at
most the line under way. Times are ``time.monotonic()`` seconds, which on Linux all processes of a
host share; so lines of different processes, and the instant of a kill, can be compared.

    start        the rank has joined its process group ("round" names the incarnation)
    step         a step's loss is known (before it is saved)
    checkpoint   an event of replica.Checkpointer, under "detail"
    interrupted  training failed, usually because a peer died ("error")
    foreign-open the worker tried to open a file under another node's arena directory ("path")
    sabotage     one restored byte was flipped on purpose
    final        the digest of the rank's state after the last step
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUFFIX = ".journal"


class Journal:
    """Appends lines to this process's own file, named by node and process id.

    Args:
        directory: where the file goes, which must exist; None: lines go to standard output.
        node: name of this node, one path component.
    """

    def __init__(self, directory: Path | None, *, node: str) -> None:
        self._descriptor = 1 if directory is None else _create(directory, node)
        self._common: dict[str, Any] = {"node": node, "pid": os.getpid()}

    def identify(self, *, rank: int, world: int, round_id: str) -> None:
        """Put rank, world and round on every line from now on."""
        self._common |= {"rank": rank, "world": world, "round": round_id}

    def write(self, event: str, **facts: Any) -> None:
        """Append one line; ``facts`` are plain values."""
        line = {"event": event, "at_s": time.monotonic(), **self._common, **facts}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def step(self, step: int, loss: float) -> None:
        """Note a finished step, its loss exactly, as hexadecimal, and for people to read."""
        self.write("step", step=step, loss=round(loss, 6), loss_bits=loss.hex())


def _create(directory: Path, node: str) -> int:
    path = directory / f"{node}.{os.getpid()}{SUFFIX}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a journal; ``facts`` are the values that only its kind of event has."""

    event: str
    at_s: float
    node: str
    pid: int
    rank: int | None = None
    world: int | None = None
    round_id: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def parse_line(text: str) -> Line:
    """Turn one line of a journal into a value.

    Raises:
        ValueError: the line is not one that ``Journal`` writes.
    """
    raw = json.loads(text)
    if not isinstance(raw, dict) or not {"event", "at_s", "node", "pid"} <= raw.keys():
        raise ValueError(f"not a journal line: {text[:200]!r}")
    known = {key: raw.pop(key, None) for key in ("event", "at_s", "node", "pid", "rank", "world")}
    return Line(**known, round_id=raw.pop("round", None), facts=raw)


class JournalReader:
    """Reads what the workers of a run have written so far; each call returns what is new."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def new_lines(self) -> list[Line]:
        """Return every whole line that no earlier call returned, in order of time."""
        lines: list[Line] = []
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            lines.extend(self._new_lines_of(path))
        return sorted(lines, key=lambda line: line.at_s)

    def _new_lines_of(self, path: Path) -> Iterable[Line]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            # A line without its end was cut off by a kill, or is being written right now.
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
        return [parse_line(text) for text in whole.decode().splitlines()]
