"""What the tests of overlap mode share: a training run, and a late copy that waits for the test."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import nn

import replica
from replica import late_copy
from replica.at_exit import THREAD_PREFIX
from replica.snapshot import Snapshot
from tests.replica.snapshot_tools import HEADER

WIDTH = 192
"""Weights of WIDTH x WIDTH floats are large enough to be late, biases are not."""
WAIT_S = 20.0
"""No test comes near it; it turns a hang into a failure."""
WEIGHTS = {"model.one.weight", "model.two.weight"}
MOMENTS = {
    f"optim.state.{number}.{name}" for number in (0, 2) for name in ("exp_avg", "exp_avg_sq")
}
"""Names of what is large in a training run, of AdamW."""


class Net(nn.Module):
    """Two layers that differ in nothing but their values, and a running mean in a buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        """Change the buffer, as a batch norm does."""
        with torch.no_grad():
            self.mean.add_(x.mean(0) * 0.01)
        return self.two(torch.relu(self.one(x)))


def training(kind=torch.optim.AdamW, **options):
    """Return the state of a training run that has not stepped."""
    torch.manual_seed(7)
    model = Net()
    options = {"lr": 0.01} | options
    return {"model": model, "optim": kind(model.parameters(), **options), "step": 0}


def gradients(state):
    """Forward and backward: nothing but buffers and gradients changes."""
    torch.manual_seed(state["step"])
    state["model"](torch.randn(4, WIDTH)).square().mean().backward()


def train(state, steps=1):
    """Take whole steps."""
    for _ in range(steps):
        gradients(state)
        state["optim"].step()
        state["optim"].zero_grad()
        state["step"] += 1


def tensors(state):
    """Copies of every tensor of a state, by where it lies."""
    found = {name: value.detach().clone() for name, value in state["model"].state_dict().items()}
    for number, kept in enumerate(state["optim"].state.values()):
        for name, value in kept.items():
            found[f"{number}.{name}"] = torch.as_tensor(value).clone()
    return found


def same(left, right):
    """Whether two such dicts are equal, bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def late(overlap, state):
    """Names of the late leaves of a capture; the copy is carried out, and checked."""
    snapshot = Snapshot(state, random_states=True)
    snapshot.overlap = overlap
    captured = snapshot.begin_capture(np.zeros(snapshot.estimate_bytes() << 1, np.uint8), HEADER)
    names = {tensor.name for tensor in captured._late._tensors} if captured._late else set()
    captured.start(lambda: None)
    captured.finish(20.0)
    return names


def told(caplog):
    """The lines that say what is not late."""
    return [record.message for record in caplog.records if "overlap=True" in record.message]


class Held:
    """Holds the threads of late copies until ``open``; what another thread copies goes through.

    ``begun`` is set when one has taken its first part. ``only_first``: no other is held.
    ``raising``: what they raise instead of copying.
    """

    def __init__(self, monkeypatch):
        self.begun, self._gate = threading.Event(), threading.Event()
        self.raising, self.only_first = None, False
        real = late_copy.copy_pieces

        def copy_pieces(pieces, keep):
            if threading.current_thread().name == f"{THREAD_PREFIX}late copy":
                first = not self.begun.is_set()
                self.begun.set()
                held = first or not self.only_first
                assert not held or self._gate.wait(WAIT_S), "the test let nothing go on"
                if self.raising is not None:
                    raise self.raising
            real(pieces, keep)

        monkeypatch.setattr(late_copy, "copy_pieces", copy_pieces)
        monkeypatch.setattr(late_copy, "PIECE_BYTES", 1 << 16)  # many parts of a small state

    def open(self):
        """Let them go on."""
        self._gate.set()


def checkpointer(arena_dir, state, **options):
    """Make a Checkpointer of a world of one, in overlap mode, open."""
    given = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "timeout_s": WAIT_S}
    given |= {"redundancy": "none", "overlap": True}
    made = replica.Checkpointer(state, **given | options)
    made.start()
    return made


def restored(arena_dir, make=training, **options):
    """Restore into a state made anew; its step, and the state."""
    state = make()
    with checkpointer(arena_dir, state, overlap=False, **options) as ckpt:
        return ckpt.restore(), state
