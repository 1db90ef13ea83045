"""One rank of the FSDP2 test: run as a script with rank, world and the path of a file store.

Fails by an exception; prints `ok` at the end.
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from replica import pending
from replica import snapshot as snapshot_module
from replica.errors import StateError
from replica.pending import PendingGradients
from replica.snapshot import Snapshot
from tests.replica.snapshot_tools import HEADER, bits, image_of, load


def build(mesh, *, reshard=True):
    """Build a model with uneven shards (3, 5 and 1 rows over two ranks) and a wrapped layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 3), checkpoint_wrapper(nn.Linear(3, 5)), nn.LayerNorm(5), nn.Linear(5, 1)
    )
    for layer in (model[0], model[1]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state, rank, steps=2):
    """Step on data of this rank's own; return the losses."""
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(3, 4)).square().sum()
        loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()
        losses.append(loss.item())
    return losses


def locals_of(state):
    """Bits of every local shard, with the geometry of the whole."""
    found = []
    for param in state["model"].parameters():
        moments = state["optim"].state.get(param, {})
        for value in (param, *moments.values()):
            whole = isinstance(value, DTensor)
            local = value.to_local() if whole else value
            placed = (tuple(value.shape), str(value.placements)) if whole else None
            found.append((bits(local), placed))
    return found


def kinds(model):
    """Whether each parameter is sharded at the moment."""
    return [isinstance(param, DTensor) for param in model.parameters()]


def check_restore(mesh, rank):
    """A fresh model and an optimizer that never stepped take the state and train on alike."""
    first = build(mesh)
    train(first, rank)
    image = image_of(first)
    wanted = locals_of(first)
    losses = train(first, rank)
    second = build(mesh)
    load(image, second)
    assert locals_of(second) == wanted
    assert train(second, rank) == losses
    assert locals_of(second) == locals_of(first)
    return image


def check_left_as_found(mesh, rank):
    """An unsharded model stays unsharded, and its image is that of the sharded one."""
    state = build(mesh, reshard=False)
    train(state, rank)
    snapshot = Snapshot(state, random_states=False)
    sharded, unsharded = (np.zeros(1 << 17, np.uint8) for _ in range(2))
    snapshot.capture_into(sharded, HEADER)
    with torch.no_grad():
        state["model"](torch.ones(1, 4))
    before = kinds(state["model"])
    assert not all(before), "the test wants parameters that are unsharded"
    snapshot.capture_into(unsharded, HEADER)
    assert kinds(state["model"]) == before
    assert (sharded == unsharded).all()
    snapshot.prepare(unsharded).commit()
    assert all(kinds(state["model"]))


def check_pending(mesh):
    """Gradients that wait are noticed where FSDP2 keeps them: sharded ones, and unreduced ones."""
    for unreduced in (False, True):
        pending._said.discard("pending")
        state = build(mesh)
        watched = PendingGradients(state)
        train(state, 0)
        watched.check(1, 0)
        assert "pending" not in pending._said
        state["model"].set_requires_gradient_sync(not unreduced)
        state["model"](torch.ones(1, 4)).sum().backward()
        assert all(param.grad is None for param in state["model"].parameters()) == unreduced
        watched.check(2, 0)
        assert "pending" in pending._said


def check_steady(mesh, rank):
    """Steps of training are read without a walk and without `state_dict()`; images are equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.LayerNorm(5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}
    train(state, rank)
    snapshot = Snapshot(state, random_states=False)
    snapshot.plan(HEADER.owner)
    read, walked = (np.zeros(1 << 17, np.uint8) for _ in range(2))
    for _ in range(3):
        train(state, rank, steps=1)
        with mock.patch.object(snapshot_module, "capture_state", side_effect=AssertionError):
            snapshot.capture_into(read, HEADER)
        Snapshot(state, random_states=False).capture_into(walked, HEADER)
        assert (read == walked).all()
    # As FSDP2 itself does when the memory of a shard was moved.
    model[0].weight._local_tensor = model[0].weight.to_local().detach().clone() + 1
    snapshot.capture_into(read, HEADER)
    Snapshot(state, random_states=False).capture_into(walked, HEADER)
    assert (read == walked).all()


def check_refusals(mesh, image):
    """Another placement of the same parameters is refused, and so is a mesh that is not there."""
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    optim = torch.optim.AdamW(plain.parameters())
    for state, text in (
        ({"model": plain, "optim": build(mesh)["optim"]}, "saved as a DTensor"),
        ({"model": plain, "optim": optim}, "no live parameter lies on such a mesh"),
    ):
        before = copy.deepcopy(plain.state_dict())
        with pytest.raises(StateError, match=text):
            load(image, state)
        assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())


def main():
    """Run all checks on one rank."""
    rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    image = check_restore(mesh, rank)
    check_left_as_found(mesh, rank)
    check_steady(mesh, rank)
    check_refusals(mesh, image)
    check_pending(mesh)
    dist.barrier()
    dist.destroy_process_group()
    print("ok")  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
