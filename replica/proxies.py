"""In the background process: what only its trainer has, the state and the process group."""

from __future__ import annotations

import base64
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from replica.arena import Arena
from replica.errors import ArenaError, ConfigError, SaveFailed, StateError
from replica.image import Bytes, ShardHeader
from replica.silence import bounded
from replica.slot import data_name
from replica.source import Captured
from replica.store import MemoryStore, Store, TorchStore, connector
from replica.transport import Transport
from replica.transports.gloo import GlooTransport
from replica.transports.memory import MemoryTransport
from replica.wire import Frame, WireLost, error_of, field

Ask = Callable[[str, Frame], Any]
"""Asks the trainer's calling thread, from the main thread alone; raises what it raises."""

_PIECE_BYTES = 1 << 28
FINISH_SLACK_S = 5.0
"""How much later than its deadline the trainer may say that a copy was not finished."""


class RemoteGroup:
    """The trainer's group. ``route``: where its store is, and what its keys begin with."""

    def __init__(self, facts: Frame, ask: Ask) -> None:
        self.rank, self.world = field(facts, "rank", int), field(facts, "world", int)
        self._address = field(facts, "store", (str, type(None)))
        self._prefix = field(facts, "prefix", str)
        self._ask = ask

    def exchange(self, value: bytes, timeout_s: float) -> list[bytes]:
        """Everybody's value, by rank, through the trainer's group."""
        said = {"value": base64.b64encode(value).decode(), "timeout_s": timeout_s}
        words = self._ask("exchange", said)
        if not isinstance(words, list) or len(words) != self.world:
            raise WireLost(f"an exchange of {self.world} ranks gave {words!r:.100}")
        return [base64.b64decode(word, validate=True) for word in words]

    def store(self, address: str | None, timeout_s: float) -> Store:
        """The store at ``address``, else a client of this process to the group's own."""
        if address is None and self._alone:
            return MemoryStore("planaria/")
        if address is not None:
            return TorchStore(bounded(connector(address, timeout_s), timeout_s))
        if self._address is None:
            raise ConfigError(
                'background="process" needs a TCPStore behind the process group, or PLANARIA_STORE:'
                " another kind of store cannot be reached from a second process; make the group "
                'with tcp:// or env://, or choose background="thread"'
            )
        return TorchStore(bounded(connector(self._address, timeout_s), timeout_s), self._prefix)

    def transport(self, network_interface: str | None) -> Transport:
        """Pairs of gloo; where there is no process group nothing is sent."""
        return MemoryTransport() if self._alone else GlooTransport(network_interface)

    @property
    def _alone(self) -> bool:
        return self.world == 1 and self._address is None


class RemoteLoadPlan:
    """A restore that the trainer has prepared."""

    def __init__(self, header: ShardHeader, ask: Ask) -> None:
        self.header, self._ask = header, ask

    def commit(self) -> None:
        """Have the trainer change its live state."""
        self._ask("commit", {})


class _RemoteCaptured(Captured):
    """A capture that the trainer completes later."""

    def __init__(
        self, nbytes: int, late_bytes: int, number: int, ask: Ask, say: Callable[[Frame], None]
    ) -> None:
        super().__init__(nbytes)
        self.late_bytes = late_bytes
        self._number, self._ask, self._say = number, ask, say
        self._on_ended: Callable[[], None] = lambda: None
        self._finished = threading.Event()
        self._error: object = None
        self.ended = False

    def start(self, on_ended: Callable[[], None]) -> None:
        """Have the late copy begun."""
        self._on_ended = on_ended
        self._ask("late", {"number": self._number})

    def finish(self, timeout_s: float) -> None:
        """Wait for every byte; raises what the trainer's copy does, or SaveFailed."""
        self._say({"finish": self._number, "timeout_s": timeout_s})
        if not self._finished.wait(timeout_s + FINISH_SLACK_S):
            raise SaveFailed(f"the trainer had not copied all late bytes after {timeout_s} s")
        if self._error is not None:
            raise error_of(self._error)

    def finished(self, error: object) -> None:
        """All bytes are there, or will not be."""
        self._error = error
        self._finished.set()

    def over(self) -> None:
        """Nothing writes there any more."""
        self.ended = True
        self._on_ended()


class RemoteSnapshot:
    """The trainer's state: the same calls, carried out there on memory that both have mapped.

    ``arena``: whose slots may be named; set once it is open.
    """

    def __init__(self, ask: Ask, say: Callable[[Frame], None]) -> None:
        self._ask, self._say = ask, say
        self.arena: Arena | None = None
        self._copies = 0
        self._late: dict[int, _RemoteCaptured] = {}
        self._scratch: dict[int, tuple[int, int]] = {}

    def plan(self, rank: int, *, self_check: bool = False) -> Any:
        """Have the state walked; StateError as there."""
        return self._ask("plan", {"rank": rank, "self_check": self_check})

    def estimate_bytes(self, rank: int = 0) -> int:
        """Bytes to reserve."""
        return _size(self._ask("estimate", {"rank": rank}))

    def begin_capture(self, buffer: Bytes, header: ShardHeader) -> Captured:
        """Have the state copied into a slot, but for what may be copied later."""
        asked = {"memory": self._name(buffer), "header": asdict(header)}
        answer = self._ask("capture", asked)
        if not isinstance(answer, dict):
            raise WireLost(f"a capture gave {answer!r:.100}")
        nbytes, late_bytes = _size(answer.get("nbytes")), _size(answer.get("late_bytes"))
        if not late_bytes:
            return Captured(nbytes)
        self._copies += 1
        # Not when they end: what is said of one that has ended is still to come.
        self._late = {number: one for number, one in self._late.items() if not one.ended}
        late = _RemoteCaptured(nbytes, late_bytes, self._copies, self._ask, self._say)
        self._late[self._copies] = late
        return late

    def late_word(self, frame: Frame) -> None:
        """In the reading thread: what the trainer says of a late copy."""
        number = field(frame, "late", int)
        late = self._late.get(number)
        if late is None:
            return
        if frame.get("over") is True:
            late.over()
        else:
            late.finished(frame.get("raised"))

    def forget_buffers(self) -> None:
        """Have all mappings of slots given up."""
        self._ask("forget", {})

    def prepare(self, buffer: Bytes) -> RemoteLoadPlan:
        """Have an image checked that lies in a slot or in scratch memory."""
        asked = {"memory": self._name(buffer), "nbytes": buffer.nbytes}
        facts = self._ask("prepare", asked)
        if not isinstance(facts, dict):
            raise WireLost(f"a prepared restore is {facts!r:.100}")
        return RemoteLoadPlan(ShardHeader(**facts), self._ask)

    def scratch(self, nbytes: int) -> Bytes:
        """uint8[nbytes], of this process's memory, that the trainer can map; kept by the array."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        descriptor = os.memfd_create("planaria-scratch")
        try:
            for offset in range(0, nbytes, _PIECE_BYTES):
                os.posix_fallocate(descriptor, offset, min(_PIECE_BYTES, nbytes - offset))
            found: Bytes = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        address = found.ctypes.data
        self._scratch[address] = (descriptor, nbytes)
        weakref.finalize(found, self._give_back, address).atexit = False
        return found

    def _give_back(self, address: int) -> None:
        descriptor, _ = self._scratch.pop(address)
        os.close(descriptor)

    def _name(self, buffer: Bytes) -> Frame:
        """Where a buffer lies, for the trainer to map."""
        address = buffer.ctypes.data
        if address in self._scratch:
            descriptor, capacity = self._scratch[address]
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            return _memory(path, capacity)
        for number, slot in self.arena.slots.items() if self.arena is not None else ():
            if slot.capacity and slot.data.ctypes.data == address and self.arena is not None:
                return _memory(f"{self.arena.path}/{data_name(number, slot.kind)}", slot.capacity)
        raise StateError(f"a buffer of {buffer.nbytes} bytes lies in no slot of this arena")


def _memory(path: str, capacity: int) -> Frame:
    try:
        facts = Path(path).stat()
    except FileNotFoundError as error:
        raise ArenaError(
            f"{path} was removed by somebody while this process used it: that slot is lost, and "
            "one of the next saves makes it anew. Leave the arena of a running job alone"
        ) from error
    return {"path": path, "capacity": capacity, "device": facts.st_dev, "inode": facts.st_ino}


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise WireLost(f"a number of bytes is {value!r:.100}")
    return value
