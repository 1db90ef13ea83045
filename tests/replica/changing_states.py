"""Random training states, and all that may happen to one between two saves."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
MUTATIONS = []


class Extra(nn.Linear):
    """A layer that adds to its state."""

    def get_extra_state(self):
        """Say something that is no tensor."""
        return {"seen": 3}

    def set_extra_state(self, state):
        """Take it back."""


class Own(nn.Linear):
    """A layer that saves itself."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # noqa: ARG002
        destination[prefix + "mine"] = self.weight


class Name(str):
    """Text that is equal to a str and is none."""

    __slots__ = ()


def mutation(change):
    """Register one thing that may happen: it takes the state and a generator."""
    MUTATIONS.append(change)
    return change


def tensor(rng, dtype=None):
    """Return a tensor of random geometry and values."""
    dtype = DTYPES[rng.integers(len(DTYPES))] if dtype is None else dtype
    shape = rng.integers(1, 5, rng.integers(0, 3)).tolist()
    found = torch.from_numpy(rng.integers(0, 100, shape)).to(dtype)
    return found.t() if found.dim() == 2 and rng.integers(2) else found


def layer(rng):
    """Return a small module of a random kind."""
    kind = rng.integers(5)
    if kind == 0:
        return nn.BatchNorm1d(4)
    if kind == 1:
        return nn.ParameterDict({"a": nn.Parameter(torch.randn(3)), "b": torch.randn(2)})
    return nn.Linear(4, 4, bias=bool(rng.integers(2)))


def random_state(rng):
    """Return model, optimizers, schedule, containers, plain values and generators."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = nn.Sequential(
        OrderedDict((f"l{i}", layer(rng)) for i in range(4)),
    )
    model.add_module("deep", nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(2, 2)])))
    optim = (
        torch.optim.AdamW(model.parameters(), lr=0.1)
        if rng.integers(2)
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    return {
        "model": model,
        "optim": optim,
        "sched": torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step)),
        "box": {f"t{i}": tensor(rng) for i in range(5)},
        "list": [tensor(rng), tensor(rng), {"n": 1, "t": tensor(rng)}, [tensor(rng)]],
        "pair": (tensor(rng), OrderedDict(a=tensor(rng), b=2.5)),
        "mixed": {"n": 1, 2: tensor(rng), "array": np.arange(3), "t": tensor(rng)},
        "plain": {"epoch": 1, "names": ["a", "b"], "raw": bytes(5000)},
        "generator": torch.Generator().manual_seed(1),
        "count": 0,
    }


def some(values, rng):
    """Pick one of the values."""
    values = list(values)
    return values[rng.integers(len(values))]


def a_module(state, rng):
    """Pick one of the modules."""
    return some(state["model"].modules(), rng)


def a_holder(state, rng):
    """Pick a module with parameters of its own."""
    return some([m for m in state["model"].modules() if m._parameters] or [state["model"]], rng)


def a_param(state, rng):
    """Pick one of the parameters."""
    return some(state["model"].parameters(), rng)


@mutation
def nothing(state, rng):
    """Change nothing."""


@mutation
def values_only(state, rng):
    """Change values in place, as a training step does."""
    with torch.no_grad():
        for value in (*state["model"].parameters(), *state["box"].values()):
            if isinstance(value, torch.Tensor):
                value.copy_(torch.randint(0, 2, value.shape))
    state["count"] += 1
    state["plain"]["epoch"] += 1
    state["generator"].seed()


@mutation
def optimizer_step(state, rng):
    """Make the optimizer's state, or update it."""
    kept = state["optim"].state
    for param in [p for p in kept if _unfit(kept[p], p)]:
        kept.pop(param)
    state["optim"].zero_grad()
    for param in state["model"].parameters():
        usual = param.requires_grad and param.dtype is torch.float32
        param.grad = torch.ones_like(param) if usual and rng.integers(4) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule that runs before the first step
        state["optim"].step()
        state["sched"].step()


def _unfit(kept, param):
    return any(
        isinstance(v, torch.Tensor) and v.dim() and v.shape != param.shape for v in kept.values()
    )


@mutation
def tensor_replaced(state, rng):
    """Put another tensor in the place of one."""
    state["box"][some(state["box"], rng)] = tensor(rng)
    state["list"][int(rng.integers(2))] = tensor(rng)


@mutation
def clone_in_its_place(state, rng):
    """Put an equal tensor elsewhere in memory."""
    box = state["box"]
    key = some([key for key in box if isinstance(box[key], torch.Tensor)], rng)
    box[key] = box[key].clone()


@mutation
def data_replaced(state, rng):
    """Give a parameter other memory, sometimes of another shape or dtype."""
    param = a_param(state, rng)
    new = (torch.randn(param.shape), torch.randn(3), torch.randn(param.shape).double())
    param.data = new[rng.integers(3)]


@mutation
def resized_in_place(state, rng):
    """Change a tensor's own geometry."""
    value = tensor(rng, torch.float32)
    state["box"]["own"] = value.clone()
    other = state["box"]["own"]
    (lambda: other.resize_(2, 2), lambda: other.set_(torch.randn(7)), lambda: other.unsqueeze_(0))[
        rng.integers(3)
    ]()


@mutation
def geometry_changed_later(state, rng):
    """Change the geometry of a tensor that was saved before."""
    value = state["box"].get("own")
    if value is not None and value.dim() == 2:
        value.t_()
    elif value is not None:
        value.resize_(5)


@mutation
def tied_and_untied(state, rng):
    """Make two names one tensor, or overlapping views of one memory, or two again."""
    base = torch.arange(10.0)
    state["box"]["x"], state["box"]["y"] = (
        (base, base),
        (base[:6], base[4:]),
        (base[:5], base[5:]),
        (base.clone(), base.clone()),
        (base[::2], base[1::2]),
    )[rng.integers(5)]


@mutation
def weights_tied(state, rng):
    """Make two parameters one, or one its own again."""
    linears = [m for m in state["model"].modules() if isinstance(m, nn.Linear)]
    one, other = some(linears, rng), some(linears, rng)
    shared = rng.integers(2)
    one.weight = other.weight if shared else nn.Parameter(one.weight.detach().clone())


@mutation
def key_added(state, rng):
    """Add a key somewhere."""
    where = (state["box"], state["mixed"], state, state["list"][2])[rng.integers(4)]
    where[f"new{rng.integers(3)}"] = (tensor(rng), 1, [tensor(rng)], None)[rng.integers(4)]


@mutation
def key_removed(state, rng):
    """Take a key away."""
    if len(state["box"]) > 2:
        state["box"].pop(some(state["box"], rng))
    state.pop("new1", None)


@mutation
def keys_reordered(state, rng):
    """Move one key to the end."""
    for box in (state["box"], state, state["model"]._modules, a_holder(state, rng)._parameters):
        key = some(box, rng)
        box[key] = box.pop(key)


@mutation
def key_of_another_kind(state, rng):
    """Put an equal key of another type in the place of one."""
    mixed = state["mixed"]
    old, new = ((2, 2.0), (2.0, 2), ("t", "t"), (1, True), (True, 1))[rng.integers(5)]
    value = mixed.pop(old, None)
    if value is not None:
        mixed[new] = value


@mutation
def kind_changed(state, rng):
    """Put a tensor where a plain value was, and the reverse; change a value's type."""
    state["mixed"]["n"] = (1, True, 1.0, "1", tensor(rng), None, [1])[rng.integers(7)]
    state["list"][2]["n"] = (1, 1.0, tensor(rng), {"k": tensor(rng)})[rng.integers(4)]
    state["mixed"]["t"] = (tensor(rng), 7)[rng.integers(2)]


@mutation
def container_changed(state, rng):
    """Change the kind of a container, its members the same."""
    state["box"] = (dict, OrderedDict)[rng.integers(2)](state["box"])
    state["list"] = [*state["list"]]
    state["pair"] = (list, tuple)[rng.integers(2)](state["pair"])


@mutation
def arrays_changed(state, rng):
    """Change what lies beside the tensors as bytes."""
    state["mixed"]["array"] = np.arange(rng.integers(2, 4))
    state["plain"]["raw"] = bytes(int(rng.integers(3000, 6000)))


@mutation
def gradients_wanted(state, rng):
    """Freeze or thaw a parameter."""
    param = a_param(state, rng)
    param.requires_grad_(not param.requires_grad and param.dtype.is_floating_point)


@mutation
def states_loaded(state, rng):
    """Load the objects' own states back into them, copied and assigned."""
    assign = bool(rng.integers(2))
    state["model"].load_state_dict(state["model"].state_dict(), strict=False, assign=assign)
    state["optim"].load_state_dict(state["optim"].state_dict())


@mutation
def group_added(state, rng):
    """Give the optimizer another group of parameters."""
    if len(state["optim"].param_groups) < 3:
        state["optim"].add_param_group({"params": [nn.Parameter(torch.randn(2))], "lr": 0.5})
        state["sched"].base_lrs.append(0.5)
        state["sched"].lr_lambdas.append(lambda _: 1.0)


@mutation
def optimizer_values(state, rng):
    """Change what an optimizer keeps besides moments."""
    group = state["optim"].param_groups[0]
    group["lr"] = (0.1, 0.2, torch.tensor(0.3))[rng.integers(3)]
    for kept in list(state["optim"].state.values())[:2]:
        kept["more"] = (1, 2.5, torch.ones(2), [torch.ones(1), 3], None)[rng.integers(5)]
        if rng.integers(2):
            kept.pop("more")


@mutation
def optimizer_reordered(state, rng):
    """Change the order of an optimizer's state, its parameters, or take a state away."""
    kept = state["optim"].state
    if kept:
        param = some(kept, rng)
        value = kept.pop(param)
        if rng.integers(2):
            kept[param] = value
    state["optim"].param_groups[0]["params"].reverse()


@mutation
def child_changed(state, rng):
    """Swap, add or take away a module."""
    model = state["model"]
    model.add_module("l1", layer(rng))
    model.add_module("more", (None, nn.Linear(2, 2), model.deep)[rng.integers(3)])


@mutation
def parameter_or_buffer_gone(state, rng):
    """Make a parameter or a buffer None, or a buffer one that is not saved."""
    module = a_holder(state, rng)
    if "bias" in module._parameters:
        module.bias = None if rng.integers(2) else nn.Parameter(torch.randn(4))
    module.register_buffer("kept", (None, torch.ones(2))[rng.integers(2)], bool(rng.integers(2)))


@mutation
def class_changed(state, rng):
    """Give a layer another class."""
    linears = [m for m in state["model"].modules() if isinstance(m, nn.Linear)]
    some(linears, rng).__class__ = (nn.Linear, nn.Linear, Extra, Own)[rng.integers(4)]


@mutation
def hooked(state, rng):
    """Hook into what an object says of itself, for one save."""
    module = a_module(state, rng)

    def rename(_module, found, prefix, _meta):
        for key in list(found):
            if key.startswith(prefix) and key.endswith("weight"):
                found[key + "2"] = found.pop(key)

    def add(_optimizer, found):
        return {**found, "more": 1}

    return (
        lambda: module._register_state_dict_hook(rename),
        lambda: module.register_state_dict_pre_hook(lambda *_: None),
        lambda: state["optim"].register_state_dict_post_hook(add),
    )[rng.integers(3)]()


@mutation
def own_method(state, rng):
    """Give one module a `state_dict` of its own, or take it away."""
    module = state["model"].deep
    if "state_dict" in vars(module):
        del module.state_dict
    else:
        module.state_dict = lambda *_, destination=None, prefix="", **_more: (
            {prefix + "w": module[0].weight} if destination is None else destination
        )


@mutation
def tensors_swapped(state, rng):
    """Exchange two tensors, their Python objects staying."""
    one, other = torch.ones(3), torch.zeros(2, 2, dtype=torch.int64)
    state["box"]["swap"], kept = one, other
    if rng.integers(2):
        torch.utils.swap_tensors(one, kept)


@mutation
def views_with_bits(state, rng):
    """Put conjugate and negative views in."""
    base = torch.complex(torch.arange(4.0), torch.ones(4))
    state["box"]["z"] = (base, base.conj(), base.conj().imag, base.real)[rng.integers(4)]


@mutation
def object_replaced(state, rng):
    """Register another object under a name."""
    state["model"] = nn.Sequential(OrderedDict(state["model"]._modules))
    state["generator"] = torch.Generator().manual_seed(int(rng.integers(9)))


@mutation
def refused(state, rng):
    """Put in what cannot be carried, for one save."""
    bad = (
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        object(),
        torch.ones(2).as_subclass(Odd),
        nested(),
    )[rng.integers(5)]
    key = some(state["box"], rng)
    old, state["box"][key] = state["box"][key], bad
    return Undo(lambda: state["box"].__setitem__(key, old))


@mutation
def emptied(state, rng):
    """Take the memory of a tensor away, for one save."""
    value = torch.ones(3)
    state["box"]["emptied"] = value
    value.untyped_storage().resize_(0)
    return Undo(lambda: state["box"].pop("emptied", None))


@mutation
def odd_key(state, rng):
    """Put an equal key of a class of its own in the place of one, for one save."""
    key = next(iter(state["box"]))
    value = state["box"].pop(key)
    state["box"][Name(key)] = value

    def back():
        state["box"].pop(key)
        state["box"][key] = value

    return Undo(back)


def nested():
    """Return a nested tensor, which torch warns of once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Odd(torch.Tensor):
    """A tensor class of the user's."""


class Undo:
    """What takes a change back, with the name that torch's own handles have."""

    def __init__(self, back):
        self.remove = back
