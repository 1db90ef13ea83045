"""State objects come back exactly: modules, optimizers, schedulers, loaders, generators, random."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from replica.errors import StateError
from replica.snapshot import Snapshot
from replica.state import module_state
from tests.replica.snapshot_tools import bits, image_of, load


class Net(nn.Module):
    """A bit of everything: tied weights, buffers, extra state, batch norm."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_parameter("nothing", None)
        self.calls = 0

    def get_extra_state(self):
        """Count calls outside of any tensor."""
        return {"calls": self.calls}

    def set_extra_state(self, state):
        """Take the count back."""
        self.calls = state["calls"]

    def forward(self, tokens):
        """Predict from the mean of the embeddings."""
        self.calls += 1
        return self.head(nn.functional.dropout(self.norm(self.embed(tokens).mean(1)), 0.1))


def build(seed=0, optimizer=torch.optim.AdamW, **options):
    """Build a net with its optimizer and scheduler."""
    torch.manual_seed(seed)
    model = Net()
    optim = optimizer(model.parameters(), lr=0.1, **options)
    return {
        "model": model,
        "optim": optim,
        "sched": torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step)),
    }


def train(state, steps):
    """Step a few times on random tokens; return the losses."""
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (5, 3))
        loss = nn.functional.cross_entropy(state["model"](tokens), tokens[:, 0])
        state["optim"].zero_grad()
        loss.backward()
        state["optim"].step()
        state["sched"].step()
        losses.append(loss.item())
    return losses


def same(one, other):
    """Compare nested states bit by bit and type by type."""
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and bits(one) == bits(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def states(state):
    """Deep-copy everything that a state's objects would save."""
    return {key: copy.deepcopy(value.state_dict()) for key, value in state.items()}


OPTIMIZERS = [
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=lambda value: str(value)[-40:])
def test_training_goes_on_bit_for_bit(optimizer, options):
    """A restore into freshly built objects continues as if nothing had happened."""
    first = build(optimizer=optimizer, **options)
    train(first, 3)
    image = image_of(first, random_states=True)
    losses, final = train(first, 4), states(first)
    second = build(seed=99, optimizer=optimizer, **options)
    load(image, second, random_states=True)
    assert train(second, 4) == losses
    assert same(states(second), final)
    assert second["model"].head.weight is second["model"].embed.weight
    assert second["model"].calls == 7


def test_optimizer_that_never_stepped_needs_no_fake_step():
    """A save before step one keeps optimizer state empty, and Adam's counter starts at 1."""
    first = build()
    image = image_of(first, random_states=True)
    assert not first["optim"].state
    second = build(seed=5)
    train(second, 2)
    load(image, second, random_states=True)
    assert not second["optim"].state
    assert train(second, 2) == train(build(), 2)
    assert {float(state["step"]) for state in second["optim"].state.values()} == {2.0}


def test_state_of_some_parameters_only():
    """Parameters without a gradient have no optimizer state, before and after a restore."""
    first = build()
    train(first, 2)
    assert len(first["optim"].state) < len(list(first["model"].parameters()))
    second = build(seed=3)
    load(image_of(first), second)
    assert same(second["optim"].state_dict(), first["optim"].state_dict())


@pytest.mark.parametrize("param", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("moment", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("step", [torch.float32, torch.float64, torch.int64, int])
def test_moments_keep_their_dtype(param, moment, step):
    """Torch casts state to the parameter's dtype on load; what comes back is what was saved."""

    def optimizer():
        weight = nn.Parameter(torch.ones(3, dtype=param))
        return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    weight, first = optimizer()
    first.state[weight] = {
        "step": 7 if step is int else torch.tensor(7, dtype=step),
        "exp_avg": torch.full((3,), 1 / 3, dtype=moment),
        "history": [torch.ones(2, dtype=moment), "text"],
        "name": "text",
    }
    image = image_of({"optim": first})
    weight, second = optimizer()
    load(image, {"optim": second})
    assert same(second.state_dict(), first.state_dict())


class OwnOptimizer(torch.optim.SGD):
    """An optimizer with a loader of its own."""

    loaded = 0

    def load_state_dict(self, state_dict):
        """Count, then do as torch does."""
        self.loaded += 1
        super().load_state_dict(state_dict)


def test_own_loader_is_called_and_its_casts_undone():
    """A hand-written load_state_dict runs once, and float32 moments stay float32."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    first = OwnOptimizer([weight], lr=0.1)
    first.state[weight] = {"momentum_buffer": torch.full((3,), 1 / 3)}
    image = image_of({"optim": first})
    second = OwnOptimizer([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.5)
    load(image, {"optim": second})
    assert second.loaded == 1
    assert same(second.state_dict(), first.state_dict())


def test_other_parameter_groups_are_refused():
    """An optimizer over other parameters is an error before anything changes."""
    image = image_of(build())
    live = build()
    live["optim"] = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    before = states(live)
    with pytest.raises(StateError, match=r"\['optim'\] saved with parameter groups"):
        load(image, live)
    assert same(states(live), before)


def test_module_keys_must_match():
    """Missing, extra, reshaped and recast parameters are all listed, and nothing is changed."""
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(1, 1), "c": nn.Linear(2, 2)})
    live = nn.ModuleDict(
        {"b": nn.Linear(2, 1), "c": nn.Linear(2, 2, dtype=torch.float64), "d": nn.Linear(1, 1)}
    )
    image, before = image_of({"m": saved}), copy.deepcopy(live.state_dict())
    with pytest.raises(StateError) as caught:
        load(image, {"m": live})
    text = str(caught.value)
    assert "rank 1" in text
    assert "saved but not in the live state: state['m']['a.weight'], state['m']['a.bias']" in text
    assert "in the live state but not saved: state['m']['d.weight'], state['m']['d.bias']" in text
    assert "state['m']['b.weight'] saved with shape [1, 1], has [1, 2]" in text
    assert "state['m']['c.bias'] saved as float32, is float64" in text
    assert same(live.state_dict(), before)


def test_module_state_is_what_state_dict_says():
    """Our walk and torch's own give the same keys and tensors, hooks and overrides included."""

    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "scale"] = torch.ones(1)

    class Renamed(nn.Linear):
        def state_dict(self, *_, destination=None, prefix="", keep_vars=False):
            destination = {} if destination is None else destination
            destination[prefix + "renamed"] = self.weight if keep_vars else self.weight.data
            return destination

    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_pre_hook(lambda *_, **__: None)
    hooked.register_state_dict_post_hook(
        lambda _, found, prefix, __: found.__delitem__(prefix + "bias")
    )
    root = nn.Sequential(Net(), Packed(2, 2), Renamed(2, 2), hooked, nn.Sequential())
    root._register_state_dict_hook(lambda _, found, *__: {**found, "late": 1})
    ours, torchs = module_state(root), root.state_dict(keep_vars=True)
    assert list(ours) == list(torchs)
    assert all(ours[key] is torchs[key] for key in ours if not key.endswith(("scale", "_state")))


def test_module_inside_containers_and_parametrized():
    """Objects in lists and dicts are found; parametrized modules keep their originals."""
    first = {"all": {"models": [nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))]}}
    second = copy.deepcopy(first)
    with torch.no_grad():
        for value in first["all"]["models"][0].parameters():
            value.add_(1)
    load(image_of(first), second)
    assert same(second["all"]["models"][0].state_dict(), first["all"]["models"][0].state_dict())


class Loader:
    """A toy loader with a position; its state is new on every call."""

    def __init__(self, length=5):
        self.length, self.position, self.loaded = length, 0, []

    def state_dict(self):
        """Say where it is."""
        return {"position": self.position, "order": torch.arange(self.length)}

    def load_state_dict(self, state):
        """Go there."""
        self.loaded.append(state)
        self.position = state["position"]


def test_loader_gets_its_own_state():
    """An object with state_dict and load_state_dict is saved and called once with its own state."""
    first, second = Loader(), Loader()
    first.position = 4
    load(image_of({"loader": first}), {"loader": second})
    assert second.position == 4
    assert len(second.loaded) == 1
    assert second.loaded[0]["order"].tolist() == [0, 1, 2, 3, 4]


def test_loader_is_not_asked_before_the_first_step():
    """The estimate and a restore leave loaders alone: one that counts how often it is asked."""
    asked = []

    class Shy(Loader):
        def state_dict(self):
            asked.append(1)
            return super().state_dict()

    image = image_of({"loader": Loader()})
    state = {"loader": Shy()}
    Snapshot(state, random_states=True).estimate_bytes()
    load(image, state)
    assert asked == []


def test_grad_scaler_and_schedulers_come_back():
    """The usual schedulers and the gradient scaler are stateful objects like any other."""
    weight = nn.Parameter(torch.ones(1))
    optim = torch.optim.SGD([weight], lr=0.1)
    kinds = torch.optim.lr_scheduler

    def objects():
        first = kinds.LinearLR(optim, total_iters=3)
        second = kinds.MultiStepLR(optim, [4, 7])
        return {
            "chain": kinds.SequentialLR(optim, [first, second], milestones=[3]),
            "cycle": kinds.OneCycleLR(optim, 0.1, total_steps=10),
            "plateau": kinds.ReduceLROnPlateau(optim),
            "scaler": torch.amp.GradScaler("cpu", init_scale=3.0),
        }

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = objects(), objects()
        for _ in range(5):
            first["chain"].step()
            first["cycle"].step()
            first["plateau"].step(1.0)
    load(image_of(first), second)
    for name in first:
        assert same(second[name].state_dict(), first[name].state_dict())


def draw():
    """Draw from each global generator."""
    return (
        [random.random() for _ in range(3)],
        np.random.rand(3).tolist(),  # noqa: NPY002 - the global one is what is restored
        torch.rand(3).tolist(),
        random.gauss(0, 1),
        np.random.standard_normal(),  # noqa: NPY002
    )


def test_random_states_continue():
    """Python, numpy and torch draw after a restore what they drew after the save."""
    draw()
    image = image_of({}, random_states=True)
    wanted = draw()
    draw()
    load(image, {}, random_states=True)
    assert draw() == wanted


def test_random_states_can_be_left_alone():
    """random_states=False restores none, and asking an image that has none is an error."""
    with_them, without = image_of({}, random_states=True), image_of({})
    wanted = torch.Generator().set_state(torch.get_rng_state())
    load(with_them, {}, random_states=False)
    assert torch.rand(1) == torch.rand(1, generator=wanted)
    with pytest.raises(StateError, match="random states"):
        load(without, {}, random_states=True)


def test_generators_of_ones_own_continue():
    """Generator objects registered by the user continue their streams, each its own."""
    state = {
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(2),
        "legacy": np.random.RandomState(3),
        "python": random.Random(4),
    }

    def numbers():
        return (
            torch.rand(2, generator=state["torch"]).tolist(),
            state["numpy"].random(2).tolist(),
            state["legacy"].rand(2).tolist(),
            state["python"].random(),
        )

    numbers()
    image = image_of(state)
    wanted = numbers()
    numbers()
    load(image, state)
    assert numbers() == wanted
    state["numpy"] = np.random.Generator(np.random.Philox(1))
    with pytest.raises(StateError, match=r"\['numpy'\] does not take the saved state"):
        load(image, state)


def test_capture_changes_nothing():
    """Values, gradients, versions, modes and random states are as before: all compared."""
    state = build()
    train(state, 2)
    model = state["model"]
    before = states(state)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    image_of(state, random_states=True)
    assert same(states(state), before)
    assert [p._version for p in model.parameters()] == versions
    assert all(
        (p.grad is None and grad is None) or torch.equal(p.grad, grad)
        for p, grad in zip(model.parameters(), grads, strict=True)
    )
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert (np.random.get_state()[1] == drawn[2]).all()  # noqa: NPY002
