"""Memory of the background process as its trainer sees it: the same files, mapped here as well."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from replica.image import Bytes
from replica.slot import listed_slots, map_file
from replica.wire import Frame, WireLost, field

_Key = tuple[str, int, int]


class Mappings:
    """Slots by path and inode, mapped once; for one thread.

    ``pid``: the background process, whose scratch memory is found under its descriptors.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._slots: dict[_Key, Bytes] = {}

    def view(self, memory: Frame) -> Bytes:
        """uint8[capacity], writable, of the file that ``memory`` names.

        Raises WireLost when that is no file of slot or scratch memory of this size, OSError when
        it cannot be had.
        """
        path, capacity = field(memory, "path", str), field(memory, "capacity", int)
        key = (path, field(memory, "device", int), field(memory, "inode", int))
        if key in self._slots:
            return self._slots[key]
        scratch = path.startswith(f"/proc/{self._pid}/fd/")
        if not scratch and not list(listed_slots([Path(path).name])):
            raise WireLost(f"{path!r:.200} is no slot")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if scratch else os.O_NOFOLLOW))
        try:
            facts = os.fstat(descriptor)
            found = (stat.S_ISREG(facts.st_mode), facts.st_uid, facts.st_size)
            if found != (True, os.geteuid(), capacity) or (facts.st_dev, facts.st_ino) != key[1:]:
                raise WireLost(f"{path!r:.200} is not the memory of {capacity} bytes it should be")
            view = map_file(descriptor, capacity, write=True)
        finally:
            os.close(descriptor)
        if not scratch:
            self._slots[key] = view
        return view

    def purge(self) -> None:
        """Let go of the slots that are no longer there."""
        for key in list(self._slots):
            try:
                facts = Path(key[0]).stat()
            except FileNotFoundError:
                del self._slots[key]
                continue
            if (facts.st_dev, facts.st_ino) != key[1:]:
                del self._slots[key]

    def forget(self) -> None:
        """Let go of all."""
        self._slots.clear()
