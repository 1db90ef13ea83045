"""Live objects to plain values: what is captured of a module, an optimizer, a loader, a generator.

Reading changes nothing. Modules are read attribute by attribute, in the order and under the keys
of their `state_dict()`, because that call reshards an FSDP2 module that was left unsharded.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from replica.leaves import LeafList
from replica.random_states import capture_random_states
from replica.torch_private import (
    FullyShardedDataParallel,
    sharded_parameters,
    state_dict_hooks,
    unsharded_groups,
)
from replica.tree import Encoder, Node
from replica.unsupported import Unsupported
from replica.wrapped import with_wrappers

EXTRA_STATE_KEY = "_extra_state"

MODULE = "module"
OPTIMIZER = "optimizer"
STATEFUL = "stateful"
GENERATORS: dict[type, str] = {
    torch.Generator: "torch.Generator",
    np.random.Generator: "numpy.random.Generator",
    np.random.RandomState: "numpy.random.RandomState",
    random.Random: "random.Random",
}

Live = Callable[[object], tuple[str, object] | None]
"""Gives the kind of a state object and its current state, None for anything else."""

_Found = dict[str, object]
_Sharded = dict[tuple[int, str], nn.Parameter]


def capture_state(
    state: Mapping[str, object],
    *,
    random_states: bool,
    live: Live,
    seen: list[object] | None = None,
) -> tuple[Node, Node, LeafList]:
    """Walk the state: its node, the node of the random states (None without), the leaves.

    The nodes hold copies of all Python values, the leaves references to the live tensors and
    arrays. `live` says the state of objects: `live_state` or what asks it. `seen` takes what the
    objects said of themselves, in the order of the walk, and the random states. Raises
    `Unsupported` with the key path.
    """
    leaves = LeafList()
    asked = live if seen is None else partial(_noted, seen, live)
    node = Encoder(leaves, asked).encode({**state})
    random_node: Node = None
    if random_states:
        # Last, because a loader's state_dict may draw from them.
        found = capture_random_states()
        random_node = Encoder(leaves, live_state).encode(found)
        if seen is not None:
            seen.append(found)
    return node, random_node, leaves


def kind_of(value: object) -> str | None:
    """Which kind of state object a value is, None for a plain value."""
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, torch.optim.Optimizer):
        return OPTIMIZER
    generator = GENERATORS.get(type(value))
    if generator is not None:
        return generator
    saves = callable(getattr(value, "state_dict", None))
    loads = callable(getattr(value, "load_state_dict", None))
    return STATEFUL if saves and loads and not isinstance(value, type) else None


def written_kind(value: object, kind: str) -> str:
    """The kind as an image has it: of optimizers and schedules also by which class of torch's.

    Their loaders take the state of another class without a word, and mix it into their own. A
    user's subclass goes by the class of torch's that it is of.
    """
    if kind != OPTIMIZER and not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return kind
    ours = (one for one in type(value).__mro__ if one.__module__.startswith("torch.optim."))
    return f"{'schedule' if kind == STATEFUL else kind} {next(ours).__name__}"


def live_state(value: object) -> tuple[str, object] | None:
    """Kind and current state of a state object, None for anything else."""
    kind = kind_of(value)
    if kind is None:
        if callable(getattr(value, "state_dict", None)):
            raise Unsupported(value, "which has state_dict but no load_state_dict")
        return None
    if kind == MODULE:
        return kind, with_wrappers(module_state(value))  # type: ignore[arg-type]
    if kind in {OPTIMIZER, STATEFUL}:
        return written_kind(value, kind), value.state_dict()  # type: ignore[attr-defined]
    return kind, generator_state(value)


def _noted(seen: list[object], asked: Live, value: object) -> tuple[str, object] | None:
    found = asked(value)
    if found is not None:
        seen.append(found[1])
    return found


def outline_state(value: object) -> tuple[str, object] | None:
    """As `live_state`, but for loaders and their like, which are not asked.

    Asking them before the first step may start workers or draw numbers.
    """
    if kind_of(value) == STATEFUL and not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return STATEFUL, None
    return live_state(value)


def generator_state(value: Any) -> object:
    """State of a random generator object as a plain value."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.getstate()


def set_generator_state(value: Any, state: Any) -> None:
    """Put a state that `generator_state` gave into a generator of the same kind."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.setstate(state)


def module_state(root: nn.Module) -> dict[str, object]:
    """What `root.state_dict(keep_vars=True)` would hold, with FSDP2's sharded parameters.

    Everybody's hooks are called but FSDP2's own, which reshards. A module that overrides
    `state_dict` is asked through it.
    """
    found: OrderedDict[str, object] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]  # noqa: SLF001 - hooks may look
    groups = unsharded_groups(root.modules())
    return _collect(root, "", found, sharded_parameters(groups))


def _collect(module: nn.Module, prefix: str, found: _Found, sharded: _Sharded) -> _Found:
    """The steps of `nn.Module.state_dict`."""
    if isinstance(module, FullyShardedDataParallel):
        raise Unsupported(module, "whose parameters FSDP1 flattens; use fully_shard (FSDP2)")
    if _overrides(module, "state_dict"):
        _refuse_unsharded(module.modules(), sharded)
        found.update(module.state_dict(prefix=prefix, keep_vars=True))
        return found
    before, after = state_dict_hooks(module)
    for hook in before:
        hook(module, prefix, True)
    if not _overrides(module, "_save_to_state_dict"):
        _collect_own(module, prefix, found, sharded)
    else:
        _refuse_unsharded([module], sharded)
        module._save_to_state_dict(found, prefix, keep_vars=True)  # noqa: SLF001
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            found = _collect(child, f"{prefix}{name}.", found, sharded)
    for hook in after:
        # Hooks of the older, private kind may give another dict back.
        result = hook(module, found, prefix, {"version": module._version})  # noqa: SLF001
        found = found if result is None else result
    return found


def _overrides(module: nn.Module, name: str) -> bool:
    """Whether a module's class, or the module itself, has a method of its own."""
    return getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module)


def _collect_own(module: nn.Module, prefix: str, found: _Found, sharded: _Sharded) -> None:
    for name, param in module._parameters.items():  # noqa: SLF001
        if param is not None:
            own = sharded.get((id(module), name), param) if sharded else param
            _put(found, prefix + name, own)
    hidden = module._non_persistent_buffers_set  # noqa: SLF001
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None and name not in hidden:
            _put(found, prefix + name, buffer)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        found[prefix + EXTRA_STATE_KEY] = module.get_extra_state()


def _put(found: _Found, key: str, value: torch.Tensor) -> None:
    if found.get(key, value) is not value:
        fault = Unsupported(value, "and another tensor of the module has the same key: rename one")
        fault.keys.append(key)
        raise fault
    found[key] = value


def _refuse_unsharded(modules: Iterable[nn.Module], sharded: _Sharded) -> None:
    """A module's own code would read gathered parameters, or reshard them."""
    for module in modules if sharded else ():
        if any((id(module), name) in sharded for name in module._parameters):  # noqa: SLF001
            raise Unsupported(
                module,
                "which FSDP2 has unsharded at the moment and which saves itself by its own code; "
                "call reshard() on it before save",
            )
