"""Restoring state objects: modules, optimizers, generators, and whatever has `load_state_dict`."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from replica.errors import StateError
from replica.image import ImageError
from replica.random_states import check_numpy_position
from replica.state import MODULE, OPTIMIZER, STATEFUL, module_state, set_generator_state
from replica.torch_private import DTensor, is_stock_loader
from replica.tree import MAPPING_START, Node, Unsupported, path_text
from replica.tree_reader import NO_VALUE, tag_of

if TYPE_CHECKING:
    from replica.loading import Loader

Keys = tuple[object, ...]


def prepare_object(loader: Loader, kind: str, live: Any, node: Node, keys: Keys) -> None:
    """Check the saved state of an object against the live one and plan its loading."""
    if kind == MODULE:
        _prepare_module(loader, live, node, keys)
    elif kind == OPTIMIZER:
        _prepare_optimizer(loader, live, node, keys)
    elif kind == STATEFUL:
        saved = _decoded(loader, node, keys)
        loader.actions.append(partial(_hand_over, keys, partial(live.load_state_dict, saved)))
    else:
        _prepare_generator(loader, live, node, keys)


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
    loader.findings.extra += [path_text((*keys, key)) for key in here if key not in saved]
    filled: OrderedDict[str, Any] = OrderedDict()
    for key, value in here.items():
        if key in saved:
            filled[key] = _module_value(loader, value, saved[key], (*keys, key))
    # Modules read their own version there, to tell old states from new ones.
    filled._metadata = _versions(live)  # type: ignore[attr-defined]  # noqa: SLF001
    load = partial(live.load_state_dict, filled, strict=True)
    loader.actions.append(partial(_hand_over, keys, load))


def _module_value(loader: Loader, live: object, node: Node, keys: Keys) -> object:
    if not isinstance(live, torch.Tensor):
        return loader.decoder.decode(node)
    facts = loader.tensor_facts(live, node, keys)
    if facts is None:
        return None
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


def _prepare_optimizer(loader: Loader, live: torch.optim.Optimizer, node: Node, keys: Keys) -> None:
    saved = _decoded(loader, node, keys)
    sizes = _group_sizes(saved)
    here = [len(group["params"]) for group in live.param_groups]
    if sizes is None and is_stock_loader(live):
        loader.findings.different.append(f"{path_text(keys)} was not saved by such an optimizer")
    elif sizes is not None and sizes != here:
        loader.findings.different.append(
            f"{path_text(keys)} saved with parameter groups of {sizes} parameters, has {here}"
        )
    loader.actions.append(partial(_hand_over, keys, partial(_load_optimizer, live, saved)))


def _group_sizes(saved: object) -> list[int] | None:
    """Parameters per group, None for anything that torch's optimizers do not save."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return None
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    lists = [group.get("params") for group in groups]
    return [len(params) for params in lists] if all(isinstance(p, list) for p in lists) else None


def _load_optimizer(live: torch.optim.Optimizer, saved: Any) -> None:
    """Load, then undo torch's casts.

    `Optimizer.load_state_dict` brings floating state to its parameter's dtype and device, so
    moments kept in float32 beside bfloat16 parameters would lose bits at every restart.
    """
    live.load_state_dict(saved)
    states = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(states, Mapping):
        return
    params = [param for group in live.param_groups for param in group["params"]]
    stock = is_stock_loader(live)
    for index, values in states.items():
        if type(index) is int and 0 <= index < len(params) and isinstance(values, dict):
            param = params[index]
            placed = {key: _beside(value, param) for key, value in values.items()}
            live.state[param] = placed if stock else _recast(live.state.get(param), placed)


def _beside(value: object, param: torch.Tensor) -> object:
    """Move a tensor to the parameter's own device where it was saved from one of its kind."""
    if isinstance(value, torch.Tensor) and value.device.type == param.device.type:
        return value.to(param.device)
    return value


def _recast(loaded: Any, saved: dict[Any, Any]) -> Any:
    """What a foreign loader made, with those tensors replaced whose dtype it changed."""
    if not isinstance(loaded, dict):
        return loaded
    for key, value in saved.items():
        now = loaded.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            loaded[key] = now if now.dtype == value.dtype else value
    return loaded


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
    loader.actions.append(partial(set_generator_state, live, state))


def _scratch(live: Any) -> object:
    """A generator of the same kind, to try a state on."""
    if isinstance(live, torch.Generator):
        return torch.Generator(device=live.device)
    if isinstance(live, np.random.Generator):
        return np.random.Generator(type(live.bit_generator)(0))
    if isinstance(live, np.random.RandomState):
        return np.random.RandomState(0)
    return random.Random()  # noqa: S311
