"""Restoring state objects: modules, optimizers, generators, and whatever has `load_state_dict`."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn, optim

from replica.errors import StateError
from replica.image import ImageError
from replica.leaves import unexpanded
from replica.loaders import load_into
from replica.random_states import check_numpy_position
from replica.state import MODULE, OPTIMIZER, STATEFUL, module_state, set_generator_state
from replica.tables import placement_names
from replica.torch_private import DTensor, is_stock_loader, local_of
from replica.tree import MAPPING_START, Node
from replica.tree_reader import NO_VALUE, tag_of
from replica.unsupported import Unsupported, path_text
from replica.wrapped import plan_wrapped

if TYPE_CHECKING:
    from replica.loading import Loader

Keys = tuple[object, ...]

LEFT = object()
"""Stands for a value that does not fit and stays as it is."""

_LIKE_PARAMETER = (
    *(optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
"""torch's optimizers whose state has, beside numbers, tensors of the parameter's own shape only."""


def prepare_object(loader: Loader, kind: str, live: Any, node: Node, keys: Keys) -> None:
    """Check the saved state of an object against the live one and plan its loading."""
    if kind == MODULE:
        _prepare_module(loader, live, node, keys)
    elif kind == OPTIMIZER:
        _prepare_optimizer(loader, live, node, keys)
    elif kind == STATEFUL:
        saved = _decoded(loader, node, keys)
        if not _is_other_schedule(loader, live, saved, keys):
            load = partial(load_into, live, saved, loader.generators)
            loader.actions.append(partial(_hand_over, keys, load))
    else:
        _prepare_generator(loader, live, node, keys)


def _is_other_schedule(loader: Loader, live: Any, saved: object, keys: Keys) -> bool:
    """Note the state of another kind of a user's schedules: torch would mix it into this one.

    Keys that only one side has may have come with the first steps, so both must have some.
    """
    if not isinstance(live, optim.lr_scheduler.LRScheduler) or not isinstance(saved, dict):
        return False
    here = live.state_dict()
    gone = sorted(str(key) for key in saved if key not in here)
    new = sorted(str(key) for key in here if key not in saved)
    if not gone or not new:
        return False
    loader.findings.unfit.append(
        f"{path_text(keys)} saved by another kind of schedule, with {gone}, has {new}"
    )
    return True


def _decoded(loader: Loader, node: Node, keys: Keys) -> Any:
    try:
        return loader.decoder.decode(node)
    except StateError as fault:
        raise StateError(f"{path_text(keys)}: {fault}") from fault


def _hand_over(keys: Keys, load: Callable[[], object]) -> None:
    """Run an object's own loading, and name the object when it fails."""
    try:
        load()
    except Exception as fault:
        raise StateError(
            f"{path_text(keys)} did not take the state that was saved for it: "
            f"{type(fault).__name__}: {fault}"
        ) from fault


def _prepare_module(loader: Loader, live: nn.Module, node: Node, keys: Keys) -> None:
    if tag_of(node) not in MAPPING_START:
        raise ImageError("shard image: the state of a module is no dict")
    try:
        here = module_state(live)
    except Unsupported as fault:
        raise StateError(f"{path_text(keys)}: {fault.describe()}") from fault
    saved = dict(loader.decoder.pairs(node))
    loader.findings.missing += [path_text((*keys, key)) for key in saved if key not in here]
    filled: OrderedDict[str, Any] = OrderedDict()
    for key, value in here.items():
        if key not in saved:
            loader.leave(value, (*keys, key))
            continue
        found = _module_value(loader, value, saved[key], (*keys, key))
        if found is not LEFT:
            filled[key] = found
    # Modules read their own version there, to tell old states from new ones.
    filled._metadata = _versions(live)  # type: ignore[attr-defined]  # noqa: SLF001
    load = partial(_load_module, live, filled, here, loader.unfilled)
    loader.actions.append(partial(_hand_over, keys, load))


def _load_module(
    live: nn.Module, filled: dict[str, Any], here: dict[str, Any], unfilled: set[int]
) -> None:
    """Load what was planned but for the tensors that turned out later not to be filled."""
    for key in [key for key in filled if id(here[key]) in unfilled]:
        del filled[key]
    live.load_state_dict(filled, strict=len(filled) == len(here))


def _module_value(loader: Loader, live: object, node: Node, keys: Keys) -> object:
    if not isinstance(live, torch.Tensor):
        return loader.decoder.decode(node)
    if plan_wrapped(loader, live, node, keys):
        return LEFT  # to the copies into its inner tensors
    facts = loader.tensor_facts(live, node, keys)
    if facts is None:
        return LEFT
    if unexpanded(local_of(live)) is not local_of(live):
        loader.fill(live, facts)  # a module's own loading cannot: elements that repeat
        return LEFT
    local = loader.saved_local(facts)
    if not isinstance(live, DTensor):
        return local
    return DTensor.from_local(
        local,
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def _versions(root: nn.Module) -> OrderedDict[str, dict[str, Any]]:
    named = root.named_modules(remove_duplicate=False)
    return OrderedDict((name, {"version": module._version}) for name, module in named)  # noqa: SLF001


def _prepare_optimizer(loader: Loader, live: optim.Optimizer, node: Node, keys: Keys) -> None:
    path = path_text(keys)
    saved = _decoded(loader, node, keys)
    sizes = _group_sizes(saved)
    here = [len(group["params"]) for group in live.param_groups]
    if sizes is None and is_stock_loader(live):
        loader.findings.different.append(f"{path} was not saved by such an optimizer")
        return
    if sizes is not None and sizes != here:
        loader.findings.unfit.append(
            f"{path} saved with parameter groups of {sizes} parameters, has {here}"
        )
        return
    unsaved = _unsaved_options(saved, live, keys) if sizes is not None else []
    if unsaved:
        loader.findings.extra += unsaved
        return
    if sizes is not None:
        for number, param in _numbered(saved, live).items():
            _compare_state(loader, live, param, saved["state"].get(number), f"{path} {number}")
    loader.actions.append(partial(_hand_over, keys, partial(_load_optimizer, loader, live, saved)))


def _group_sizes(saved: object) -> list[int] | None:
    """Parameters per group, None for anything that torch's optimizers do not save."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return None
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    lists = [group.get("params") for group in groups]
    if not all(isinstance(params, list) and {*map(type, params)} <= {int} for params in lists):
        return None
    return [len(params) for params in lists]


def _unsaved_options(saved: Any, live: optim.Optimizer, keys: Keys) -> list[str]:
    """Options of the live groups that the saved groups lack: another kind of optimizer saved them.

    torch's loader replaces the groups, so that the next step would miss them, except for names of
    parameters, which it keeps. A loader of another's may fill in what is missing.
    """
    if not is_stock_loader(live):
        return []
    return [
        path_text((*keys, "param_groups", number, option))
        for number, group in enumerate(live.param_groups)
        for option in group
        if option not in saved["param_groups"][number] and option != "param_names"
    ]


def _numbered(saved: dict[str, Any], live: optim.Optimizer) -> dict[int, torch.Tensor]:
    """Live parameters by the numbers under which their state was saved, as torch pairs them."""
    pairs = zip(saved["param_groups"], live.param_groups, strict=True)
    return {
        number: param
        for then, now in pairs
        for number, param in zip(then["params"], now["params"], strict=True)
    }


def _compare_state(
    loader: Loader, live: optim.Optimizer, param: torch.Tensor, values: object, path: str
) -> None:
    """Refuse state of another form than its parameter's: a step would use it without a word."""
    alike = type(live) in _LIKE_PARAMETER
    for key, value in values.items() if isinstance(values, dict) else ():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        name = f"{path} {key!r}"
        if alike and value.shape != param.shape:
            loader.findings.unfit.append(
                f"{name} saved with shape {list(value.shape)}, its parameter has "
                f"{list(param.shape)}"
            )
            loader.left[id(param)] = param
        elif value.shape == param.shape or isinstance(value, DTensor):
            why = _placed_otherwise(value, param, alike=alike)
            if why is not None:
                loader.findings.different.append(f"{name} {why}")


def _placed_otherwise(value: torch.Tensor, param: torch.Tensor, *, alike: bool) -> str | None:
    if not isinstance(param, DTensor):
        return "saved as a DTensor, its parameter is none" if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor):
        # A hand-written optimizer may keep local tensors.
        return "saved as a plain tensor, its parameter is a DTensor" if alike else None
    if value.shape != param.shape:
        return None
    then, now = ((one.device_mesh, placement_names(one)) for one in (value, param))
    return None if then == now else f"saved as {then}, its parameter is {now}"


def _load_optimizer(loader: Loader, live: optim.Optimizer, saved: Any) -> None:
    """Load, then undo torch's casts.

    `Optimizer.load_state_dict` brings floating state to its parameter's dtype and device, so
    moments kept in float32 beside bfloat16 parameters would lose bits at every restart. State of
    parameters that a lenient restore left as they are is left out.
    """
    if _group_sizes(saved) is None:
        live.load_state_dict(saved)
        return
    params = _numbered(saved, live)
    gone = {number for number, param in params.items() if id(param) in loader.left}
    states = {number: values for number, values in saved["state"].items() if number not in gone}
    live.load_state_dict({**saved, "state": states})
    stock = is_stock_loader(live)
    for number, values in states.items():
        if number in params and type(number) is int and isinstance(values, dict):
            param = params[number]
            placed = {key: _beside(value, param) for key, value in values.items()}
            live.state[param] = placed if stock else _recast(live.state.get(param), placed)


def _beside(value: object, param: torch.Tensor) -> object:
    """Move a tensor to the parameter's own device where it was saved from one of its kind."""
    if isinstance(value, torch.Tensor) and value.device.type == param.device.type:
        return value.to(param.device)
    return value


def _recast(loaded: Any, saved: dict[Any, Any]) -> Any:
    """What a foreign loader made, with those tensors replaced whose dtype alone it changed."""
    if not isinstance(loaded, dict):
        return loaded
    for key, value in saved.items():
        now = loaded.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            loaded[key] = value if _only_cast(now, value) else now
    return loaded


def _only_cast(now: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether `now` holds the saved values in another dtype and is no other tensor of the state."""
    ours, theirs = local_of(saved), local_of(now)
    if theirs.dtype == ours.dtype or theirs.shape != ours.shape or theirs.device != ours.device:
        return False
    cast = ours.to(theirs.dtype)
    return bool(((cast == theirs) | (cast.isnan() & theirs.isnan())).all())


def _prepare_generator(loader: Loader, live: object, node: Node, keys: Keys) -> None:
    state = _decoded(loader, node, keys)
    try:
        if isinstance(live, np.random.Generator | np.random.RandomState):
            check_numpy_position(state)
        set_generator_state(_scratch(live), state)
    except NO_VALUE as fault:
        loader.findings.different.append(
            f"{path_text(keys)} does not take the saved state: {fault}"
        )
        return
    loader.late_actions.append(partial(set_generator_state, live, state))
    loader.generators.append(live)


def _scratch(live: Any) -> object:
    """A generator of the same kind, to try a state on."""
    if isinstance(live, torch.Generator):
        return torch.Generator(device=live.device)
    if isinstance(live, np.random.Generator):
        return np.random.Generator(type(live.bit_generator)(0))
    if isinstance(live, np.random.RandomState):
        return np.random.RandomState(0)
    return random.Random()  # noqa: S311
