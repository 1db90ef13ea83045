"""The key-value store through which ranks exchange small control messages.

``Store`` is what the drivers need of a torch.distributed store: set, check, get, compare-and-set
from nothing, delete. Nothing here blocks for a key to appear: a blocking wait on a client that the
trainer shares would stall the trainer. Every failure is a StoreError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed

from replica.errors import ConfigError, StoreError

T = TypeVar("T")
Client = Any
"""A torch.distributed store; torch exports its store classes without their types."""
_dist: Any = torch.distributed


class Store(Protocol):
    """A key-value store under one prefix. Used by one thread at a time."""

    def set(self, key: str, value: bytes) -> None:
        """Set ``key``."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key is set. Never waits."""
        ...

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys that are known to be set."""
        ...

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Set ``key`` if it is not set; the value it has now."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is set."""
        ...

    def clone(self, prefix: str) -> Store:
        """A store over a connection of its own, under ``prefix`` below this one's."""
        ...


class TorchStore:
    """A torch.distributed store reached by a connection of its own.

    ``connect`` makes a new client; it is called again after a failure, so a store that comes back
    is used again. ``place`` says who serves it, for errors; "" where that is not known.
    """

    def __init__(
        self, connect: Callable[[], Client], prefix: str = "planaria", place: str = ""
    ) -> None:
        self._connect = connect
        self.place = place
        self._prefix = prefix
        self._client: Client | None = None

    def raw(self, prefix: str) -> Client:
        """A fresh torch store under ``prefix``, for the making of a process group."""
        return self._run(lambda _: _dist.PrefixStore(f"{self._prefix}/{prefix}", self._connect()))

    def set(self, key: str, value: bytes) -> None:
        self._run(lambda client: client.set(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._run(lambda client: bool(client.check(list(keys))))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self._run(lambda client: [bytes(v) for v in client.multi_get(list(keys))])

    def compare_set(self, key: str, value: bytes) -> bytes:
        return self._run(lambda client: bytes(client.compare_set(key, "", value)))

    def delete(self, key: str) -> None:
        self._run(lambda client: client.delete_key(key))

    def clone(self, prefix: str) -> TorchStore:
        return TorchStore(self._connect, f"{self._prefix}/{prefix}", self.place)

    def _run(self, call: Callable[[Client], T]) -> T:
        try:
            if self._client is None:
                self._client = _dist.PrefixStore(self._prefix, self._connect())
            return call(self._client)
        except RuntimeError as error:
            # All of torch's store errors are RuntimeErrors; a broken client never heals: drop it.
            self._client = None
            text = f"the key-value store did not answer{said(self.place)}: {error}"
            raise StoreError(text) from error


def said(place: str) -> str:
    """The place of a store as a clause of an error, "" where it is not known."""
    return f" ({place})" if place else ""


class MemoryStore:
    """A store inside one process, shared by its clones: for a world of one, and for tests."""

    def __init__(self, prefix: str = "", shared: _Shared | None = None) -> None:
        self._prefix = prefix
        self._shared = shared or _Shared()

    def set(self, key: str, value: bytes) -> None:
        with self._shared.lock:
            self._shared.values[self._prefix + key] = bytes(value)

    def check(self, keys: Sequence[str]) -> bool:
        with self._shared.lock:
            return all(self._prefix + key in self._shared.values for key in keys)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        with self._shared.lock:
            try:
                return [self._shared.values[self._prefix + key] for key in keys]
            except KeyError as error:
                raise StoreError(f"key {error} is not set") from error

    def compare_set(self, key: str, value: bytes) -> bytes:
        with self._shared.lock:
            return self._shared.values.setdefault(self._prefix + key, bytes(value))

    def delete(self, key: str) -> None:
        with self._shared.lock:
            self._shared.values.pop(self._prefix + key, None)

    def clone(self, prefix: str) -> MemoryStore:
        return MemoryStore(f"{self._prefix}{prefix}/", self._shared)


class _Shared:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()


def connector(address: str, timeout_s: float) -> Callable[[], Client]:
    """A maker of clients for the TCPStore at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"PLANARIA_STORE is {address!r}, expected host:port")
    timeout = timedelta(seconds=timeout_s)
    return lambda: _dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timeout
    )
