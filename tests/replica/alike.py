"""A training whose every trace can be compared from run to run: was there a save, or a kill?"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

ALWAYS_COMMITTED = 3
"""The save of this step is waited for, so that there is something to restore."""

OTHERS = ("planaria", "(_serve)", "(_hear)")
"""In the names of threads that a Checkpointer's background and the tests' own control have."""


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def digest(*values: Any) -> str:
    """Return one short word for tensors, by their bytes, and for plain values, by their text."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                # A clone, because numpy() forbids the storage to be resized, which FSDP2 does.
                kept = local(value).detach().clone().reshape(-1).view(torch.uint8)
            found.update(f"{value.dtype} {tuple(value.shape)}".encode() + kept.numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


class Alike:
    """FSDP2 with dropout and a frozen layer, AdamW, a schedule, an average and random draws."""

    def __init__(self, seed: int) -> None:
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(seed + dist.get_rank())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 5), nn.Linear(5, 3)
        )
        for param in self.model.parameters():
            nn.init.normal_(param, generator=generator)
        self.model[2].requires_grad_(False)
        small = nn.Linear(4, 1)
        nn.init.ones_(small.weight)
        nn.init.zeros_(small.bias)
        self.average = AveragedModel(small)
        for layer in (self.model[0], self.model[3]):
            # Stays whole after a forward pass without a backward one: a save must not change that.
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.optim, 0.1, total_steps=50)
        self.small, self.generator = small, generator
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "average": self.average,
            "small": small,
            "generator": generator,
            "history": [],
        }

    def step(self) -> None:
        """Do one step; what it draws comes from each kind of generator."""
        self.optim.zero_grad()
        scale = random.random() + np.random.random()  # noqa: NPY002 - the global one is meant
        rows = torch.randn(3, 4) * scale + torch.randn(1, generator=self.generator)
        loss = self.model(rows).square().sum()
        loss.backward()
        self.optim.step()
        self.sched.step()
        with torch.no_grad():
            self.small.weight.mul_(0.9).add_(float(loss) / 100)
            self.average.update_parameters(self.small)
            self.state["history"].append(float(loss))
            if len(self.state["history"]) % 2:
                self.model(torch.ones(1, 4))

    def run(self, checkpointer: Any, first: int, last: int, kill_at: int) -> list[dict[str, str]]:
        """Do steps ``first`` to ``last``, each with a save if that is given; the traces of each.

        At ``kill_at``, its save just begun, this process kills itself.
        """
        found = []
        for step in range(first, last + 1):
            self.step()
            if checkpointer is not None:
                ticket = checkpointer.save(step)
                if step == ALWAYS_COMMITTED:
                    ticket.wait("committed", 40.0)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            found.append(self.traces())
        return found

    def traces(self) -> dict[str, str]:
        """Return a word for everything that a save might have changed."""
        params = list(self.model.parameters())
        sharded = [isinstance(param, DTensor) for param in params]
        moments = [value for kept in self.optim.state.values() for value in kept.values()]
        random_states = (
            torch.get_rng_state(),
            self.generator.get_state(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002 - the global one is meant
        )
        names = [one.name for one in threading.enumerate()]
        threads = [name for name in names if not any(part in name for part in OTHERS)]
        return {
            "parameters": digest(*params, *self.small.parameters()),
            "gradients": digest(*(param.grad for param in params)),
            "optimizer": digest(*moments, len(moments)),
            "schedule": digest(self.sched.state_dict()),
            "average": digest(*self.average.state_dict().values()),
            "history": digest(self.state["history"]),
            "random states": digest(*random_states),
            "flags": digest(
                [(param.requires_grad, param.is_leaf) for param in params],
                [local(param).untyped_storage().resizable() for param in params],
                [module.training for module in self.model.modules()],
                [len(module._forward_pre_hooks) for module in self.model.modules()],
            ),
            "sharded now": str(sharded),
            "threads": str((torch.get_num_threads(), torch.get_num_interop_threads(), threads)),
            "modes": str(
                (
                    torch.is_grad_enabled(),
                    torch.is_inference_mode_enabled(),
                    torch.get_default_dtype(),
                    torch.get_default_device(),
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_autocast_enabled("cpu"),
                )
            ),
            "warnings": digest(*map(str, warnings.filters)),
        }
