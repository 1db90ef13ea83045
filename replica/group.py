"""The ranks that work together: who I am, one small exchange, a store, a transport."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from replica.config import agent_serves_store
from replica.errors import ConfigError, PeerError
from replica.silence import bounded
from replica.store import MemoryStore, Store, TorchStore, connector
from replica.transport import Transport
from replica.transports.gloo import GlooTransport
from replica.transports.memory import MemoryTransport

MESSAGE_BYTES_MAX = 1 << 20
_dist: Any = dist


class Group(Protocol):
    """What the drivers need of a process group. ``exchange`` is called in the foreground only."""

    @property
    def rank(self) -> int:
        """This process's number, 0..world-1."""
        ...

    @property
    def world(self) -> int:
        """How many ranks."""
        ...

    def exchange(self, value: bytes, timeout_s: float) -> list[bytes]:
        """Everybody's value, by rank. PeerError names who is missing where the backend can tell."""
        ...

    def store(self, address: str | None, timeout_s: float) -> Store:
        """A store of its own connection; ``address`` (host:port) or the group's own."""
        ...

    def transport(self, network_interface: str | None) -> Transport:
        """The transport for bulk bytes."""
        ...


class TorchGroup:
    """A torch.distributed process group (None: the default one)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.world = dist.get_world_size(self._group)

    def exchange(self, value: bytes, timeout_s: float) -> list[bytes]:
        """Two all-gathers of plain uint8 tensors: lengths, then padded values."""
        try:
            if dist.get_backend(self._group) == dist.Backend.GLOO:
                timeout = timedelta(seconds=timeout_s)
                dist.monitored_barrier(self._group, timeout, wait_all_ranks=True)
            lengths = self._gather(torch.tensor([len(value)]), timeout_s)
            sizes = [int(item) for item in lengths]
            if max(sizes) > MESSAGE_BYTES_MAX:
                raise PeerError(
                    f"ranks sent {sizes} bytes, at most {MESSAGE_BYTES_MAX} are allowed"
                )
            padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
            padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            values = self._gather(padded, timeout_s)
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank}: the ranks could not agree: {error}") from error
        return [bytes(item[:size].cpu().numpy()) for item, size in zip(values, sizes, strict=True)]

    def store(self, address: str | None, timeout_s: float) -> Store:
        """The store at ``address``, else a clone of the group's."""
        if address is not None:
            return TorchStore(bounded(connector(address, timeout_s), timeout_s))
        # Held so that the server in rank 0's process outlives destroy_process_group.
        origin: Any = self._group.get_group_store() if self._group is not None else None
        return TorchStore(bounded(origin.clone, timeout_s), place=self.store_place())

    def store_place(self) -> str:
        """Who serves the group's store: what ends with that process, no rank can reach any more."""
        address = self.store_address()
        if address is None:
            return ""
        if agent_serves_store(os.environ):
            return f"it is served at {address} by the launcher's agent"
        whose = "" if self._group is dist.group.WORLD else "global "
        return f"it is served at {address} by the process of {whose}rank 0"

    def store_address(self) -> str | None:
        """host:port of the TCPStore behind the group; None where it is another kind of store."""
        store: Any = self._group.get_group_store() if self._group is not None else None
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if not isinstance(store, _dist.TCPStore):
            return None
        return f"{store.host}:{store.port}"

    def transport(self, network_interface: str | None) -> Transport:
        """Pairs of gloo."""
        return GlooTransport(network_interface)

    def _gather(self, value: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        backend = str(dist.get_backend(self._group))
        value = value if "gloo" in backend else value.to(f"cuda:{torch.cuda.current_device()}")
        into = [torch.empty_like(value) for _ in range(self.world)]
        work = dist.all_gather(into, value, group=self._group, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=timeout_s))
        return into


@dataclass
class _Room:
    """Where the threads of a MemoryGroup meet."""

    world: int
    store: MemoryStore = field(default_factory=MemoryStore)
    transport: MemoryTransport = field(default_factory=MemoryTransport)
    rounds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class MemoryGroup:
    """Ranks that are threads of one process: for a world of one, and for tests."""

    def __init__(self, rank: int, room: _Room) -> None:
        self.rank, self.world, self._room, self._round = rank, room.world, room, 0

    @classmethod
    def make(cls, world: int) -> list[MemoryGroup]:
        """One group object for each of ``world`` ranks."""
        room = _Room(world)
        return [cls(rank, room) for rank in range(world)]

    def exchange(self, value: bytes, timeout_s: float) -> list[bytes]:
        """Wait for the other threads."""
        room, number = self._room, self._round
        self._round += 1
        with room.changed:
            values = room.rounds.setdefault(number, {})
            values[self.rank] = value
            room.changed.notify_all()
            if not room.changed.wait_for(lambda: len(values) == self.world, timeout_s):
                missing = sorted(set(range(self.world)) - set(values))
                raise PeerError(f"rank {self.rank}: no word from ranks {missing}")
            return [values[rank] for rank in range(self.world)]

    def store(self, address: str | None, timeout_s: float) -> Store:
        """The shared dictionary."""
        del address, timeout_s
        return self._room.store.clone("planaria")

    def transport(self, network_interface: str | None) -> Transport:
        """The shared queues."""
        del network_interface
        return self._room.transport


def as_group(group: Any) -> Group:
    """The Group of a torch process group, of a Group, or of None: the default or a world of one."""
    if group is None:
        return TorchGroup() if dist.is_initialized() else MemoryGroup.make(1)[0]
    if isinstance(group, dist.ProcessGroup):
        return TorchGroup(group)
    needed = ("rank", "world", "exchange", "store", "transport")
    if all(hasattr(group, name) for name in needed):
        found: Group = group
        return found
    raise ConfigError(f"group is a {type(group).__name__}, expected a torch ProcessGroup or None")
