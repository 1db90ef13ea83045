"""Connections to the store that end when the other side falls silent.

torch's client waits for an answer without end. Where a link is cut silently, the kernel gives an
unanswered request up after a quarter of an hour; where the request had arrived and only its answer
was lost, it never does (seen: the rank asked for ever, and no save of the whole job was committed
any more). torch hands out neither its sockets nor an option for them, so the one that a new client
has opened is found among those of this process. A store whose process stands still is not silent:
its kernel answers for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DESCRIPTORS = Path("/proc/self/fd")
_PROBES = 3


def bounded(connect: Callable[[], Any], timeout_s: float) -> Callable[[], Any]:
    """A maker of the same store clients, each of which fails after so much silence."""

    def made() -> Any:
        before = _sockets()
        client = connect()
        port = _port(client)
        for fd in sorted(fd for fd, _ in _sockets() - before) if port else ():
            _bound(fd, port, timeout_s)
        return client

    return made


def _sockets() -> set[tuple[int, str]]:
    """Descriptors of this process's sockets, each with what the kernel calls it."""
    found = set()
    for path in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            target = str(path.readlink())
            if target.startswith("socket:"):
                found.add((int(path.name), target))
    return found


def _port(client: Any) -> int:
    """The port of the server; 0 for a store that is none of TCP."""
    while hasattr(client, "underlying_store"):
        client = client.underlying_store
    return int(getattr(client, "port", 0) or 0)


def _bound(fd: int, port: int, timeout_s: float) -> None:
    """Set the limits on a connection to ``port``; other threads' descriptors may come and go."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        copy = os.dup(fd)
        stack.callback(os.close, copy)
        one = socket.socket(fileno=copy)
        stack.callback(one.detach)
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getpeername()[1] != port:
            return
        between_s = max(1, round(timeout_s / (_PROBES + 1)))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, between_s),
            (socket.TCP_KEEPINTVL, between_s),
            (socket.TCP_KEEPCNT, _PROBES),
            (socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000))),
        ):
            one.setsockopt(socket.IPPROTO_TCP, option, value)
