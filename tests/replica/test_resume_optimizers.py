"""Optimizers go on exactly: twenty steps after a restore are those of the run that saved."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn, optim

from replica.errors import StateError
from replica.snapshot import Snapshot
from tests.replica.inprocess import Cluster
from tests.replica.snapshot_tools import bits, image_of, load
from tests.replica.test_state import same

STEPS = 20


def steps(state, seed, count=STEPS):
    """Train ``count`` steps on data of the seed; the losses."""
    drawn = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        rows = torch.randint(0, 5, (3,), generator=drawn)

        def loss_of(rows=rows):
            state["optim"].zero_grad()
            loss = state["model"](rows).float().square().sum()
            loss.backward()
            return loss

        losses.append(state["optim"].step(loss_of).item())
    return losses


def model_of(kind):
    """Make a model that an optimizer of this kind takes."""
    torch.manual_seed(4)
    sparse = kind is optim.SparseAdam
    layers = [nn.Embedding(5, 4, sparse=sparse)]
    if not sparse:
        layers.append(nn.Linear(4, 3, bias=kind is not optim.Muon))
    return nn.Sequential(*layers)


KINDS = [
    kind
    for kind in vars(optim).values()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]
VARIANTS = [
    *((kind, {}) for kind in KINDS),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"fused": True, "amsgrad": True}),
    (optim.Adam, {"foreach": True, "amsgrad": True}),
    (optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_every_optimizer_of_torch_goes_on(kind, options):
    """Three steps, a save, twenty more: a fresh pair that took the image does the same twenty."""

    def build():
        model = model_of(kind)
        return {"model": model, "optim": kind(model.parameters(), **{"lr": 0.01} | options)}

    first, second = build(), build()
    steps(first, 1, 3)
    image = image_of(first)
    losses = steps(first, 2)
    steps(second, 9, 2)
    load(image, second)
    assert steps(second, 2) == losses
    assert same(second["optim"].state_dict(), first["optim"].state_dict())
    assert same(second["model"].state_dict(), first["model"].state_dict())


class Own(optim.Optimizer):
    """An optimizer written by hand: moments of a dtype of their own, a step of any type."""

    def __init__(self, params, moment, step):
        super().__init__(params, {"lr": 0.05})
        self.moment, self.first_step = moment, step

    @torch.no_grad()
    def step(self, closure):
        """Momentum that is weighed by the number of steps."""
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                kept = self.state[param]
                if not kept:
                    kept["step"] = self.first_step()
                    kept["moment"] = torch.zeros_like(param, dtype=self.moment)
                kept["step"] += 1
                kept["moment"].lerp_(param.grad.to(self.moment), 0.1)
                move = kept["moment"].double() * group["lr"] / float(kept["step"]) ** 0.5
                param.sub_(move.to(param.dtype))
        return loss


STEP_KINDS = {
    "float32": lambda: torch.tensor(0.0),
    "float64": lambda: torch.tensor(0.0, dtype=torch.float64),
    "int64": lambda: torch.tensor(0),
    "python": lambda: 0,
}


@pytest.mark.parametrize(
    ("param", "moment"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["bf16-fp32", "fp32-bf16"],
)
@pytest.mark.parametrize("step", STEP_KINDS)
def test_moments_of_another_dtype_than_the_parameters_go_on(param, moment, step):
    """Torch casts such moments on load and would lose bits: the next twenty steps show it."""

    def build():
        model = model_of(Own).to(param)
        return {"model": model, "optim": Own(model.parameters(), moment, STEP_KINDS[step])}

    first, second = build(), build()
    steps(first, 1, 3)
    image = image_of(first)
    losses = steps(first, 2)
    load(image, second)
    kept = list(second["optim"].state.values())
    assert {values["moment"].dtype for values in kept} == {moment}
    assert {type(values["step"]) for values in kept} == {type(STEP_KINDS[step]())}
    assert steps(second, 2) == losses
    assert same(second["optim"].state_dict(), first["optim"].state_dict())


def test_capturable_state_keeps_its_dtypes():
    """The option moves `step` to the parameter's device and dtype in torch's loader: undone."""

    def build():
        weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        return weight, optim.AdamW([weight], lr=torch.tensor(0.1), capturable=True)

    weight, first = build()
    first.state[weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((2,), 1 / 3),
        "exp_avg_sq": torch.full((2,), 1 / 7),
    }
    weight, second = build()
    load(image_of({"optim": first}), {"optim": second})
    assert same(second.state_dict(), first.state_dict())


def test_a_parameter_frozen_on_the_way():
    """What was trained and then frozen keeps its moments, and the rest goes on alike."""

    def build(*, frozen):
        model = model_of(optim.AdamW)
        model[1].bias.requires_grad_(not frozen)
        return {"model": model, "optim": optim.AdamW(model.parameters(), lr=0.01)}

    first = build(frozen=False)
    steps(first, 1, 3)
    first["model"][1].bias.requires_grad_(False)
    first["optim"].zero_grad()
    steps(first, 1, 2)
    image, second = image_of(first), build(frozen=True)
    losses = steps(first, 2)
    load(image, second)
    assert second["optim"].state[second["model"][1].bias]["step"] == 3
    assert steps(second, 2) == losses
    assert same(second["optim"].state_dict(), first["optim"].state_dict())


def test_experts_that_fired_on_one_rank_only(arena_dir):
    """Optimizer state exists for another parameter on each rank: each gets its own keys back."""

    def build(rank):
        experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        # Of its own: the ranks are threads, and would draw from one global generator.
        generator = torch.Generator().manual_seed(rank)
        for expert in experts:
            nn.init.normal_(expert.weight, generator=generator)
        return experts, optim.AdamW(experts.parameters(), lr=0.1)

    def trained(rank):
        experts, adam = build(rank)
        for _ in range(rank + 2):
            experts[rank](torch.ones(1, 2)).sum().backward()
            adam.step()
            adam.zero_grad()
        return experts, adam

    def save(me):
        me.state["experts"], me.state["adam"] = trained(me.rank)
        me.ckpt.save(1).wait("committed", 30)

    def restore(me):
        me.state["experts"], me.state["adam"] = build(7)
        assert me.ckpt.restore() == 1
        return me.state["adam"].state_dict(), me.state["experts"].state_dict()

    Cluster(arena_dir, ["a", "b"], "copies:1", counts=[0, 0]).run(save)
    found = Cluster(arena_dir, ["a", "b"], "copies:1", counts=[0, 0]).run(restore)
    for rank, (adam, experts) in enumerate(found):
        assert list(adam["state"]) == [rank]
        assert adam["state"][rank]["step"] == rank + 2
        wanted = trained(rank)
        assert same(adam, wanted[1].state_dict())
        assert same(experts, wanted[0].state_dict())


def test_a_parameter_listed_twice():
    """Torch only warns of it; its numbering is followed, so that no state lands elsewhere."""

    def build():
        torch.manual_seed(0)
        one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            groups = [{"params": [one, one]}, {"params": [two], "lr": 0.5}]
            return [one, two], optim.SGD(groups, lr=0.1, momentum=0.9)

    params, first = build()
    for number, param in enumerate(params):
        param.grad = torch.full((2,), number + 1.0)
    first.step()
    params, second = build()
    load(image_of({"optim": first}), {"optim": second})
    assert [second.state[param]["momentum_buffer"][0] for param in params] == [1, 2]
    assert same(second.state_dict(), first.state_dict())


def test_state_of_another_shape_than_its_parameter_is_refused():
    """One momentum for a parameter of three elements would be spread over them by the next step."""
    small, large = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
    first, second = (optim.SGD([param], lr=0.1, momentum=0.9) for param in (small, large))
    small.grad = torch.ones(1)
    first.step()
    text = r"state\['optim'\] 0 'momentum_buffer' saved with shape \[1\], its parameter has \[3\]"
    with pytest.raises(StateError, match=text):
        load(image_of({"optim": first}), {"optim": second})
    assert not second.state


class Renumbering(optim.SGD):
    """Loads the state of its two parameters crosswise, as a loader that goes by names may."""

    def load_state_dict(self, state_dict):
        """Exchange the two."""
        states = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {0: states[1], 1: states[0]}})


def test_a_loader_that_renumbers_is_left_to_it():
    """Undoing a cast never puts another parameter's state in the place of what was loaded."""

    def build():
        params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
        return params, Renumbering(params, lr=0.1)

    params, first = build()
    for number, param in enumerate(params):
        first.state[param] = {"momentum_buffer": torch.full((2,), number + 0.5)}
    params, second = build()
    load(image_of({"optim": first}), {"optim": second})
    assert [second.state[param]["momentum_buffer"][0] for param in params] == [1.5, 0.5]


class Counting:
    """No torch optimizer: a class of the user's with integers only."""

    def __init__(self):
        self.updates, self.skipped = 0, 0

    def state_dict(self):
        """Give both numbers."""
        return {"updates": self.updates, "skipped": self.skipped}

    def load_state_dict(self, state):
        """Take them."""
        self.updates, self.skipped = state["updates"], state["skipped"]


def test_one_object_under_two_names_is_one_object():
    """It is loaded under both, with the same values; its tensors are stored once."""
    model, counting = nn.Linear(100, 100), Counting()
    counting.updates = 5
    state = {"model": model, "again": model, "a": counting, "b": counting}
    image = image_of(state)
    assert image.nbytes < 2 * 40_000
    wanted = bits(model.weight)
    counting.updates = 9
    with torch.no_grad():
        model.weight.zero_()
    load(image, state)
    assert bits(model.weight) == wanted
    assert (counting.updates, counting.skipped) == (5, 0)


def test_two_tensors_of_a_module_under_one_key_are_refused():
    """A child's name with a dot can give two parameters one key: torch would lose one silently."""
    module = nn.Module()
    module.a = nn.Module()
    module.a.b = nn.Linear(1, 1)
    module._modules["a.b"] = nn.Linear(1, 1)
    with pytest.raises(StateError, match=r"rank 0: state\['m'\]\['a.b.weight'\] .* the same key"):
        Snapshot({"m": module}, random_states=False).plan(0)
