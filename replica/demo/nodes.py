"""Nodes of the demo: each a torchrun agent with its own arena directory on tmpfs.

The command line and environment are the recipe that was seen to survive the loss of any node, the
one with rank 0 too: a rendezvous store that is no node's, agents that make a fresh worker store in
every round, a short heartbeat.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replica.demo.trees import NODE_VARIABLE, RUN_VARIABLE

TRAIN_MODULE = "replica.demo.train"
TMPFS = Path("/dev/shm")
MAX_RESTARTS = 5
RENDEZVOUS = (
    "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=60"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one run of the demo lives; every path and name carries the run's own id."""

    run_id: str
    work_dir: Path
    """Journals and logs; on disk."""
    arenas_dir: Path
    """One directory per node; on tmpfs."""

    def journal_dir(self, run: str) -> Path:
        """Return the directory for the journals of one training run, made at the first call."""
        directory = self.work_dir / run
        directory.mkdir(exist_ok=True)
        return directory

    def log_path(self, name: str) -> Path:
        """Return the file that takes standard output and error of one process."""
        return self.work_dir / f"{name}.log"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One started node."""

    name: str
    agent: subprocess.Popen[bytes]
    arena_dir: Path


def make_place() -> Place:
    """Make the two directories of a run, both of mode 0700.

    ``PLANARIA_ARENA_DIR`` names another tmpfs than /dev/shm.

    Raises:
        OSError: there is none, or it cannot be written.
    """
    run_id = secrets.token_hex(8)
    base = Path(os.environ.get("PLANARIA_ARENA_DIR") or TMPFS).resolve()
    arenas_dir = base / f"planaria-demo-{run_id}"
    arenas_dir.mkdir(mode=0o700)
    return Place(
        run_id=run_id,
        work_dir=Path(tempfile.mkdtemp(prefix="planaria-demo-")),
        arenas_dir=arenas_dir,
    )


def start_store(place: Place) -> subprocess.Popen[bytes]:
    """Start the store process; its port is the first line of its output (see ``store.py``).

    It carries no mark of the run: it is the one that ends the others.
    """
    with place.log_path("store").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "replica.demo.store", place.run_id, str(place.arenas_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=place.work_dir,
            env=_environment(),
            start_new_session=True,
        )


def start_node(place: Place, name: str, *, nodes: int, store: str, train: Sequence[str]) -> Node:
    """Start one torchrun agent with an empty arena directory.

    Args:
        place: of the run.
        name: the node's id, never used before in this run.
        nodes: how many nodes the job has.
        store: host:port of the rendezvous store.
        train: arguments of the training program.
    """
    arena_dir = place.arenas_dir / name
    arena_dir.mkdir(mode=0o700)
    launch = [
        *("--nnodes", f"{nodes}:{nodes}", "--nproc-per-node", "1"),
        *("--max-restarts", str(MAX_RESTARTS), "--monitor-interval", "0.5"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", store, "--rdzv-id", place.run_id),
        *("--rdzv-conf", RENDEZVOUS, "--local-addr", "127.0.0.1"),
    ]
    agent = _start(
        place,
        name,
        ["torch.distributed.run", *launch, "-m", TRAIN_MODULE, *train],
        {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PLANARIA_STORE": store,
            "PLANARIA_ARENA_DIR": str(arena_dir),
        },
    )
    return Node(name=name, agent=agent, arena_dir=arena_dir)


def start_reference_worker(
    place: Place, *, rank: int, world: int, store: str, train: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start one worker of the uninterrupted run, without an agent: nothing will need restarting."""
    host, port = store.split(":")
    return _start(
        place,
        f"reference-{rank}",
        [TRAIN_MODULE, *train],
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            # The store already runs: rank 0 must join it, not start one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    )


def remove_arena(node: Node) -> int:
    """Delete a dead node's arena directory; return the bytes that it held."""
    held = sum(path.stat().st_size for path in node.arena_dir.rglob("*") if path.is_file())
    shutil.rmtree(node.arena_dir)
    return held


def _start(
    place: Place, name: str, module: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment = {
        **_environment(),
        **variables,
        RUN_VARIABLE: place.run_id,
        NODE_VARIABLE: name,
        # An agent that is killed leaves a directory of logs; so it goes with the work directory.
        "TMPDIR": str(place.work_dir),
    }
    with place.log_path(name).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=place.work_dir,
            env=environment,
            # Ctrl-C reaches the demo alone, which then ends the others in order.
            start_new_session=True,
        )


def _environment() -> dict[str, str]:
    """Return the caller's environment without what would change the run, with what it needs."""
    ours = ("TORCHELASTIC_", "PLANARIA_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # The checkout or install that runs the demo is the one that its workers import.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        # All nodes are on this host; the host's own name may resolve to nothing.
        "GLOO_SOCKET_IFNAME": "lo",
        # torch's store asks for the name of each address that connects; a lost packet would cost
        # five seconds each time.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
