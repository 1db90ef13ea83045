"""The states of the stall benchmark's series, and one training step on each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH = 256
"""Rows and columns of a layer: 256 KiB of float32."""
BLOCK = 16
"""Layers that FSDP2 gathers together."""


@dataclass(frozen=True)
class Series:
    """A state, and a step that changes its values and nothing else."""

    name: str
    state: dict[str, Any]
    tensors: int
    nbytes: int
    """Of these tensors, all of one dtype."""
    step: Callable[[], object]


def plain(name: str, tensors: int, tensor_bytes: int) -> Series:
    """A dict of float32 tensors."""
    values = [torch.full((tensor_bytes // 4,), float(index)) for index in range(tensors)]

    def step() -> None:
        torch._foreach_add_(values, 1.0)

    box = {f"layers.{index}.weight": value for index, value in enumerate(values)}
    return Series(name, {"box": box}, tensors, tensors * (tensor_bytes // 4) * 4, step)


def fsdp2(name: str, dtensors: int) -> Series:
    """A model of equal layers with its AdamW: a parameter and two moments per layer, all sharded.

    The optimizer's step counts, a small tensor per layer, are saved too and not counted here.
    """
    torch.manual_seed(0)
    layers = -(-dtensors // 3)
    linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    blocks = [nn.Sequential(*linears[at : at + BLOCK]) for at in range(0, layers, BLOCK)]
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batch = torch.randn(4, WIDTH)

    def train() -> None:
        model(batch).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    train()
    moments = [value for kept in optimizer.state.values() for value in kept.values()]
    sharded = [value for value in (*model.parameters(), *moments) if isinstance(value, DTensor)]
    locals_ = [value.to_local().detach() for value in sharded]
    nbytes = sum(value.nbytes for value in locals_)

    def step() -> None:
        # What a training step does to the state, in a hundredth of its time on a CPU.
        torch._foreach_mul_(locals_, 0.5)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    train()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Series(name, state, len(sharded), nbytes, step)


@contextmanager
def one_process_world() -> Iterator[None]:
    """A gloo process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
