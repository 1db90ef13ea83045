"""The options of ``planaria demo``, checked before anything is started."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from recovery.layout import Redundancy, parse_redundancy

STEPS_MIN = 6
NODES_MAX = 32


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo is asked to do.

    Raises:
        ValueError: an option that cannot be done; says which, what was expected and what was given.
    """

    nodes: int = 4
    """Nodes of the job, each its own torchrun agent and arena directory."""
    kill: int = 1
    """Nodes (with ``kill_process``: workers) that die at the same instant."""
    redundancy: str = "auto"
    """As in ``replica.Checkpointer``."""
    steps: int = 40
    """Training steps."""
    seed: int = 0
    """Of the training, of the victims and of the instant of the kill."""
    kill_process: bool = False
    """Kill the worker process only; its node and arena stay."""
    sabotage: bool = False
    """Flip one restored byte after verification."""
    json: str | None = None
    """File for the figures, ``-`` for standard output."""

    def __post_init__(self) -> None:
        """Check every field, and the redundancy against the nodes."""
        if not 2 <= self.nodes <= NODES_MAX:
            raise ValueError(f"--nodes must be 2 to {NODES_MAX}, got {self.nodes}")
        if not 1 <= self.kill < self.nodes:
            raise ValueError(
                f"--kill must be 1 to {self.nodes - 1}, fewer than the {self.nodes} nodes, got "
                f"{self.kill}: what all nodes held in memory would be gone with the last one"
            )
        if self.steps < STEPS_MIN:
            raise ValueError(f"--steps must be at least {STEPS_MIN}, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")
        parse_redundancy(self.redundancy, self.nodes)

    @property
    def layout(self) -> Redundancy:
        """The redundancy that ``--redundancy`` gives on this many nodes."""
        return parse_redundancy(self.redundancy, self.nodes)

    @property
    def survivable(self) -> bool:
        """Whether the layout promises to survive this kill."""
        return self.kill_process or self.kill <= self.layout.survivable_nodes


@dataclass(frozen=True, kw_only=True)
class KillPlan:
    """Who dies and when, as drawn from the seed."""

    victims: tuple[int, ...]
    """Places of the victims among the nodes as started, rising."""
    step: int
    """The kill falls into the step after this one."""
    fraction: float
    """How far into that step, in [0, 1)."""


def draw_kill(options: DemoOptions) -> KillPlan:
    """Draw victims and instant: the same options always give the same plan."""
    generator = random.Random(options.seed)
    victims = tuple(sorted(generator.sample(range(options.nodes), options.kill)))
    step = generator.randint(math.ceil(options.steps * 0.3), math.floor(options.steps * 0.7))
    return KillPlan(victims=victims, step=step, fraction=generator.random())


def parse_demo_options(arguments: Sequence[str] | None = None) -> DemoOptions:
    """Read the command line; what cannot be done ends with one sentence and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="planaria demo",
        description="Train on several nodes, kill some, replace them, go on, and compare with a "
        "run that lost none. Both loss curves go to demo.png in the working directory, where "
        "matplotlib is installed.",
        epilog="Exits 0: equal; 1: different; 2: usage; 3: more nodes were killed than the layout "
        "allows, and the run said so and began anew; 4: the demo itself failed; 130: interrupted.",
    )
    add = parser.add_argument
    add("--nodes", type=int, default=4, help="nodes of the job (default 4)")
    add("--kill", type=int, default=1, help="how many die at the same instant (default 1)")
    add("--redundancy", default="auto", help="auto, none, copies:r or stripe:k+m (default auto)")
    add("--steps", type=int, default=40, help="training steps (default 40)")
    add("--kill-process", action="store_true", help="kill worker processes only, keep nodes")
    add("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    add("--seed", type=int, default=0, help="of training, victims and instant (default 0)")
    add("--sabotage", action="store_true", help="flip one restored byte: must end as different")
    given = vars(parser.parse_args(arguments))
    try:
        return DemoOptions(**given)
    except ValueError as error:
        parser.error(str(error))
