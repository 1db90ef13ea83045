"""Nodes that are namespaces of this machine, on networks of their own: what a test may do to them.

A node has its own network, process, mount and host name spaces and a private tmpfs at /dev/shm; all
of it ends with its process 1. The networks are bridges inside the namespace of one more node, the
switch: nothing of this machine is changed, no name can meet another run's, and killing the switch
removes them.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.cluster.addresses import (
    INTERFACES,
    NETWORKS,
    NODES_MAX,
    NUMBERS,
    SWITCH,
    hardware_address,
)
from tests.replica.pool import DEADLINE_S, Worker, worker_environment
from tests.sources import ROOT

_NEEDED = ("ip", "ss", "tc", "mount", "nsenter", "unshare")
_SPACES = ("--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc")
_PROBE = """
set -e
ip link add one type bridge
ip link add two type veth peer name three
ip link set two master one
ip link set two type bridge_slave isolated on
tc qdisc add dev three root tbf rate 8mbit burst 64kb latency 100ms
mount -t tmpfs -osize=1m tmpfs /dev/shm
"""
_COMMAND_S = 30.0


def why_not() -> str:
    """Why no node can be made here; empty where it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"needs iproute2 and util-linux: there is no {', '.join(missing)}"
    tried = _run(["unshare", *_SPACES, "sh", "-c", _PROBE], check=False)
    return f"namespaces are refused here: {tried.stderr.strip()}" if tried.returncode else ""


def _run(
    command: Sequence[str], text: str = "", *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if check and ran.returncode:
        raise AssertionError(f"{' '.join(command)}: {ran.stderr.strip()}\n{text}")
    return ran


class Forker:
    """The process that nodes are forked from; see ``tests.cluster.forker``."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(DEADLINE_S)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.forker", str(os.getpid()), str(theirs.fileno())],
            cwd=ROOT,
            env=worker_environment(),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def fork(self, name: str, log: int) -> NodeProcess:
        """Return the process 1 of a new node."""
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        socket.send_fds(self._socket, [name.encode()], [their_in, their_out, log])
        os.close(their_in)
        os.close(their_out)
        pid, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        if not fds:
            raise AssertionError("the forker has died: its last words are above")
        return NodeProcess(int(pid), fds[0], our_in, our_out)

    def end(self) -> None:
        """End it, and with it every node."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class NodeProcess:
    """As much of ``subprocess.Popen`` as a Worker needs, for a process that is no child of ours."""

    def __init__(self, pid: int, fd: int, stdin: int, stdout: int) -> None:
        self.pid, self._fd = pid, fd
        weakref.finalize(self, os.close, fd)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)

    def poll(self) -> str | None:
        """Return None while it runs."""
        return "a death" if select.select([self._fd], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> str:
        """Return when it has ended; how it ended is not known."""
        if not select.select([self._fd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return "a death"

    def send_signal(self, number: int) -> None:
        """Send a signal to it and to no successor of its number."""
        signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)


class Node(Worker):
    """One node. ``pid``: its process 1, as seen from here."""

    def __init__(self, name: str, forker: Forker) -> None:
        self.name, self._forker = name, forker
        super().__init__()
        self.hear("up")

    def _launch(self) -> NodeProcess:
        return self._forker.fork(self.name, self._log.fileno())

    @property
    def alive(self) -> bool:
        """Whether its process 1 still runs."""
        return self.process.poll() is None

    def stopped(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until all its threads stand still after SIGSTOP."""
        limit = time.monotonic() + deadline_s
        while any(_state(path) != "T" for path in Path(f"/proc/{self.pid}/task").iterdir()):
            if time.monotonic() > limit:
                self.fail(f"did not stop within {deadline_s} s")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a loss of power would: every process, the memory, the network."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def run(self, *command: str, text: str = "") -> None:
        """Run a program of this machine in the node's network."""
        _run(["nsenter", "--net", f"--target={self.pid}", *command], text)

    def ip(self, *lines: str) -> None:
        """Run lines of ``ip`` in the node's network."""
        self.run("ip", "-batch", "-", text="\n".join(lines))

    def settle_addresses(self, interfaces: dict[str, str], number: int) -> None:
        """Give it address ``number`` on each network, and let it know everybody's.

        With nothing to be asked, a cut is silent for new connections too, as behind a router.
        """
        # One's own address is reached through it.
        self.ip("link set lo up")
        for network, interface in interfaces.items():
            others = [n for n in NUMBERS if n != number]
            self.ip(
                f"link set {interface} address {hardware_address(network, number)}",
                f"addr add {NETWORKS[network]}.{number}/24 dev {interface}",
                f"link set {interface} up",
                *(
                    f"neigh add {NETWORKS[network]}.{other} nud permanent"
                    f" lladdr {hardware_address(network, other)} dev {interface}"
                    for other in others
                ),
            )


class Switch(Node):
    """The node that the networks run through, and that no cut touches: the store lives here."""

    def __init__(self, forker: Forker) -> None:
        super().__init__("switch", forker)
        self._numbers: dict[str, int] = {}
        self._healing: list[tuple[Node, Callable[[], None]]] = []
        for network in NETWORKS:
            self.ip(f"link add {network} type bridge", f"link add {_beside(network)} type bridge")
            self.ip(f"link set {_beside(network)} up")
        self.settle_addresses({network: network for network in NETWORKS}, SWITCH)

    def plug_in(self, node: Node) -> None:
        """Connect a new node to the networks."""
        number = self._numbers[node.name] = len(self._numbers) + 1
        if number > NODES_MAX:
            raise ValueError(f"node {node.name} is number {number}, at most {NODES_MAX} fit")
        for network, interface in INTERFACES.items():
            (port,) = self._ports(node, [network])
            self.ip(
                f"link add {port} type veth peer name {interface} netns {node.pid}",
                f"link set {port} master {network} up",
            )
        node.settle_addresses(INTERFACES, number)

    def cut(self, node: Node, networks: Sequence[str] = tuple(NETWORKS)) -> None:
        """Cut a node off, silently: nothing goes through and nobody is told."""
        self._change(node, networks, "link set {port} down", "link set {port} up")

    def part(self, one: Node, other: Node) -> None:
        """Cut two nodes off from each other; both still reach all others and the store."""
        words = "link set {{port}} type bridge_slave isolated {}"
        for node in (one, other):
            self._change(node, tuple(NETWORKS), words.format("on"), words.format("off"))

    def split(self, nodes: Sequence[Node]) -> None:
        """Cut these nodes, who still reach each other, off from all others and the store."""
        for network in NETWORKS:
            words = "link set {{port}} master {}"
            for node in nodes:
                self._change(node, [network], words.format(_beside(network)), words.format(network))

    def slow_down(self, node: Node, bytes_per_s: float) -> None:
        """Let a node's bulk network carry this much each way, and no more.

        Nothing is dropped: losses would share the link out by luck.
        """
        (port,) = self._ports(node, ["bulk"])
        shape = f"root tbf rate {int(8 * bytes_per_s)}bit burst 64kb limit 128mb".split()
        for end, device in ((self, port), (node, INTERFACES["bulk"])):
            end.run("tc", "qdisc", "add", "dev", device, *shape)
            self._healing.append(
                (node, partial(end.run, "tc", "qdisc", "del", "dev", device, "root"))
            )

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Keep the store from answering; its kernel goes on to take what it is asked."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            self.stopped()
            yield
        finally:
            self.go_on()

    def forget(self, node: Node) -> None:
        """Drop the store's side of every connection to a node, without a word to it."""
        address = f"{NETWORKS['control']}.{self._numbers[node.name]}"
        self.run("ss", "--kill", "dst", address)

    def heal(self) -> None:
        """Undo all that was done to the links of nodes that are still there."""
        while self._healing:
            node, undo = self._healing.pop()
            if node.alive:
                undo()

    def _change(self, node: Node, networks: Sequence[str], there: str, back: str) -> None:
        ports = self._ports(node, networks)
        self.ip(*(there.format(port=port) for port in ports))
        self._healing.append((node, partial(self.ip, *(back.format(port=port) for port in ports))))

    def _ports(self, node: Node, networks: Sequence[str]) -> list[str]:
        return [f"{network}-{self._numbers[node.name]}" for network in networks]


def _state(task: Path) -> str:
    stat = (task / "stat").read_text(encoding="ascii", errors="replace")
    return stat.rpartition(")")[2].split()[0]


def _beside(network: str) -> str:
    """The bridge of those who are split off from the others on this network."""
    return f"{network}-beside"
