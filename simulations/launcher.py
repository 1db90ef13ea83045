"""The simulated launcher, as torchrun behaves with an agent on every node.

When a process or a node is lost, all processes of the incarnation are ended, nodes that are gone
are replaced, the survivors keep their order and newcomers come last (so ranks change), and all
starts anew. A killed agent leaves its worker running: an orphan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulations.memory import Node
from simulations.process import Group, Process
from simulations.trainer import Trainer

if TYPE_CHECKING:
    from simulations.world import World

MONITOR_S = 0.5
HEARTBEAT_S = 3.0
LAST_CALL_S = 1.0
CAPACITY = 4_000
"""Bytes of a node's tmpfs: several times what the layouts here need."""


class Launcher:
    """``nodes`` in the order of their ranks; ``spares`` wait to be used, with what they hold."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: list[Node] = []
        self.spares: list[Node] = []
        self.leaving: set[str] = set()
        """Nodes that the next incarnation is to do without, though they live."""
        self.shuffled = False
        self.group: Group = Group(world, 0, 0)
        self.everybody: list[Process] = []
        self.restarts = 0
        self._made = 0
        self._ending = True

    def begin(self) -> None:
        """Bring the first nodes and start."""
        self.nodes = [self.new_node() for _ in range(self._world.config.nodes)]
        self._world.schedule(0.0, None, self._start)

    def new_node(self) -> Node:
        """A host that nobody has used."""
        self._made += 1
        capacity = CAPACITY * self._world.config.ranks_per_node
        return Node(self._world, f"n{self._made}", capacity)

    def living(self) -> list[Process]:
        """All processes that run, orphans too."""
        return [process for process in self.everybody if process.alive]

    def on_node(self, node: Node) -> list[Process]:
        """Processes that run on a node."""
        return [process for process in self.everybody if process.alive and process.node is node]

    @property
    def up(self) -> bool:
        """An incarnation runs, and nobody has noticed trouble yet."""
        return not self._ending

    def process_ended(self, process: Process, _: str) -> None:
        """An agent sees that its worker is gone."""
        if process.group is self.group and not process.orphan:
            self.trouble(MONITOR_S * self._world.random.random())

    def lose_node(self, node: Node) -> None:
        """A host dies; its heartbeat is missed."""
        for process in self.on_node(node):
            process.die()
        node.die()
        if node in self.spares:
            self.spares.remove(node)
        if node in self.nodes:
            self.trouble(HEARTBEAT_S)

    def lose_agent(self, node: Node) -> None:
        """A node's agent is killed; its workers go on."""
        for process in self.on_node(node):
            process.orphan = True
        self.trouble(HEARTBEAT_S)

    def trouble(self, delay_s: float) -> None:
        """After ``delay_s`` the agents end all workers."""
        self._world.schedule(delay_s, None, self._end, self.group.number)

    def end_orphan(self, process: Process) -> bool:
        """What a claim does to who has its arena; False: it cannot be ended."""
        if process.stubborn:
            return False
        if process.orphan and process.alive:
            self._world.faults.effect("orphan", process.node.name)
        process.die()
        return True

    def _end(self, number: int) -> None:
        if number != self.group.number or self._ending:
            return
        self._ending = True
        for process in self.living():
            if not process.orphan:
                # An agent that is cut off from the others finds out for itself.
                late_s = HEARTBEAT_S if process.node.partitioned else 0.0
                delay_s = late_s + self._world.random.random() * LAST_CALL_S
                self._world.schedule(delay_s, None, self._kill, process)
        self._world.schedule(LAST_CALL_S + 0.1, None, self._gather)

    def _kill(self, process: Process) -> None:
        process.die()

    def _gather(self, _: Any) -> None:
        """Find a node for every place."""

        def usable(node: Node) -> bool:
            return node.alive and not node.partitioned and node.name not in self.leaving

        kept = [node for node in self.nodes if usable(node)]
        for node in self.nodes:
            if node.alive and node not in kept:
                self.spares.append(node)
        waiting = [node for node in self.spares if usable(node)]
        missing = self._world.config.nodes - len(kept)
        # A node that was sent away comes back before a new one is bought.
        joined = waiting[:missing]
        for node in joined:
            self.spares.remove(node)
        while len(joined) < missing:
            joined.append(self.new_node())
        self.leaving.clear()
        self.nodes = kept + joined
        if self.shuffled:
            self._world.random.shuffle(self.nodes)
            self.shuffled = False
        self._world.schedule(self._world.random.uniform(0.5, 1.5), None, self._start)

    def _start(self, _: Any) -> None:
        if any(not node.alive or node.partitioned for node in self.nodes):
            self._gather(None)
            return
        config, world = self._world.config, self._world
        for process in self.living():
            if not process.orphan and process.node in self.nodes:
                process.die()
        self.everybody = self.living()
        size = config.nodes * config.ranks_per_node
        group = self.group = Group(world, self.group.number + 1, size)
        places = [
            (node, position) for node in self.nodes for position in range(config.ranks_per_node)
        ]
        self._ending = False
        self.restarts += 1
        for rank, (node, position) in enumerate(places):
            process = Process(world, group, node=node, rank=rank, position=position)
            group.by_rank[rank] = process
            self.everybody.append(process)
        if config.store_on_rank0:
            world.store.wipe()
            group.store_host = group.by_rank[0]
        group.store_life = world.store.life
        world.checker.started(group)
        for process in group.by_rank.values():
            trainer = Trainer(process)
            trainer.task = process.start(trainer.script(), "open")
