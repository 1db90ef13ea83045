"""Opening a job, as ``replica.opening`` does: arenas claimed, epoch and nonce (P12, P13)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from recovery.commit import held_root
from recovery.layout import Layout, make_layout, parse_redundancy
from recovery.slots import HELD, OWN
from recovery.topology import Topology
from simulations.memory import Arena, ArenaFull
from simulations.tasks import JobKey, Meet, OpenFailed, PeerLost, Sleep, Steps, StoreDown
from simulations.workload import size_of

if TYPE_CHECKING:
    from simulations.process import Process

CLAIM_S = 1.0


@lru_cache(maxsize=512)
def layout_of(redundancy: str, node_of_rank: tuple[str, ...], sizes: tuple[int, ...]) -> Layout:
    """The layout that every rank derives alike."""
    topology = Topology(node_of_rank)
    return make_layout(parse_redundancy(redundancy, len(topology.nodes)), topology, sizes)


def open_job(process: Process) -> Steps:
    """Agree with all ranks; OpenFailed on every rank alike."""
    config = process.world.config
    said = yield from _together(process, "introduce", lambda: _introduce(process))
    nodes = tuple(str(one["node"]) for one in said)
    sizes = tuple(int(one["bytes"]) for one in said)
    process.layout = layout_of(config.redundancy, nodes, sizes)
    yield from _together(process, "claim", lambda: _claim(process))
    said = yield from _together(process, "facts", lambda: _facts(process))
    epoch = 1 + max(int(one["epoch"]) for one in said)
    nonce = str(said[0]["nonce"])
    yield from _together(process, "reserve", lambda: _reserve(process, sizes))
    yield from _together(process, "fence", lambda: _fence(process, epoch, nonce))
    process.epoch, process.nonce, process.prefix = epoch, nonce, nonce
    process.held_root = held_root([str(one["incarnation"]) for one in said])
    process.world.checker.opened(process)


def _together(process: Process, name: str, work: Callable[[], Steps]) -> Steps:
    try:
        said = {"value": (yield from work())}
    except (OpenFailed, ArenaFull, StoreDown) as error:
        said = {"error": str(error)}
    try:
        values = yield Meet(name, said, process.world.config.timeout_s * 2)
    except PeerLost as error:
        raise OpenFailed(str(error)) from error
    failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(values) if "error" in one]
    if failed:
        raise OpenFailed("; ".join(failed))
    return [one["value"] for one in values]


def _introduce(process: Process) -> Steps:
    yield Sleep(0.001)
    nbytes = size_of(process.world.config, process.rank, 0)
    return {"node": process.node.name, "bytes": nbytes}


def _claim(process: Process) -> Steps:
    """Take the newest arena of our position; who has it without an agent is ended first."""
    node, position = process.node, process.position
    yield Sleep(0.001)
    number = max(0, node.newest(position))
    while True:
        arena = node.arenas.get((position, number))
        if arena is None:
            incarnation = f"{process.world.random.getrandbits(128):032x}"
            arena = node.make_arena(position, number, incarnation)
            break
        holder = arena.owner
        if holder is None or not holder.alive:
            break
        yield Sleep(CLAIM_S / 2)
        if not process.world.launcher.end_orphan(holder):
            process.world.checker.arena_lost(arena)
            number += 1
        elif arena.owner is holder:
            break
        # Another of our position was faster: that one has to be ended now.
    arena.owner = process
    process.arena = arena
    process.world.checker.claimed(process, arena)
    arena.update_head(process, rank=process.rank, world=process.group.size)
    for slot in arena.slots.values():
        # Receives of the former owner ended with it.
        slot.holds, slot.taken = 0, False
    _remove_older(process, number)
    return None


def _remove_older(process: Process, number: int) -> None:
    """Free what an orphan kept until it ended."""
    for position, older in list(process.node.arenas):
        if position == process.position and older < number:
            arena = process.node.arenas[position, older]
            if arena.owner is None or not arena.owner.alive:
                del process.node.arenas[position, older]


def _facts(process: Process) -> Steps:
    arena = process.arena
    known = [arena.head.epoch]
    for slot in arena.slots.values():
        if slot.record is not None:
            known += [slot.record.generation.epoch, slot.record.fence_epoch]
    if process.rank == 0:
        raw = yield JobKey("epoch")
        known.append(int(raw or b"0"))
    facts: dict[str, Any] = {
        "epoch": max(known),
        "incarnation": arena.head.incarnation,
        "nonce": f"{process.world.random.getrandbits(128):032x}",
    }
    return facts


def _reserve(process: Process, sizes: tuple[int, ...]) -> Steps:
    """Two own slots and two per held fragment; what an older incarnation left comes first."""
    code, rank, arena = process.layout.redundancy.code, process.rank, process.arena
    wanted = [(OWN, sizes[rank])] * 2
    for fragment in process.layout.held_by(rank):
        wanted += [(HELD, code.length(fragment.index, sizes[fragment.owner]))] * 2
    present = sorted(arena.slots.values(), key=lambda slot: (slot.capacity, slot.number))
    yield Sleep(0.001)
    for kind, nbytes in sorted(wanted, key=lambda item: -item[1]):
        left = [slot for slot in present if slot.kind == kind]
        fitting = [slot for slot in left if slot.capacity >= nbytes]
        if left:
            present.remove((fitting or left)[0])
        else:
            arena.allocate(process, nbytes, kind)
    return None


def _fence(process: Process, epoch: int, nonce: str) -> Steps:
    arena: Arena = process.arena
    arena.update_head(process, epoch=epoch, nonce=nonce)
    if process.rank == 0:
        yield JobKey("epoch", str(epoch).encode())
    return None
