"""Schedulers, gradient scalers and averaged models go on exactly where they were."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as kinds
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from replica.errors import StateError
from tests.replica.snapshot_tools import bits, image_of, load
from tests.replica.test_resume_strict import load_leniently
from tests.replica.test_state import same

STEPS = 20


class Decay:
    """A function object: a scheduler saves what such an object holds."""

    def __init__(self, rate):
        self.rate, self.calls = rate, 0

    def __call__(self, step):
        """Count, so that the object has something to lose."""
        self.calls += 1
        return self.rate ** (step + self.calls / 100)


def in_sequence(optim):
    """Chain one schedule after the other."""
    parts = [kinds.LinearLR(optim, total_iters=3), kinds.StepLR(optim, 2, gamma=0.5)]
    return kinds.SequentialLR(optim, parts, milestones=[4])


BUILDERS = {
    "LambdaLR": lambda optim: kinds.LambdaLR(optim, Decay(0.9)),
    "MultiplicativeLR": lambda optim: kinds.MultiplicativeLR(optim, Decay(0.99)),
    "StepLR": lambda optim: kinds.StepLR(optim, 3),
    "MultiStepLR": lambda optim: kinds.MultiStepLR(optim, [2, 6, 6, 11]),
    "ConstantLR": lambda optim: kinds.ConstantLR(optim, total_iters=7),
    "LinearLR": lambda optim: kinds.LinearLR(optim, total_iters=9),
    "ExponentialLR": lambda optim: kinds.ExponentialLR(optim, 0.9),
    "SequentialLR": in_sequence,
    "PolynomialLR": lambda optim: kinds.PolynomialLR(optim, total_iters=15, power=2.0),
    "CosineAnnealingLR": lambda optim: kinds.CosineAnnealingLR(optim, T_max=6),
    "ChainedScheduler": lambda optim: kinds.ChainedScheduler(
        [kinds.ConstantLR(optim, total_iters=4), in_sequence(optim)], optimizer=optim
    ),
    "ReduceLROnPlateau": lambda optim: kinds.ReduceLROnPlateau(optim, patience=1, cooldown=1),
    "CyclicLR": lambda optim: kinds.CyclicLR(optim, 0.01, 0.1, 3, scale_fn=Decay(0.9)),
    "OneCycleLR": lambda optim: kinds.OneCycleLR(optim, 0.2, total_steps=40),
    "CosineAnnealingWarmRestarts": lambda optim: kinds.CosineAnnealingWarmRestarts(optim, 4),
    "SWALR": lambda optim: SWALR(optim, 0.01, anneal_epochs=7),
}


def test_every_scheduler_of_torch_is_tried_here():
    """A new kind in a new torch makes this fail: the kinds are listed from torch."""
    base = (kinds.LRScheduler, kinds.ReduceLROnPlateau)
    found = {
        name
        for name, kind in vars(kinds).items()
        if inspect.isclass(kind) and issubclass(kind, base) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == set(BUILDERS) - {"SWALR"}


def build(name):
    """Make an optimizer of two groups under a schedule."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    groups[1]["lr"] = 0.05
    optim = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return {"optim": optim, "sched": BUILDERS[name](optim)}


def rates(state, count, first=0):
    """Step the schedule; the rates and momenta of each step, exactly."""
    found = []
    for step in range(first, first + count):
        state["optim"].step()
        if isinstance(state["sched"], kinds.ReduceLROnPlateau):
            state["sched"].step(abs(step - 6) + 1.0)
        else:
            state["sched"].step()
        found += [(group["lr"], group["momentum"]) for group in state["optim"].param_groups]
    return found


@pytest.mark.parametrize("name", BUILDERS)
def test_a_schedule_goes_on(name):
    """Five steps, a save, twenty more: a fresh pair that took the image gives the same rates."""
    with warnings.catch_warnings():
        # Torch says that the calls of schedules in sequence are out of order: by its own code.
        warnings.simplefilter("ignore")
        first, second = build(name), build(name)
        rates(first, 5)
        image = image_of(first)
        wanted = rates(first, STEPS, 5)
        rates(second, 2)
        load(image, second)
        assert rates(second, STEPS, 5) == wanted
    assert same(second["sched"].state_dict(), first["sched"].state_dict())


class Slope(kinds.LRScheduler):
    """A user's own."""

    def __init__(self, optim, slope=0.1):
        self.slope = slope
        super().__init__(optim)

    def get_lr(self):
        """Fall."""
        return [rate - self.slope * self.last_epoch for rate in self.base_lrs]


class Stair(Slope):
    """Another one of the user's, with something else to keep."""

    def __init__(self, optim):
        self.width = 3
        super().__init__(optim)
        del self.slope

    def get_lr(self):
        """Stand."""
        return self.base_lrs


def schedule(kind):
    """One schedule of a kind, by a name of BUILDERS or a class."""
    optim = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return kind(optim) if isinstance(kind, type) else BUILDERS[kind](optim)


@pytest.mark.parametrize(
    ("saved", "live", "text"),
    [
        ("StepLR", "CosineAnnealingLR", "saved as schedule StepLR, is schedule CosineAnn"),
        ("StepLR", "ExponentialLR", "saved as schedule StepLR, is schedule ExponentialLR"),
        ("LambdaLR", "MultiplicativeLR", "saved as schedule LambdaLR, is schedule Mult"),
        ("SequentialLR", "ChainedScheduler", "saved as schedule SequentialLR, is schedule Chai"),
        ("ConstantLR", Slope, "saved as schedule ConstantLR, is schedule LRScheduler"),
        (Slope, Stair, "saved by another kind of schedule"),
    ],
)
def test_another_kind_of_schedule_is_refused(saved, live, text):
    """Torch would put the numbers of one into the other without a word. Lenient, it is left."""
    image, here = image_of({"sched": schedule(saved)}), schedule(live)
    before = copy.deepcopy(here.state_dict())
    with pytest.raises(StateError, match=rf"different: state\['sched'\] {text}"):
        load(image, {"sched": here})
    (listed,) = load_leniently(image, {"sched": here})["unfit"]
    assert text in listed
    assert same(here.state_dict(), before)


def test_a_users_kind_of_a_schedule_of_torch_is_that_one():
    """What a class is called that only adds to one of torch's does not matter."""

    class Named(kinds.StepLR):
        """As torch's."""

    one, other = (
        kind(torch.optim.SGD([torch.ones(1)], lr=0.1), 3) for kind in (kinds.StepLR, Named)
    )
    one.optimizer.step()
    one.step()
    load(image_of({"sched": one}), {"sched": other})
    assert other.last_epoch == 1


def test_a_gradient_scaler_goes_on():
    """Scale and growth count come back: after the same overflow both end at the same scale."""

    def build():
        weight = nn.Parameter(torch.ones(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return weight, torch.optim.SGD([weight], lr=0.1), scaler

    def train(parts, grads):
        weight, optim, scaler = parts
        for grad in grads:
            optim.zero_grad()
            scaler.scale((weight * grad).sum()).backward()
            scaler.step(optim)
            scaler.update()
        return scaler.get_scale(), weight.tolist()

    def state(parts):
        return {"weight": parts[0], "optim": parts[1], "scaler": parts[2]}

    first, second = build(), build()
    train(first, [1.0, 1.0, 1.0, 1.0, float("inf")])
    image = image_of(state(first))
    load(image, state(second))
    ahead = [1.0, 2.0, float("inf"), 1.0, 1.0, 1.0, 1.0]
    assert train(second, ahead) == train(first, ahead)
    assert same(second[2].state_dict(), first[2].state_dict())


def averaged(how):
    """Make a model and its average of one of torch's kinds."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if how == "ema" else {}
    return model, AveragedModel(model, use_buffers=how == "ema", **options)


@pytest.mark.parametrize("how", ["mean", "ema"])
def test_an_averaged_model_goes_on(how):
    """The count of what was averaged comes back too: without it the mean starts anew."""

    def train(model, average, count):
        with torch.no_grad():
            for step in range(count):
                model[0].weight.add_(step + 1)
                average.update_parameters(model)

    one, two = averaged(how), averaged(how)
    train(*one, 3)
    image = image_of({"model": one[0], "average": one[1]})
    train(*one, 4)
    train(*two, 1)
    load(image, {"model": two[0], "average": two[1]})
    assert int(two[1].n_averaged) == 3
    train(*two, 4)
    assert same(two[1].state_dict(), one[1].state_dict())


class HandMade:
    """A moving average written by hand: tensors of its own, and a count that is a plain int."""

    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
        self.updates = 0

    def update(self, model):
        """Weigh by the number of updates, as warm-ups of averages do."""
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 1 - decay)

    def state_dict(self):
        """Give the tensors themselves and the count."""
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state):
        """Take both."""
        self.shadow, self.updates = state["shadow"], state["updates"]


def test_an_average_made_by_hand_goes_on():
    """Its integer is not lost, and its tensors are copies of what they were at the save."""
    model = nn.Linear(2, 2)
    first, second = HandMade(model), HandMade(model)
    with torch.no_grad():
        for step in range(5):
            model.weight.add_(step)
            first.update(model)
    image = image_of({"ema": first})
    wanted = {name: bits(value) for name, value in first.shadow.items()}
    first.update(model)
    load(image, {"ema": second})
    assert second.updates == 5
    assert {name: bits(value) for name, value in second.shadow.items()} == wanted
    second.update(model)
    assert same(second.state_dict(), first.state_dict())
