"""What each kind of fault does to the world, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from erasure.digest import digest
from simulations.memory import Node, Slot
from simulations.process import Process
from simulations.truth import WHOLE, sealed_slots

if TYPE_CHECKING:
    from simulations.faults import Fired
    from simulations.world import World

REPLACED_S = 4.0
"""A node that is cut off for longer than this is replaced."""


def process_of(world: World, fired: Fired) -> Process | None:
    """The process that a fault means: by rank, else the one whose action it waited for."""
    group, rank = world.launcher.group, fired.fault.rank
    if rank is None and world.faults.trigger is not None:
        found: Process | None = world.faults.trigger
    elif not group.by_rank:
        found = None
    else:
        found = group.by_rank[(rank or 0) % group.size]
    return found if found is not None and found.alive else None


def node_of(world: World, index: int | None) -> Node:
    """The node that a fault means: by its place in the job, else that of the waited-for action."""
    nodes = world.launcher.nodes
    if index is None and world.faults.trigger is not None:
        return world.faults.trigger.node
    return nodes[(index or 0) % len(nodes)]


def _spared(world: World, fired: Fired, node: Node) -> bool:
    """A fault that the redundancy does not allow is left out, in a run that spares."""
    if world.config.sparing and not world.checker.debt.affordable(node):
        fired.spared = True
    return fired.spared


def kill_process(world: World, fired: Fired) -> None:
    """A worker dies; its arena stays."""
    process = process_of(world, fired)
    if process is None:
        fired.spared = True
        return
    fired.counted = world.faults.in_session(process)
    process.die()
    world.launcher.process_ended(process, "killed")


def kill_node(world: World, fired: Fired) -> None:
    """A host is lost as a whole."""
    node = node_of(world, fired.fault.node)
    if not node.alive or _spared(world, fired, node):
        fired.spared = True
        return
    fired.counted = world.faults.holds_live(node) or any(
        world.faults.in_session(process) for process in world.launcher.on_node(node)
    )
    world.checker.debt.node_hit(node)
    world.launcher.lose_node(node)


def leave(world: World, fired: Fired) -> None:
    """A node is sent away with what it holds; it may come back in a later epoch, stale."""
    node = node_of(world, fired.fault.node)
    if not node.alive or node.partitioned or _spared(world, fired, node):
        fired.spared = True
        return
    fired.counted = world.faults.holds_live(node)
    world.launcher.leaving.add(node.name)
    world.launcher.trouble(0.0)


def freeze(world: World, fired: Fired) -> None:
    """A process is stopped for a while."""
    process = process_of(world, fired)
    if process is None:
        fired.spared = True
        return
    until_s = world.now_s + fired.fault.for_s
    process.thaw_s = max(process.thaw_s, until_s)
    process.held_back, process.was_kept = False, True
    fired.nodes = (process.node.name,)
    world.store.outage_began()

    def thawed(_: Any) -> None:
        fired.counted = fired.counted or (
            process.alive and process.held_back and world.faults.in_session(process)
        )

    world.schedule(fired.fault.for_s, None, thawed)


def slow(world: World, fired: Fired) -> None:
    """A node does everything more slowly for a while."""
    node = node_of(world, fired.fault.node)
    node.slow = float(max(2, fired.fault.amount))
    _kept(world, node)
    world.schedule(fired.fault.for_s, None, _set_slow, node)


def _set_slow(node: Node) -> None:
    node.slow = 1.0


def _kept(world: World, node: Node) -> None:
    for process in world.launcher.on_node(node):
        process.was_kept = True


def cut(world: World, fired: Fired) -> None:
    """Nothing passes between two nodes for a while."""
    a, b = node_of(world, fired.fault.node), node_of(world, fired.fault.other)
    if a is b:
        fired.spared = True
        return
    fired.nodes = (a.name, b.name)
    world.network.cut_link(a, b, world.now_s + fired.fault.for_s)


def delay(world: World, fired: Fired) -> None:
    """What passes between two nodes takes longer, and so is overtaken by what does not."""
    a, b = node_of(world, fired.fault.node), node_of(world, fired.fault.other)
    fired.nodes = (a.name, b.name)
    world.network.delay_link(a, b, fired.fault.amount / 1000.0, world.now_s + fired.fault.for_s)


def partition(world: World, fired: Fired) -> None:
    """A node reaches nobody; after a while the launcher goes on without it."""
    node = node_of(world, fired.fault.node)
    if not node.alive or node.partitioned or _spared(world, fired, node):
        fired.spared = True
        return
    fired.nodes = (node.name,)
    node.partitioned = True
    _kept(world, node)
    world.store.outage_began()
    if fired.fault.for_s > REPLACED_S:
        fired.counted = world.faults.holds_live(node)
        world.launcher.trouble(REPLACED_S)

    def healed(_: Any) -> None:
        node.partitioned = False
        world.network.healed()

    world.schedule(fired.fault.for_s, None, healed)


def store_cut(world: World, fired: Fired) -> None:
    """One node does not reach the store."""
    node = node_of(world, fired.fault.node)
    fired.nodes = (node.name,)
    node.store_cut = True
    _kept(world, node)
    world.store.outage_began()

    def healed(_: Any) -> None:
        node.store_cut = False

    world.schedule(fired.fault.for_s, None, healed)


def store_loss(world: World, fired: Fired) -> None:
    """The store answers nobody; with ``amount`` it comes back empty, with a new incarnation."""
    store = world.store
    store.down = True
    store.outage_began()
    for process in world.launcher.living():
        process.was_kept = True

    def back(_: Any) -> None:
        store.down = False
        if fired.fault.amount:
            # Clients of a store that is gone do not find the new one.
            for process in world.launcher.living():
                process.die()
            store.wipe()
            world.launcher.trouble(0.0)

    world.schedule(fired.fault.for_s, None, back)


def _pick(world: World, fired: Fired) -> tuple[Node, Slot] | None:
    """A slot with a record on the fault's node: ``amount`` says which."""
    node = node_of(world, fired.fault.node)
    wanted = [
        slot
        for _, _, slot in sealed_slots([node])
        if slot.record is not None and slot.record.length and not slot.holds
    ]
    if not wanted:
        fired.spared = True
        return None
    slot = wanted[fired.fault.amount % len(wanted)]
    record = slot.record
    if record is None:
        return None
    if world.config.sparing and not world.checker.debt.affordable(node, record.owner):
        fired.spared = True
        return None
    fired.counted = world.checker.is_live(record.generation)
    return node, slot


def corrupt(world: World, fired: Fired) -> None:
    """A byte of what a slot holds changes."""
    found = _pick(world, fired)
    if found is None:
        return
    node, slot = found
    world.checker.debt.slot_hit(node, slot)
    slot.data[0] ^= 0x55


def foreign(world: World, fired: Fired) -> None:
    """A fragment becomes one of another shard, its own digests right: as if it had landed there."""
    found = _pick(world, fired)
    if found is None:
        return
    node, slot = found
    record = slot.record
    if record is None or record.fragment == WHOLE:
        fired.spared = True
        return
    world.checker.debt.slot_hit(node, slot)
    slot.data[0] ^= 0x33
    slot.record = replace(record, chunk_digests=digest(slot.payload))


def truncate(world: World, fired: Fired) -> None:
    """A slot's file is cut short: its record claims more than is there, and counts for nothing."""
    found = _pick(world, fired)
    if found is None:
        return
    node, slot = found
    world.checker.debt.slot_hit(node, slot)
    slot.record = None


def corrupt_wire(world: World, fired: Fired) -> None:
    """The next fragment that a node sends is changed on its way."""
    node = node_of(world, fired.fault.node)
    fired.nodes = (node.name,)
    world.network.flip_next_of.add(node.name)


def full(world: World, fired: Fired) -> None:
    """Somebody else fills a node's tmpfs up for a while."""
    node = node_of(world, fired.fault.node)
    fired.nodes = (node.name,)
    node.full = True

    def freed(_: Any) -> None:
        node.full = False

    world.schedule(fired.fault.for_s, None, freed)


def clock_jump(world: World, fired: Fired) -> None:
    """A process's clock runs ahead: its deadlines pass early."""
    process = process_of(world, fired)
    if process is None:
        fired.spared = True
        return
    fired.nodes = (process.node.name,)
    process.jump(fired.fault.for_s)


def orphan(world: World, fired: Fired) -> None:
    """A node's agent dies and its workers live on; with ``amount`` they cannot be ended."""
    node = node_of(world, fired.fault.node)
    if not node.alive or (fired.fault.amount and _spared(world, fired, node)):
        fired.spared = True
        return
    fired.nodes = (node.name,)
    for process in world.launcher.on_node(node):
        fired.counted = fired.counted or world.faults.in_session(process)
        process.stubborn = bool(fired.fault.amount)
    world.launcher.lose_agent(node)


def renumber(world: World, _: Fired) -> None:
    """The next incarnation has its nodes in another order."""
    world.launcher.shuffled = True


def load_error(world: World, fired: Fired) -> None:
    """The script of a rank fails to load, ``amount`` times, in this and later incarnations."""
    node = node_of(world, fired.fault.node)
    fired.nodes = (node.name,)
    node.load_errors = max(1, fired.fault.amount)


def rest(_: World, fired: Fired) -> None:
    """Nothing: the faults before it go on for a while before the calm."""
    fired.spared = True


AFFLICTIONS: dict[str, Callable[[World, Fired], None]] = {
    "kill-process": kill_process,
    "kill-node": kill_node,
    "leave": leave,
    "freeze": freeze,
    "slow": slow,
    "cut": cut,
    "delay": delay,
    "partition": partition,
    "store-cut": store_cut,
    "store-loss": store_loss,
    "corrupt": corrupt,
    "foreign": foreign,
    "truncate": truncate,
    "corrupt-wire": corrupt_wire,
    "full": full,
    "clock-jump": clock_jump,
    "orphan": orphan,
    "renumber": renumber,
    "load-error": load_error,
    "rest": rest,
}
