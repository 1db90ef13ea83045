"""A store whose every request ends by a deadline, for the training thread.

torch's client waits without end for a server that is frozen (seen: ``check`` on a stopped server
process ignores the client's timeout), so requests run on a helper thread that may be left behind.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from replica.at_exit import THREAD_PREFIX
from replica.errors import ConfigError, StoreError
from replica.store import Client, Store, TorchStore, said

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


class TimedStore:
    """``store`` with a deadline on each request. While one is overdue, all others fail at once."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._said = said(getattr(store, "place", ""))
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._overdue: _Call | None = None
        self._thread: threading.Thread | None = None

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(lambda: self._store.get(keys))

    def compare_set(self, key: str, value: bytes) -> bytes:
        return self._ask(lambda: self._store.compare_set(key, value))

    def raw(self, prefix: str) -> Client:
        """A fresh torch store under ``prefix``, which has no deadlines."""
        store = self._store
        if not isinstance(store, TorchStore):
            raise ConfigError(f"a {type(store).__name__} is no torch store")
        return self._ask(lambda: store.raw(prefix))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete(key))

    def clone(self, prefix: str) -> TimedStore:
        return TimedStore(self._store.clone(prefix), self._timeout_s)

    def close(self) -> None:
        """End the helper thread, if it is not overdue."""
        self._queue.put(None)

    def _ask(self, work: Callable[[], T]) -> T:
        if self._overdue is not None and not self._overdue.done.is_set():
            raise StoreError(
                f"the key-value store has not answered an earlier request yet{self._said}"
            )
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._loop, name=f"{THREAD_PREFIX}store", daemon=True
            )
            self._thread.start()
        call = _Call(work)
        self._queue.put(call)
        if not call.done.wait(self._timeout_s):
            self._overdue = call
            raise StoreError(
                f"the key-value store did not answer within {self._timeout_s} s{self._said}"
            )
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def _loop(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call.result = call.work()
            except Exception as error:  # noqa: BLE001 - it belongs to who asked; others go on
                call.error = error
            finally:
                call.done.set()
