"""Makes nodes: a process that imports torch once and forks into fresh namespaces when asked.

A node is process 1 of its namespaces: a warm worker with a host name, a network and a memory of its
own. It dies with the process that forked it, that one with this, and this with the test run.

    python -m tests.cluster.forker PARENT_PID SOCKET

On the socket comes a node's name, with descriptors for its input, its answers and its log. Back
goes the number of its process, with a descriptor of it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from tests.cluster.addresses import hosts
from tests.replica.tether import die_with_parent

MEMORY = "512m"
"""Size of a node's tmpfs: room for every test's arenas, a limit for a test that runs wild."""
RETRY_MAX_MS = 1000
"""Longest pause between two attempts of TCP to get bytes through.

By default a link that is healed is tried again only after as long as it was cut.
"""
_RETRY_MAX = Path("/proc/sys/net/ipv4/tcp_rto_max_ms")
"""Of this network namespace alone; older kernels lack it, there tests take longer."""
_JOBS = ("tests.cluster.jobs", "tests.replica.jobs")
_NEW_MOUNTS, _NEW_NAME, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000
_NAME_BYTES_MAX = 64


def main(parent: int, asked: socket.socket) -> None:
    """Fork a node for every name that comes, until the other end is closed."""
    die_with_parent(parent)
    # Nobody here waits for those between this process and the nodes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in _JOBS:
        importlib.import_module(name)
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise SystemExit("a process with threads cannot be forked safely")
    while True:
        name, fds, _, _ = socket.recv_fds(asked, _NAME_BYTES_MAX, 3)
        if not name:
            return
        here = os.getpid()
        if os.fork() == 0:
            try:
                _make(name.decode(), fds, here, asked)
            except BaseException:  # noqa: BLE001 - nothing of a child may go on in this loop
                traceback.print_exc()
            os._exit(1)
        for fd in fds:
            os.close(fd)


def _make(name: str, fds: list[int], parent: int, asked: socket.socket) -> None:
    """Fork a node, tell who it is, and stay until it has died."""
    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_NAME | _NEW_PROCESSES | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    # The only child that is process 1; the parent of process 1 has, seen from inside, no number.
    pid = os.fork()
    if pid == 0:
        die_with_parent(0)
        asked.close()
        for fd, number in zip(fds, (0, 1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        _be(name)
        os._exit(0)
    socket.send_fds(asked, [str(pid).encode()], [os.pidfd_open(pid)])
    os.waitpid(pid, 0)
    os._exit(0)


def _be(name: str) -> None:
    """Become the node and serve jobs until the input ends."""
    # It keeps the answers' descriptor from the moment of its import.
    worker = importlib.import_module("tests.replica.worker")
    socket.sethostname(name)
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    _mount("-t", "tmpfs", f"-osize={MEMORY},mode=1777", "tmpfs", "/dev/shm")
    known = Path("/dev/shm/hosts")
    known.write_text(hosts(), encoding="ascii")
    _mount("--bind", str(known), "/etc/hosts")
    if _RETRY_MAX.exists():
        _RETRY_MAX.write_text(str(RETRY_MAX_MS), encoding="ascii")
    worker.say({"event": "up"})
    # A node has two networks: the group and the store are reached over this one.
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    worker.serve(*_JOBS)


def _mount(*words: str) -> None:
    subprocess.run([shutil.which("mount") or "mount", *words], check=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
