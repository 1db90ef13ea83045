"""The store keys of one process's saves and mends, and when they go (P5)."""

from __future__ import annotations

import logging
import threading

from recovery.commit import KeyLog
from replica.errors import StoreError
from replica.store import Store

log = logging.getLogger("planaria")


class Keys:
    """What this rank wrote, by the admission that it belongs to. Any thread may call.

    ``root``: this rank also removes decisions and admissions, which no one rank wrote.
    """

    def __init__(self, store: Store, *, root: bool) -> None:
        self._store, self._root = store, root
        self._log = KeyLog()
        self._lock = threading.Lock()

    def open(self, sequence: int) -> set[str]:
        """Keys written from now on belong to ``sequence``; the set that takes them."""
        with self._lock:
            return self._log.open(sequence)

    def note(self, sequence: int, *decided: str) -> None:
        """Decisions and admissions of ``sequence``."""
        with self._lock:
            keys = self._log.open(sequence)
            if self._root:
                keys.update(decided)

    def delete_expired(self, sequence: int) -> None:
        """After ``sequence`` was committed; a store that fails here keeps keys nobody needs."""
        with self._lock:
            keys = self._log.expired(sequence)
        try:
            for key in keys:
                self._store.delete(key)
        except StoreError as error:
            log.warning("keys of old saves were not removed: %s", error)
