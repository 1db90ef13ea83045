"""What a node of the cluster can be asked to do, beside the jobs of ``tests.replica.jobs``."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recovery.manifest import WHOLE
from replica.store import TorchStore
from replica.transports.gloo import GlooChannel
from tests.replica import jobs
from tests.replica.jobs import HERE

HELD_S = 60.0
"""A thread that a test holds and forgets goes on after this."""
_SERVED: list[Any] = []


def serve_store(address: str) -> int:
    """Serve a store at an address of this node for as long as the node lives; the port."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    _SERVED.append(store)
    return port


def join_at(rank: int, world: int, address: str, port: int, prefix: str) -> None:
    """Make the default process group over the store at ``address``."""
    timeout = timedelta(seconds=30)
    HERE.client = dist.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    store = dist.PrefixStore(prefix, HERE.client)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def reset() -> str:
    """Undo what a test did here, arenas too."""
    said = jobs.reset()
    for folder in Path("/dev/shm").glob("planaria-*"):
        shutil.rmtree(folder)
    return said


def timed(job: str, **args: Any) -> dict[str, Any]:
    """Run a job; its value, or its error in words, and the seconds that it took here."""
    started = time.monotonic()
    said: dict[str, Any] = {"value": None, "kind": "", "text": ""}
    try:
        said["value"] = getattr(jobs, job)(**args)
    except Exception as error:  # noqa: BLE001 - the test decides what it means
        said |= {"kind": type(error).__name__, "text": str(error)}
    return said | {"seconds": time.monotonic() - started}


def own_steps() -> list[int]:
    """Steps of the whole own shards that lie valid in this node's arena, older first."""
    return _steps(lambda record: record.fragment == WHOLE)


def held_steps() -> list[int]:
    """Steps of the peers' fragments that lie valid in it."""
    return _steps(lambda record: record.fragment != WHOLE)


def _steps(wanted: Callable[[Any], bool]) -> list[int]:
    slots = HERE.checkpointer._engine.job.arena.slots.values()
    records = [slot.record for slot in slots if slot.record is not None]
    return sorted(record.generation.step for record in records if wanted(record))


def sent_bytes() -> dict[str, int]:
    """Bytes that have left by each network interface."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]
    pairs = [line.split(":") for line in lines]
    return {name.strip(): int(counts.split()[8]) for name, counts in pairs}


def hold(point: str) -> None:
    """At its first passage of ``point`` a thread stands still until it is let go.

    Points: ``set PREFIX`` and ``compare_set PREFIX``, just before the store is asked so for a key
    that starts so; ``send``, with bulk bytes just posted.
    """
    passed: list[bool] = []
    gate = HERE.gate = threading.Event()

    def act() -> None:
        if not passed:
            passed.append(True)
            jobs.announce(f"held at {point}")
            gate.wait(HELD_S)

    if point == "send":
        jobs._wrap(GlooChannel, "send", lambda *_: True, act, after=True)
    else:
        verb, start = point.split(" ")
        jobs._wrap(TorchStore, verb, lambda _, key, *__: key.startswith(start), act)
    HERE.undo.append(gate.set)


def let_go() -> None:
    """Let what is held go on."""
    HERE.gate.set()
