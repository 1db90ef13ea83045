"""Channels over torch.distributed: one stand-alone two-member gloo group for each pair of ranks.

A pair of its own, because one timeout closes all pairs of a group (measured): a stuck peer must
cost its own pair only. The trainer's process groups are never used. Nothing of ``ProcessGroupGloo``
leaves this module. A send and a receive of unlike sizes end the process inside gloo (seen): sizes
are settled by offers and plans, never here.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replica.errors import ConfigError, PeerError
from replica.store import Store, TorchStore
from replica.timed_store import TimedStore
from replica.transport import Bytes, Pending, check_buffer

THREADS = 2
BULK, CLOSING = 0, 1
"""Tags."""


class GlooTransport:
    """Makes two-member groups. ``network_interface``: None leaves the choice to torch."""

    def __init__(self, network_interface: str | None = None) -> None:
        _probe()
        self._interface = network_interface or os.environ.get("GLOO_SOCKET_IFNAME") or None
        self._device()

    def connect(
        self, name: str, rank: int, peer: int, store: Store, timeout_s: float
    ) -> GlooChannel:
        """Join ``peer``; blocks until it comes. ``timeout_s`` bounds every later wait.

        And this one, but for a peer that is cut off silently: five times as long (seen).
        """
        if not isinstance(store, TorchStore | TimedStore):
            raise ConfigError(f"gloo needs a torch store, got {type(store).__name__}")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - the public form sets no threads
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options._threads = THREADS  # noqa: SLF001
        options._devices = [self._device()]  # noqa: SLF001
        try:
            group = dist.ProcessGroupGloo(store.raw(name), int(rank > peer), 2, options)
        except RuntimeError as error:
            raise PeerError(f"rank {rank}: no connection to rank {peer}: {error}") from error
        return GlooChannel(group, rank, peer)

    def _device(self) -> Any:
        try:
            if self._interface:
                return dist.ProcessGroupGloo.create_device(interface=self._interface)
            return dist.ProcessGroupGloo.create_default_device()
        except RuntimeError as error:
            which = self._interface or "chosen by torch; set network_interface= to name one"
            raise ConfigError(f"network interface {which}: {error}") from error


class GlooChannel:
    """One two-member group; the other member is ``peer``."""

    def __init__(self, group: dist.ProcessGroupGloo, rank: int, peer: int) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._rank, self._peer = rank, peer
        self._other = int(rank < peer)

    def send(self, buffer: Bytes) -> Pending:
        """Post a send of ``buffer``."""
        return self._post("send", buffer)

    def receive(self, buffer: Bytes) -> Pending:
        """Post a receive into ``buffer``."""
        return self._post("recv", buffer)

    def close(self) -> None:
        """Break the pair and drop the group; its threads end when no posted buffer is left.

        A posted buffer holds the group, and no Work can be aborted. But gloo closes a pair at its
        first timeout (seen), and that ends at once what either side has posted, bytes in the
        middle of a message excepted: so let one receive run out that nobody will answer.
        """
        group: Any = self._group
        self._group = None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                unanswered = group.recv([torch.zeros(1, dtype=torch.uint8)], self._other, CLOSING)
                unanswered.wait(timedelta(milliseconds=1))

    def _post(self, verb: str, buffer: Bytes) -> Pending:
        words = f"rank {self._rank}: {verb} of {buffer.size} bytes with rank {self._peer}"
        group = self._group
        if group is None:
            raise PeerError(f"{words}: the channel is closed")
        try:
            work = getattr(group, verb)([_tensor(buffer)], self._other, BULK)
        except RuntimeError as error:
            raise PeerError(f"{words}: {error}") from error
        return _GlooPending(work, group, words)


class _GlooPending:
    """Holds the group too: a group dropped under a posted buffer could not end its wait."""

    def __init__(self, work: Any, group: dist.ProcessGroupGloo, words: str) -> None:
        self._work, self._group, self._words = work, group, words

    def wait(self) -> None:
        """Wait at most the group's timeout."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self._words}: {error}") from error


def _tensor(buffer: Bytes) -> torch.Tensor:
    check_buffer(buffer)
    return torch.from_numpy(buffer)


def _probe() -> None:
    missing = [
        name
        for name in ("_Options", "create_device", "create_default_device", "send", "recv")
        if not hasattr(getattr(dist, "ProcessGroupGloo", None), name)
    ]
    if missing:
        raise ConfigError(
            f"torch {torch.__version__} has no ProcessGroupGloo with {missing}; "
            "use a torch version that planaria's pyproject.toml names"
        )
