"""One rank of the test of overlap mode under FSDP2: run with rank, world, a store's port, an arena.

Three runs of one training: never saved, saved at every step with overlap, and the saved one begun
anew from a restore. Then a step that is compiled. Fails by an exception; prints `ok` at the end.
"""

from __future__ import annotations

import logging
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import replica
from tests.replica.control import background
from tests.replica.snapshot_tools import bits

STEPS, FROM = 7, 4
WIDTH = 256
WAIT_S = 60.0


def build(mesh):
    """Build layers whose shards are large enough to be late, two optimizers and a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.02, fused=True)
    return {
        "model": model,
        "optims": [first, second],
        "sched": torch.optim.lr_scheduler.ExponentialLR(first, 0.9),
        "step": 0,
    }


def train(state, ckpt=None, until=STEPS):
    """Train to a step, saving after each if there is a Checkpointer; the losses."""
    losses = []
    while state["step"] < until:
        loss = state["model"](torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        for optim in state["optims"]:
            optim.step()
            optim.zero_grad()
        state["sched"].step()
        state["step"] += 1
        losses.append(loss.item())
        if ckpt is not None:
            ckpt.save(state["step"], when_busy="wait")
    return losses


def everything(state):
    """Bits of all tensors, and what else a run ends with."""
    found = [state["step"], state["sched"].last_epoch, bits(torch.get_rng_state())]
    for optim in state["optims"]:
        for param in (one for group in optim.param_groups for one in group["params"]):
            values = [param, *optim.state[param].values()]
            found += [bits(getattr(value, "_local_tensor", value)) for value in values]
    return found


def checkpointer(state, rank, arena, **options):
    """Open a Checkpointer in overlap mode, with its check."""
    given = {"job": "job", "arena_dir": arena, "node_id": f"n{rank}", "timeout_s": WAIT_S}
    given |= {"overlap": True, "overlap_check": True, "on_error": "raise"}
    given["background"] = background()
    made = replica.Checkpointer(state, **given | options)
    made.start()
    return made


def note_late(ckpt, late):
    """Note for every save how much of the image was late."""
    begin = ckpt._snapshot.begin_capture

    def begin_capture(*args):
        captured = begin(*args)
        late.append(captured.late_bytes / captured.nbytes)
        return captured

    ckpt._snapshot.begin_capture = begin_capture


def check_three_runs(mesh, rank, arena):
    """Losses and the end are the same, bit for bit; and most of the state was late."""
    never = build(mesh)
    torch.manual_seed(100 + rank)
    losses = train(never)
    often = build(mesh)
    late = []
    with checkpointer(often, rank, arena) as ckpt:
        torch.manual_seed(100 + rank)
        note_late(ckpt, late)
        first = train(often, ckpt, FROM)
        again = build(mesh)
    with checkpointer(again, rank, arena) as ckpt:
        note_late(ckpt, late)
        assert ckpt.restore() == FROM
        assert everything(again) == everything(often)
        rest = train(again, ckpt)
    assert first + rest == losses
    assert everything(again) == everything(never)
    assert len(late) == STEPS
    assert min(late) > 0.9, late


def check_compiled(arena, rank):
    """A compiled step: everything is copied at once, said once, and what is saved is right."""
    model = nn.Linear(WIDTH, WIDTH)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("planaria").addHandler(handler)
    state = {"model": model, "optim": optim}
    with checkpointer(state, rank, arena, job="compiled") as ckpt:
        step = torch.compile(optim.step, backend="eager")
        for number in range(1, 5):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            step()
            ticket = ckpt.save(number, when_busy="wait")
            ticket.wait("staged", 0.0)
        wanted = bits(model.weight)
        with torch.no_grad():
            model.weight.zero_()
        ticket.wait("committed", WAIT_S)
        assert ckpt.restore() == 4
    assert bits(model.weight) == wanted
    told = [line for line in lines if "the step of SGD is compiled" in line]
    assert len(told) == (rank == 0), lines


def main():
    """Run all checks on one rank."""
    rank, world, port, arena = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    check_three_runs(mesh, rank, arena)
    warnings.simplefilter("ignore")  # of what the compiler imports
    check_compiled(arena, rank)
    dist.barrier()
    dist.destroy_process_group()
    print("ok")  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
