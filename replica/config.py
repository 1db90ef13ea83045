"""Options, checked when given, and the one reader of the environment."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replica.errors import ConfigError

log = logging.getLogger("planaria")

Event = Mapping[str, Any]
DEFAULT_ARENA_DIR = "/dev/shm"
NAME_CHARS_MAX = 256
WHEN_BUSY = ("skip", "wait")
BACKGROUND = ("auto", "thread", "process")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_REDUNDANCY = re.compile(r"auto|none|copies:\d{1,3}|stripe:\d{1,3}\+\d{1,3}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller chose. Raises ConfigError: the option, what is allowed, what was given."""

    redundancy: str = "auto"
    """"auto", "none", "copies:r" or "stripe:k+m"."""
    job: str | None = None
    """Name of the job, the same over restarts; None: from the environment."""
    node_id: str | None = None
    """Name of this node; None: PLANARIA_NODE_ID, else boot id and host name."""
    arena_dir: str | None = None
    """A tmpfs directory; None: PLANARIA_ARENA_DIR, else /dev/shm."""
    interval_steps: int = 1
    """Save only steps that are a multiple of this."""
    on_event: Callable[[Event], None] | None = None
    """Called with one mapping per save and restore; for saves that run behind, in that thread."""
    on_error: str = "warn"
    """"warn": a failed save is logged and counted; "raise": the next call raises it."""
    when_busy: str = "skip"
    """A step that comes while a save is under way: "skip" it, or "wait" for that save."""
    timeout_s: float = 60.0
    """Deadline of a save, and of each phase of a restore, beside the time that bytes take."""
    random_states: bool = True
    """Keep the random states of torch (CPU, CUDA), numpy and Python."""
    scrub_bytes_per_s: float = 64e6
    """Rate at which idle memory is verified again between two saves; 0: never."""
    overlap: bool = False
    """Copy parameters and optimizer state behind forward and backward, before the next step."""
    overlap_check: bool = False
    """With overlap: fail a save whose late bytes were changed before they were copied."""
    background: str = "auto"
    """Where the work behind ``save`` runs: on a "thread", in a "process" of its own, or "auto": in
    a process where the group has a TCPStore, or is none, else on a thread."""
    self_check: bool = True
    """Before the first save of a process, read back what it captured; a difference is an error."""
    network_interface: str | None = None
    """Network interface for bulk bytes; None: GLOO_SOCKET_IFNAME, else torch's choice."""

    def __post_init__(self) -> None:
        if not isinstance(self.redundancy, str) or not _REDUNDANCY.fullmatch(self.redundancy):
            allowed = "'auto', 'none', 'copies:r' or 'stripe:k+m'"
            raise ConfigError(f"redundancy is {self.redundancy!r}, expected {allowed}")
        for name in ("job", "node_id"):
            _check_name(name, getattr(self, name))
        check_choice("on_error", self.on_error, ("warn", "raise"))
        check_choice("when_busy", self.when_busy, WHEN_BUSY)
        if self.overlap_check and not self.overlap:
            raise ConfigError("overlap_check=True checks late copies: it needs overlap=True")
        check_choice("background", self.background, BACKGROUND)
        if not _is_int(self.interval_steps) or self.interval_steps < 1:
            raise ConfigError(f"interval_steps is {self.interval_steps!r}, expected 1 or more")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < 1e6:
            raise ConfigError(f"timeout_s is {self.timeout_s!r}, expected seconds above 0")
        if not isinstance(self.scrub_bytes_per_s, int | float) or self.scrub_bytes_per_s < 0:
            raise ConfigError(
                f"scrub_bytes_per_s is {self.scrub_bytes_per_s!r}, expected 0 or more"
            )
        if self.on_event is not None and not callable(self.on_event):
            raise ConfigError(f"on_event is {self.on_event!r}, expected a callable or None")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options completed from the environment."""

    options: Options
    job: str
    job_source: str
    """Where the job's name came from, for the log."""
    node_id: str
    arena_dir: str
    store_address: str | None
    """host:port of a store that outlives every rank; None: the default group's store."""

    @classmethod
    def from_env(cls, options: Options, env: Mapping[str, str], world: int) -> Config:
        """Complete ``options``. ConfigError when the job has no name and more than one rank."""
        job, source = _job_name(options, env, world)
        if source != "job=":
            _check_world(env, world)
        return cls(
            options=options,
            job=_check_name("job", job) or "",
            job_source=source,
            node_id=_check_name("node_id", options.node_id or _node_id(env)) or "",
            arena_dir=options.arena_dir or env.get("PLANARIA_ARENA_DIR") or DEFAULT_ARENA_DIR,
            store_address=env.get("PLANARIA_STORE") or None,
        )


def _job_name(options: Options, env: Mapping[str, str], world: int) -> tuple[str, str]:
    if options.job is not None:
        return options.job, "job="
    if env.get("PLANARIA_JOB"):
        return env["PLANARIA_JOB"], "PLANARIA_JOB"
    if env.get("TORCHELASTIC_RUN_ID", "none") not in ("", "none"):
        return env["TORCHELASTIC_RUN_ID"], "TORCHELASTIC_RUN_ID"
    if env.get("SLURM_JOB_ID"):
        return env["SLURM_JOB_ID"], "SLURM_JOB_ID"
    if world > 1:
        raise ConfigError(
            f"a job of {world} ranks needs a name that stays the same over restarts: pass job=, or "
            "set PLANARIA_JOB, or start torchrun with --rdzv-id=NAME"
        )
    script = str(Path(sys.argv[0] or "interactive").absolute())
    return "script-" + hashlib.sha256(script.encode()).hexdigest()[:16], f"the path {script}"


def _check_world(env: Mapping[str, str], world: int) -> None:
    """Two groups of one launch must not share a job's name: each would end the other's ranks."""
    launched = env.get("WORLD_SIZE", "")
    if launched.isdecimal() and int(launched) != world:
        raise ConfigError(
            f"the launcher started {launched} ranks (WORLD_SIZE) and this group has {world}: call "
            "torch.distributed.init_process_group first, or, where several groups save on their "
            "own, pass each a job= name of its own"
        )


def _node_id(env: Mapping[str, str]) -> str:
    if env.get("PLANARIA_NODE_ID"):
        return env["PLANARIA_NODE_ID"]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{socket.gethostname()}"


def agent_serves_store(env: Mapping[str, str]) -> bool:
    """Whether torchrun's agent serves the store of the default group, and not rank 0's process."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_name(what: str, value: str | None) -> str | None:
    if value is not None and (
        not isinstance(value, str)
        or not 0 < len(value) <= NAME_CHARS_MAX
        or _CONTROL.search(value)  # what is told of it must stay on its line
    ):
        raise ConfigError(
            f"{what} is {value!r}, expected text of 1 to {NAME_CHARS_MAX} characters, none of "
            "them a control character"
        )
    return value


def check_choice(what: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return ``value``, which must be one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{what} is {value!r}, expected one of {allowed}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
