"""Opening a job: all ranks agree on who they are, what fits and which incarnation this is.

Four rounds of one small exchange each (rule P12): who we are -> arenas opened -> memory checked and
reserved -> epoch and nonce written everywhere. A failure at one rank is raised on every rank, as
the same type, naming it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from erasure.digest import ALGORITHM
from recovery.commit import held_root
from recovery.errors import LayoutError, RecoveryError
from recovery.layout import Layout, make_layout, parse_redundancy
from recovery.manifest import FORMAT_VERSION
from recovery.topology import Topology
from recovery.tree import dump
from replica import errors
from replica.arena import HELD, OWN, Arena, ArenaView, left_over
from replica.arena_views import prune
from replica.clock import Clock
from replica.config import Config, Options
from replica.group import Group
from replica.job import Job
from replica.links import Links
from replica.memory import MemoryFacts, check_memory, memory_facts
from replica.store import Store
from replica.timed_store import TimedStore
from replica.transport import Transport
from replica.words import check_facts, check_introductions, parse_word

log = logging.getLogger("planaria")

TOUCHED_BYTES_PER_S_MIN = 200e6
"""Lowest rate at which a node is trusted to make its arenas before a deadline counts against it."""

ROUNDS = 5
"""So many exchanges make an opening that succeeds: the introductions, then the four rounds."""
_SHARED_OPTIONS = (
    "redundancy",
    "interval_steps",
    "when_busy",
    "random_states",
    "timeout_s",
    "background",
)
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RAISABLE = {
    kind.__name__: kind
    for kind in (
        LayoutError,
        RecoveryError,
        errors.ConfigError,
        errors.StateError,
        errors.ArenaError,
        errors.ArenaFull,
        errors.ArenaBusy,
        errors.PeerError,
        errors.StoreError,
    )
}


def together(group: Group, timeout_s: float, work: Callable[[], Any]) -> list[Any]:
    """Run ``work`` here and give every rank all the results, by rank.

    When it raises on any rank, every rank raises the type of the first such error with the
    sentences of all. What is neither ours nor the system's came from the user's state: StateError.
    """
    raised: Exception | None = None
    try:
        said: dict[str, Any] = {"value": work()}
    except Exception as error:  # noqa: BLE001 - a state_dict may raise anything
        raised = error
        kind = "ArenaError" if isinstance(error, OSError) else type(error).__name__
        said = {"kind": kind, "error": str(error).removeprefix(f"rank {group.rank}: ")}
        if kind not in _RAISABLE:
            said = {"kind": "StateError", "error": f"{kind}: {error}"}
    words = group.exchange(dump(said), timeout_s)
    values = [parse_word(raw, rank) for rank, raw in enumerate(words)]
    failed = [(rank, value) for rank, value in enumerate(values) if "error" in value]
    if not failed:
        return [value["value"] for value in values]
    raisable = _RAISABLE.get(failed[0][1]["kind"], errors.PeerError)
    causes: dict[str, list[int]] = {}
    for rank, value in failed:
        causes.setdefault(value["error"], []).append(rank)
    text = "; ".join(f"{_ranks(ranks)}: {cause}" for cause, ranks in causes.items())
    raise raisable(text) from raised


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"


def open_job(options: Options, group: Group, estimate: Callable[[int], int], clock: Clock) -> Job:
    """Open the arena and agree with all ranks of ``group``.

    ``estimate(rank)``: bytes that its shard may take.
    Raises ConfigError, LayoutError, ArenaFull, ArenaBusy, StateError, PeerError; on every rank
    alike.
    """
    config: Config | None = None

    def introduce() -> dict[str, Any]:
        nonlocal config
        config = Config.from_env(options, os.environ, group.world)
        return _introduction(config, estimate(group.rank))

    said = together(group, options.timeout_s, introduce)
    if config is None:
        raise errors.ConfigError("this rank has no configuration")
    check_introductions(said, _library_version())
    _check_same(said)
    topology = Topology(tuple(str(one["node"]) for one in said))
    redundancy = parse_redundancy(options.redundancy, len(topology.nodes))
    sizes = [int(one["bytes"]) for one in said]
    layout = make_layout(redundancy, topology, sizes)
    arena = None
    try:
        arena = _open_arena(config, group, topology)
        arena_dirs = [str(one["arena_dir"]) for one in said]
        return _Opening(config, group, layout, sizes, arena_dirs, arena, clock).finish()
    except BaseException:
        if arena is not None:
            _refuse(arena, config)
        raise


def _refuse(arena: Arena, config: Config) -> None:
    """Close the arena of a start that came to nothing."""
    arena.close(refused=True)
    with contextlib.suppress(OSError, errors.ArenaError):
        prune(config.arena_dir, config.job)


def _introduction(config: Config, nbytes: int) -> dict[str, Any]:
    options = config.options
    return {
        "node": config.node_id,
        "job": config.job,
        "bytes": nbytes,
        "arena_dir": config.arena_dir,
        "same": {
            "job": config.job,
            "library": _library_version(),
            "format": FORMAT_VERSION,
            "algorithm": ALGORITHM,
            "store": config.store_address,
            **{name: getattr(options, name) for name in _SHARED_OPTIONS},
        },
    }


def _library_version() -> str:
    try:
        return version("planaria")
    except PackageNotFoundError:
        return "source"


def _check_same(said: Sequence[dict[str, Any]]) -> None:
    for name, ours in said[0]["same"].items():
        other = [(rank, one) for rank, one in enumerate(said) if one["same"].get(name) != ours]
        if other:
            rank, one = other[0]
            raise errors.ConfigError(
                f"{name} differs: rank 0 on node {said[0]['node']} has {ours!r}, rank {rank} on "
                f"node {one['node']} has {one['same'].get(name)!r}; all ranks must use the same"
            )


def _open_arena(config: Config, group: Group, topology: Topology) -> Arena:
    arena: Arena | None = None

    def work() -> None:
        nonlocal arena
        arena = Arena.open(
            config.arena_dir,
            job=config.job,
            node_id=config.node_id,
            position=topology.position(group.rank),
            rank=group.rank,
            world=group.world,
            timeout_s=config.options.timeout_s,
        )

    try:
        together(group, 2 * config.options.timeout_s, work)
    except BaseException:
        if arena is not None:
            _refuse(arena, config)
        raise
    if arena is None:
        raise errors.ArenaError("the arena was not opened")
    return arena


@dataclass
class _Opening:
    """The rounds after the arena is open."""

    config: Config
    group: Group
    layout: Layout
    sizes: list[int]
    arena_dirs: list[str]
    arena: Arena
    clock: Clock
    transport: Transport | None = None

    def finish(self) -> Job:
        group, options = self.group, self.config.options
        store = group.store(self.config.store_address, options.timeout_s)
        said = together(group, options.timeout_s, lambda: self._arena_facts(store))
        check_facts(said)
        self._check_memory(said)
        epoch = 1 + max(int(one["epoch"]) for one in said)
        nonce = str(said[0]["nonce"])
        # A replacement touches all its memory while the others, with theirs, wait for it.
        most = max(self._node_bytes().values())
        together(group, options.timeout_s + most / TOUCHED_BYTES_PER_S_MIN, self._reserve)
        together(group, options.timeout_s, lambda: self._fence(store, epoch, nonce))
        # Three connections: one for each thread that may ask, and one for the pairs.
        under, front, pairs = (store.clone(f"{self.config.job}/{nonce}") for _ in range(3))
        timed = TimedStore(pairs, options.timeout_s)
        links = Links(group.rank, self._transport(), timed, self.clock, options.timeout_s)
        if group.rank == 0:
            self._announce(epoch)
        return Job(
            name=self.config.job,
            config=self.config,
            clock=self.clock,
            rank=group.rank,
            epoch=epoch,
            nonce=nonce,
            layout=self.layout,
            arena=self.arena,
            held_root=held_root([str(one["incarnation"]) for one in said]),
            store=under,
            front=TimedStore(front, options.timeout_s),
            pairs=timed,
            links=links,
        )

    def _transport(self) -> Transport:
        """Made in the first round, so that a network that one node lacks is refused by all."""
        if self.transport is None:
            self.transport = self.group.transport(self.config.options.network_interface)
        return self.transport

    def _announce(self, epoch: int) -> None:
        """What concerns all ranks is said by rank 0."""
        config, redundancy = self.config, self.layout.redundancy
        log.info(
            "job %r (named by %s): epoch %d, %s; arenas take %s bytes per node",
            config.job,
            config.job_source,
            epoch,
            redundancy,
            sorted(set(self._node_bytes().values())),
        )
        if config.job_source == "TORCHELASTIC_RUN_ID" and _UUID.fullmatch(config.job):
            log.warning(
                "job %s: torchrun --standalone draws this name anew at each launch, which then "
                "finds nothing to restore: pass job= or set PLANARIA_JOB",
                config.job,
            )
        if config.options.redundancy == "auto" and not redundancy.n:
            log.warning("one node only: nothing survives its loss, only the loss of a process")

    def _arena_facts(self, store: Store) -> dict[str, Any]:
        self._transport()
        topology, node_id = self.layout.topology, self.config.node_id
        arenas: list[Arena | ArenaView] = [self.arena]
        arenas += left_over(
            self.config.arena_dir,
            self.config.job,
            node_id,
            ranks=len(topology.ranks_by_node[node_id]),
            position=topology.position(self.group.rank),
        )
        known = []
        for arena in arenas:
            known.append(arena.head.epoch if arena.head is not None else 0)
            for slot in arena.slots.values():
                if slot.record is not None:
                    known += [slot.record.generation.epoch, slot.record.fence_epoch]
        if self.group.rank == 0:
            # Less than the others wait for this rank, so that they hear of it too.
            timeout_s = self.config.options.timeout_s / 2
            known.append(_stored_epoch(store, self.config.job, timeout_s))
        return {
            "epoch": max(known),
            "nonce": secrets.token_hex(16),
            "incarnation": self.arena.head.incarnation,
            "present": self.arena.bytes_allocated,
            "memory": asdict(memory_facts(self.config.arena_dir)),
        }

    def _arena_bytes(self, rank: int) -> int:
        return self.layout.arena_bytes(rank, self.sizes)

    def _node_bytes(self) -> dict[str, int]:
        by_node = self.layout.topology.ranks_by_node.items()
        return {node: sum(self._arena_bytes(rank) for rank in ranks) for node, ranks in by_node}

    def _check_memory(self, said: Sequence[dict[str, Any]]) -> None:
        """Nodes on one machine and file system are checked together. Pure: the same everywhere."""
        for node, sharing in self.layout.topology.ranks_by_node.items():
            memories = [said[rank]["memory"] for rank in sharing]
            if len({(one["boot_id"], one["device"]) for one in memories}) > 1:
                raise errors.ConfigError(
                    f"{_ranks(sharing)} have the node id {node!r} and do not share their memory: "
                    "give each machine a node id of its own (node_id= or PLANARIA_NODE_ID) and "
                    "its ranks one arena_dir"
                )
        homes: dict[tuple[str, int], list[int]] = {}
        for rank, one in enumerate(said):
            homes.setdefault((one["memory"]["boot_id"], one["memory"]["device"]), []).append(rank)
        for ranks in homes.values():
            nodes = sorted({self.layout.topology.node_of_rank[rank] for rank in ranks})
            check = check_memory(
                MemoryFacts(**said[ranks[0]]["memory"]),
                node=", ".join(nodes),
                arena_dir=", ".join(sorted({self.arena_dirs[rank] for rank in ranks})),
                arena_bytes=sum(self._arena_bytes(rank) for rank in ranks),
                present_bytes=sum(int(said[rank]["present"]) for rank in ranks),
                scratch_bytes=max(self.sizes) * len(ranks),
            )
            if not check.ok:
                raise errors.ArenaFull(check.sentence)

    def _reserve(self) -> None:
        """Two own slots and two per held fragment; what an older incarnation left comes first."""
        code, rank = self.layout.redundancy.code, self.group.rank
        wanted = [(OWN, self.sizes[rank])] * 2
        for fragment in self.layout.held_by(rank):
            wanted += [(HELD, code.length(fragment.index, self.sizes[fragment.owner]))] * 2
        present = sorted(self.arena.slots.values(), key=lambda slot: (slot.capacity, slot.number))
        for kind, nbytes in sorted(wanted, key=lambda item: -item[1]):
            left = [slot for slot in present if slot.kind == kind]
            fitting = [slot for slot in left if slot.capacity >= nbytes]
            if left:
                # One that is too small may hold what has to be restored; it grows when free (P8).
                present.remove((fitting or left)[0])
            else:
                self.arena.allocate(nbytes, kind)

    def _fence(self, store: Store, epoch: int, nonce: str) -> None:
        self.arena.update_head(epoch=epoch, nonce=nonce)
        if self.group.rank == 0:
            under = TimedStore(store.clone(self.config.job), self.config.options.timeout_s / 2)
            try:
                under.set("epoch", str(epoch).encode())
            finally:
                under.close()


def _stored_epoch(store: Store, job: str, timeout_s: float) -> int:
    under = TimedStore(store.clone(job), timeout_s)
    try:
        raw = under.get(["epoch"])[0] if under.check(["epoch"]) else b"0"
    finally:
        under.close()
    text = raw.decode("ascii", "replace")
    if not text.isdecimal() or len(text) > 18:
        raise errors.StoreError(f"the store's epoch of job {job!r} is {text!r}, expected a number")
    return int(text)
