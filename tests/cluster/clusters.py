"""Worlds of nodes: a rank on each, one store that no cut touches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from tests.cluster.addresses import STORE_ADDRESS
from tests.cluster.nodes import Forker, Node, Switch
from tests.replica.pool import Pool, results
from tests.replica.worlds import UNSAVED_STEP, World


class NodeWorld(World):
    """Nodes as ranks 0, 1, ... of one group."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes, [node.name for node in nodes])

    def make(self, **options: object) -> None:
        """Make a Checkpointer on every node; it finds out by itself which node it is on."""
        for rank, node in enumerate(self.workers):
            node.start("make", owner=rank, step=UNSAVED_STEP, **options)
        results(self.workers)


class Cluster:
    """The nodes of one test run, lent to one test at a time. ``switch``: what a test may break."""

    def __init__(self, size: int) -> None:
        self._forker = Forker()
        self.switch = Switch(self._forker)
        self._names = count()
        self._worlds = count()
        self._pool = Pool(size, self._new_node)
        self._pool.warm()
        self._port = 0

    def _new_node(self) -> Node:
        node = Node(f"node-{next(self._names)}", self._forker)
        self.switch.plug_in(node)
        return node

    @property
    def port(self) -> int:
        """Port of the store at STORE_ADDRESS."""
        if not self._port:
            self.switch.hear("ready")
            self._port = self.switch.call("serve_store", address=STORE_ADDRESS)
        return self._port

    def nodes(self, number: int) -> list[Node]:
        """Lend nodes that hold nothing."""
        return self._pool.take(number)

    def fresh(self, killed: Node) -> Node:
        """Return another node in place of one that was killed."""
        return self._pool.replace(killed)

    def open(self, nodes: Sequence[Node] | int, **options: object) -> NodeWorld:
        """Make nodes, fresh or given, one world with Checkpointers that are not opened yet."""
        nodes = self.nodes(nodes) if isinstance(nodes, int) else nodes
        where = {"address": STORE_ADDRESS, "port": self.port, "prefix": f"{next(self._worlds)}"}
        for rank, node in enumerate(nodes):
            node.start("join_at", rank=rank, world=len(nodes), **where)
        results(nodes)
        world = NodeWorld(nodes)
        world.make(**options)
        return world

    def clear(self) -> None:
        """Heal every link and take the nodes back; those that do not come clean are replaced."""
        self.switch.heal()
        self._pool.give_back()

    def end(self) -> None:
        """End every node, and with the switch the networks."""
        self._pool.end()
        self.switch.end()
        self._forker.end()
