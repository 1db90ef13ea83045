"""One worker of a sharded training run that outlives its nodes: a small GPT on real text.

Start it by torchrun, once per rank, or by hand as a world of one:

    torchrun --nproc-per-node=2 examples/train_fsdp.py --steps 20
    python examples/train_fsdp.py --steps 20

On CPU with one thread per rank the run is deterministic: two runs with the same options give the
same losses and the same final state, bit for bit, whether or not nodes were lost on the way.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import replica
from replica.demo.data import TextLoader, standard_library_text
from replica.demo.guard import guard_arenas
from replica.demo.journal import Journal
from replica.demo.model import ByteGPT, ModelConfig
from replica.demo.state_digest import random_states, state_digest

BATCH = 8
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 10
GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a worker is asked to do."""

    steps: int
    """Train until this step is done."""
    seed: int
    """Of the model's first values and of every random draw in training."""
    device: str
    """``cpu`` or ``cuda``."""
    checkpoint: bool
    """Save every step and restore at the start; without it the run is the plain reference."""
    redundancy: str
    """As in ``replica.Checkpointer``."""
    journal_dir: Path | None
    """Where this worker's journal goes; None: standard output."""
    guard_arenas: bool
    """Refuse to open a file under another node's arena directory."""
    sabotage: bool
    """Flip one restored byte on rank 0, so that the comparison of two runs can be seen to fail."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that changes from step to step, except the random states."""

    model: ByteGPT
    optim: torch.optim.Optimizer
    sched: torch.optim.lr_scheduler.LRScheduler
    loader: TextLoader
    device: torch.device

    def step(self) -> float:
        """Train one step; return this rank's loss."""
        inputs, targets = (tensor.to(self.device) for tensor in self.loader.next_batch())
        loss = self.model(inputs, targets)
        loss.backward()
        self.optim.step()
        self.sched.step()
        self.optim.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return the state objects by the names under which they are saved."""
        return {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "loader": self.loader,
        }

    def digest(self) -> str:
        """Return the digest of this rank's whole state, random states included."""
        return state_digest(self.state() | {"random": random_states(self.device)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; a failure ends the process, so that the launcher restarts it."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    journal = Journal(
        options.journal_dir, node=os.environ.get("PLANARIA_NODE_ID") or socket.gethostname()
    )
    if options.guard_arenas:
        guard_arenas(
            Path(os.environ["PLANARIA_ARENA_DIR"]),
            lambda path: journal.write("foreign-open", path=path),
        )
    device = join_group(options.device, journal)
    run(options, build(options, device), journal)
    dist.destroy_process_group()


def run(options: TrainOptions, training: Training, journal: Journal) -> None:
    """Train to the last step and note the digest of the final state."""
    if options.checkpoint:
        train_with_checkpoints(options, training, journal)
    else:
        with noting_failure(journal):
            for step in range(1, options.steps + 1):
                journal.step(step, training.step())
    journal.write("final", step=options.steps, digest=training.digest())


def train_with_checkpoints(options: TrainOptions, training: Training, journal: Journal) -> None:
    """Restore what peers and this node still hold, then train and save every step."""
    checkpointer = replica.Checkpointer(
        training.state(),
        redundancy=options.redundancy,
        on_event=lambda event: journal.write("checkpoint", detail=event),
    )
    # The failure is noted before the checkpointer closes, which may wait for a save under way.
    with checkpointer, noting_failure(journal):
        step = checkpointer.restore() or 0
        if step and options.sabotage and dist.get_rank() == 0:
            flip_one_byte(training.model)
            journal.write("sabotage", step=step)
        while step < options.steps:
            loss = training.step()
            step += 1
            journal.step(step, loss)
            checkpointer.save(step)


@contextmanager
def noting_failure(journal: Journal) -> Iterator[None]:
    """Note in the journal what ended the block, usually a peer's death, and let it pass."""
    try:
        yield
    except Exception as error:
        journal.write("interrupted", error=f"{type(error).__name__}: {error}"[:500])
        raise


def join_group(device: str, journal: Journal) -> torch.device:
    """Join the default process group and agree on a name for this incarnation of the run."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    # Rank 0's value wins; the draw must not touch the generators that training uses.
    round_id = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
    dist.broadcast(round_id, src=0)
    journal.identify(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        round_id=bytes(round_id.tolist()).hex(),
    )
    journal.write("start")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device == "cuda"
        else torch.device("cpu")
    )


def build(options: TrainOptions, device: torch.device) -> Training:
    """Make the same model on every rank, shard it, then give every rank its own random streams."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = ModelConfig()
    seed_all(options.seed)
    model = ByteGPT(config).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sched = torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=WARM_UP_STEPS)
    loader = TextLoader(
        standard_library_text(), rank=rank, world=world, batch=BATCH, context=config.context
    )
    seed_all(options.seed + 1 + rank)
    return Training(model=model, optim=optim, sched=sched, loader=loader, device=device)


def seed_all(seed: int) -> None:
    """Seed every generator that training draws from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the loader draws from the global state on purpose
    random.seed(seed)


def flip_one_byte(model: ByteGPT) -> None:
    """Change one bit of the first weight of the head's local shard, as silent corruption would."""
    weight = model.head.weight.detach()
    local = weight.to_local() if isinstance(weight, dist.tensor.DTensor) else weight
    # Byte 2 of a little-endian float32: the top of the fraction.
    local.view(-1).view(torch.uint8)[2] ^= 0x40


def parse_options(arguments: Sequence[str] | None = None) -> TrainOptions:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="train_fsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--no-checkpoint", action="store_false", dest="checkpoint")
    parser.add_argument("--redundancy", default="auto")
    parser.add_argument("--journal-dir", type=Path, default=None)
    parser.add_argument("--guard-arenas", action="store_true")
    parser.add_argument("--sabotage", action="store_true")
    options = vars(parser.parse_args(arguments))
    options["device"] = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    return TrainOptions(**options)


if __name__ == "__main__":
    main()
