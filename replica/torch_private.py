"""The private names of torch that a snapshot needs, all in this one file and probed at import.

FSDP2 has no public way to read the sharded parameters of a module that is unsharded at the moment:
`state_dict()` reshards it, which would change the live state. DTensor's public `to_local()` builds
an autograd node and costs ten times as much as its attribute.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

try:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError as fault:
    raise ImportError(
        f"planaria reads sharded parameters through torch's FSDPParamGroup, which torch "
        f"{torch.__version__} does not have at the known place; "
        "install a torch version that planaria's metadata allows"
    ) from fault

__all__ = [
    "DTensor",
    "FSDPModule",
    "FullyShardedDataParallel",
    "is_stock_loader",
    "local_and_spec",
    "neg_view",
    "sharded_parameters",
    "state_dict_hooks",
    "unsharded_groups",
]


def _probe() -> None:
    """One clear error at import instead of an AttributeError in the middle of a run."""
    wanted: list[tuple[object, str]] = [
        (FSDPModule, "_get_fsdp_state"),
        (FSDPParamGroup, "is_sharded"),
        (FSDPParam, "sharded_param"),
        (ParamModuleInfo, "shared_param_names"),
        (DTensor, "_local_tensor"),
        (DTensor, "_spec"),
        (torch, "_neg_view"),
        (nn.Module(), "_state_dict_hooks"),
        (nn.Module(), "_state_dict_pre_hooks"),
        (nn.Module(), "_non_persistent_buffers_set"),
        (torch.optim.Optimizer, "_optimizer_load_state_dict_pre_hooks"),
        (torch.optim.Optimizer, "_optimizer_load_state_dict_post_hooks"),
    ]
    missing = [
        f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        for owner, name in wanted
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", {})
    ]
    if missing:
        raise ImportError(
            f"planaria needs {', '.join(missing)}, which torch {torch.__version__} does not have; "
            "install a torch version that planaria's metadata allows"
        )


_probe()


def local_and_spec(value: DTensor) -> tuple[torch.Tensor, object]:
    """The local shard itself (no copy, no autograd) and the spec, which compares by value."""
    return value._local_tensor, value._spec


def neg_view(value: torch.Tensor) -> torch.Tensor:
    """The same memory with the negative bit flipped."""
    return torch._neg_view(value)


def unsharded_groups(modules: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """FSDP2 parameter groups of these modules that are not in their sharded state now."""
    found: dict[int, FSDPParamGroup] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if not group.is_sharded:
                    found[id(group)] = group
    return list(found.values())


def sharded_parameters(
    groups: Iterable[FSDPParamGroup],
) -> dict[tuple[int, str], nn.Parameter]:
    """(id of module, parameter name) -> the sharded parameter that FSDP2 keeps for it."""
    found: dict[tuple[int, str], nn.Parameter] = {}
    for group in groups:
        for param in group.fsdp_params:
            info = param._module_info
            found[id(info.module), info.param_name] = param.sharded_param
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[id(module), name] = param.sharded_param
    return found


def state_dict_hooks(
    module: nn.Module,
) -> tuple[list[Callable[..., None]], list[Callable[..., Any]]]:
    """What others hooked before and after this module's `state_dict`; FSDP2's own left out."""
    before = [
        hook
        for hook in module._state_dict_pre_hooks.values()
        if getattr(hook, "__module__", None) != FSDPParamGroup.__module__
    ]
    return before, list(module._state_dict_hooks.values())


def is_stock_loader(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `load_state_dict` is torch's own, with nobody hooked into it."""
    hooks: list[Mapping[Any, Any]] = [
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    ]
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and not any(hooks) and "load_state_dict" not in vars(optimizer)
