"""Limits on silence: set on a store client's own connection, and on no other of the process."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from replica.silence import _sockets, bounded
from replica.store import connector
from tests.replica.pool import serve_store

TIMEOUT_S = 7.0


def limits():
    """Return the limit on silence, in ms, of every TCP connection of this process, by number."""
    found = {}
    for fd, _ in _sockets():
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found[fd] = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return found


@pytest.fixture
def server():
    """Yield a store to connect to."""
    return serve_store()


@pytest.mark.parametrize("made", ["by address", "as a clone"])
def test_a_client_has_a_limit_and_nothing_else_has(server, made):
    """Connections of others, made before and meanwhile, keep theirs: all are read back."""
    address = f"127.0.0.1:{server.port}"
    connect = connector(address, TIMEOUT_S)
    if made == "as a clone":
        connect = dist.PrefixStore("a", dist.PrefixStore("b", server)).clone
    listener = socket.create_server(("127.0.0.1", 0))
    others = []

    def connect_amid_others():
        others.append(socket.create_connection(listener.getsockname()))
        others.append(os.open("/dev/null", os.O_RDONLY))
        return connect()

    before = limits()
    client = bounded(connect_amid_others, TIMEOUT_S)()
    new = {fd: limit for fd, limit in limits().items() if fd not in before}
    assert {fd: limits()[fd] for fd in before} == before
    assert new.pop(others[0].fileno()) == 0
    # The other two are both ends of the client's: the server is in this process too.
    assert sorted(new.values()) in ([0, 1000 * TIMEOUT_S], [1000 * TIMEOUT_S])
    client.set("key", "value")
    assert client.get("key") == b"value"
    others[0].close()
    os.close(others[1])
    listener.close()


def test_other_stores_are_left_alone(tmp_path):
    """A store without a port is handed through."""
    store = dist.FileStore(str(tmp_path / "file"), 1)
    assert bounded(lambda: store, TIMEOUT_S)() is store


def test_the_error_of_a_connection_that_fails_is_its_own():
    """Nobody listens there: the caller sees what torch says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    connect = bounded(
        lambda: dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=0.1),
        ),
        TIMEOUT_S,
    )
    with pytest.raises(dist.DistNetworkError):
        connect()
