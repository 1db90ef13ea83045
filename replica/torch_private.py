"""The private names of torch that a snapshot needs, all in this one file and probed at import.

FSDP2 has no public way to read the sharded parameters of a module that is unsharded at the moment:
`state_dict()` reshards it, which would change the live state. DTensor's public `to_local()` builds
an autograd node and costs ten times as much as its attribute. DTensor's random tracker is public by
its names and not by its module.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

try:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import _random as dtensor_random
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
except ImportError as fault:
    raise ImportError(
        f"planaria reads sharded parameters and DTensor's random tracker through torch's own "
        f"modules, which torch {torch.__version__} does not have at the known places; "
        "install a torch version that planaria's metadata allows"
    ) from fault

__all__ = [
    "HOOKED_STEP",
    "SPEC_FIELDS",
    "DTensor",
    "FSDPModule",
    "FullyShardedDataParallel",
    "calls_step_hooks",
    "foreign_hooks",
    "in_backward",
    "in_compiled_code",
    "is_stock_loader",
    "is_stock_saver",
    "likeness",
    "local_and_spec",
    "local_of",
    "locals_of",
    "neg_view",
    "rng_region",
    "set_rng_region",
    "shard_order",
    "sharded_parameters",
    "specs_of",
    "state_dict_hooks",
    "transform",
    "uncompiled",
    "unreduced_gradients",
    "unsharded_groups",
    "untraced",
]

F = TypeVar("F", bound=Callable[..., Any])

uncompiled = _disable_dynamo
"""Neither a function nor what it calls becomes part of compiled code that calls it.

`torch.compiler.disable` does the same and would load the compiler for everybody who imports this.
"""


def _probe() -> None:
    """One clear error at import instead of an AttributeError in the middle of a run."""
    wanted: list[tuple[object, str]] = [
        (FSDPModule, "_get_fsdp_state"),
        (FSDPParamGroup, "is_sharded"),
        (FSDPParam, "sharded_param"),
        (FSDPParam, "unsharded_accumulated_grad"),
        (FSDPParam, "_unsharded_param"),
        (dtensor_random, "_rng_tracker"),
        (dtensor_random, "manual_seed"),
        (dtensor_random.OffsetBasedRNGTracker, "distribute_region_enabled"),
        (ParamModuleInfo, "shared_param_names"),
        (DTensor, "_local_tensor"),
        (DTensor, "_spec"),
        (torch, "_neg_view"),
        (torch.Tensor, "_post_accumulate_grad_hooks"),
        (torch._C._dynamo.eval_frame, "get_eval_frame_callback"),
        (torch._C, "_get_dispatch_mode"),
        (torch._C._functorch, "peek_interpreter_stack"),
        *((torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")),
        (nn.Module(), "_state_dict_hooks"),
        (nn.Module(), "_state_dict_pre_hooks"),
        (nn.Module(), "_non_persistent_buffers_set"),
        (torch.optim.Optimizer, "profile_hook_step"),
        (torch.optim.Optimizer, "_optimizer_load_state_dict_pre_hooks"),
        (torch.optim.Optimizer, "_optimizer_load_state_dict_post_hooks"),
        (torch.optim.Optimizer, "_optimizer_state_dict_pre_hooks"),
        (torch.optim.Optimizer, "_optimizer_state_dict_post_hooks"),
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


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, any other tensor as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def locals_of(values: Iterable[DTensor]) -> list[torch.Tensor]:
    """The local shards of many, as `local_and_spec` has them."""
    return list(map(attrgetter("_local_tensor"), values))


def specs_of(values: Iterable[DTensor]) -> list[object]:
    """The specs of many, as `local_and_spec` has them."""
    return list(map(attrgetter("_spec"), values))


SPEC_FIELDS = (
    "mesh",
    "placements",
    "tensor_meta",
    *(["shard_order"] if "shard_order" in DTensorSpec.__dataclass_fields__ else []),
)
"""What a spec is made of; old torch has no `shard_order`."""


def shard_order(value: DTensor) -> str | None:
    """In which order its dimensions are sharded over the mesh; None for the mesh's own order.

    Two DTensors of equal placements hold other parts of the whole where this differs. Strided
    placements say it themselves; old torch knows no other order.
    """
    order = getattr(value._spec, "shard_order", None) or ()
    if all(list(dims) == sorted(dims) for _, dims in order):
        return None
    rows = [f"dimension {dim} over mesh dimensions {list(dims)}" for dim, dims in order]
    return f"in the order {', '.join(rows)}"


def likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A check whether as many others are like these; None where torch has none that is trusted.

    True only for tensors of the same classes, dtypes, layouts, devices, sizes, strides, conjugate
    and negative flags; false for some that are alike too, as where `requires_grad` has changed.
    It is what `torch.compile` guards its code with: one pass over memory instead of one per
    question. Holds no tensor.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or not _tells_apart(guards):
        return None
    return _guard(guards, tensors)


def _guard(guards: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    sizes = [list(value.size()) for value in tensors]
    strides = [list(value.stride()) for value in tensors]
    made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return made.check  # type: ignore[no-any-return]


@cache
def _tells_apart(guards: Any) -> bool:
    """Whether it sees every difference that matters here; a version of torch may have dropped one.

    Asked with small tensors once in a process.
    """
    one = torch.zeros(2, 3)
    number = torch.zeros(2, 3, dtype=torch.complex64)
    others = [
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        torch._neg_view(torch.zeros(2, 3)),
        nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    ]
    try:
        of_one, of_number = _guard(guards, [one]), _guard(guards, [number])
        return (
            of_one(torch.ones(2, 3))
            and of_number(number)
            and not of_number(number.conj())
            and not any(map(of_one, others))
        )
    except (TypeError, ValueError, RuntimeError, SystemError):
        return False  # its arguments have changed


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
    before = foreign_hooks(module._state_dict_pre_hooks.values())
    return before, list(module._state_dict_hooks.values())


def foreign_hooks(hooks: Iterable[Callable[..., None]]) -> list[Callable[..., None]]:
    """Those that are not FSDP2's own."""
    own = FSDPParamGroup.__module__
    return [hook for hook in hooks if getattr(hook, "__module__", None) != own]


def is_stock_saver(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `state_dict` is torch's own, with nobody hooked into it."""
    own = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    return (
        own
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
        and "state_dict" not in vars(optimizer)
    )


def is_stock_loader(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `load_state_dict` is torch's own, with nobody hooked into it."""
    hooks: list[Mapping[Any, Any]] = [
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    ]
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and not any(hooks) and "load_state_dict" not in vars(optimizer)


def rng_region() -> bool | None:
    """Whether DTensor's random tracker spreads a draw over the ranks; None without a tracker."""
    tracker = dtensor_random._rng_tracker
    return None if tracker is None else bool(tracker.distribute_region_enabled)


def set_rng_region(mesh: DeviceMesh | None, *, enabled: bool) -> bool:
    """Give DTensor's random tracker its setting; make one on `mesh` if there is none.

    A tracker that the first draw makes begins with a broadcast of rank 0's random state; this one
    does not. Making one seeds torch's generators, so their states are set after it. False: there
    is no tracker and no mesh to make it on.
    """
    if dtensor_random._rng_tracker is None:
        if mesh is None:
            return False
        dtensor_random.manual_seed(0, mesh)
    tracker = dtensor_random._rng_tracker
    if tracker is not None:
        tracker.distribute_region_enabled = enabled
    return tracker is not None


def unreduced_gradients(module: nn.Module) -> bool:
    """Whether FSDP2 keeps gradients of this module's own parameters that it has not reduced yet."""
    if not isinstance(module, FSDPModule):
        return False
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for param in group.fsdp_params[:2]:  # those of a group are reduced together
            whole = getattr(param, "_unsharded_param", None)
            if param.unsharded_accumulated_grad is not None:
                return True
            if whole is not None and whole.grad is not None:
                return True
    return False


def in_backward(param: torch.Tensor) -> bool:
    """Whether something is hooked to a parameter's gradient that may step in backward."""
    return bool(param._post_accumulate_grad_hooks) or hasattr(param, "_in_backward_optimizers")


def _step_codes() -> tuple[CodeType, CodeType]:
    """What all hooked steps of torch run, and what all those run that schedulers put around one."""

    class Plain(torch.optim.Optimizer):
        """Has what a scheduler asks for; a whole one would have the compiler imported."""

        def __init__(self) -> None:
            self.param_groups = [{"params": [], "lr": 0.0}]

    plain = Plain()
    torch.optim.lr_scheduler.LambdaLR(plain, float)
    hooked: Any = Plain.profile_hook_step(Plain.step)
    return hooked.__code__, vars(plain)["step"].__code__


HOOKED_STEP, _SCHEDULED_STEP = _step_codes()


def calls_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the hooks for all steps before it does anything else.

    So does what torch makes of every class's step, and what a scheduler puts around that in an
    optimizer. They are known by their code: `functools.wraps` copies whatever marks they carry to
    what somebody else puts around them.
    """
    of_class, own = type(optimizer).step, vars(optimizer).get("step")
    if not _runs(of_class, HOOKED_STEP):
        return False
    return own is None or (_runs(own, _SCHEDULED_STEP) and own.__wrapped__ is of_class)


def _runs(step: object, code: CodeType) -> bool:
    return isinstance(step, FunctionType) and step.__code__ is code


def untraced(function: F) -> F:
    """Not compiled, nor a part of what is: the compiler would try, and warn that it cannot."""
    torch._C._dynamo.eval_frame.set_code_exec_strategy(
        function.__code__,
        torch._C._dynamo.eval_frame._FrameExecStrategy(
            torch._C._dynamo.eval_frame._FrameAction.SKIP,
            torch._C._dynamo.eval_frame._FrameAction.DEFAULT,
        ),
    )
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@untraced
def in_compiled_code() -> bool:
    """Whether the caller runs inside of what `torch.compile` made, between two of its graphs too.

    While it is being traced `torch.compiler.is_compiling` says so, and nothing else does.
    """
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def transform() -> str:
    """Inside of what the caller is that has tensors written to later, or never; "" for nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    kinds = torch._C._TorchDispatchModeKey
    for kind in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL):
        mode = torch._C._get_dispatch_mode(kind)
        if mode is not None:
            return type(mode).__name__
    return ""
