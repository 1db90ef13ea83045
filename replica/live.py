"""Live tensors as targets of a restore: do they fit, and how are they filled."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from replica.dtypes import carrier, dtype_name
from replica.errors import StateError
from replica.fresh import SpecFacts, TensorFacts
from replica.leaves import overlaps_itself, unexpanded
from replica.scalars import only_scalars
from replica.state import MODULE, OPTIMIZER, kind_of, module_state
from replica.tables import mesh_signature, placement_names
from replica.torch_private import DTensor, local_of


def live_tensors(value: object, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor of a live state, without asking loaders or schedulers for theirs."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | deque):
        inner = () if only_scalars(value) else value
    elif kind_of(value) == MODULE:
        inner = module_state(value).values()  # type: ignore[arg-type]
    elif kind_of(value) == OPTIMIZER:
        inner = (value.param_groups, *value.state.values())  # type: ignore[attr-defined]
    for item in inner:
        yield from live_tensors(item, seen)


def holds_live(value: object) -> bool:
    """Whether a value is or contains a tensor or a state object."""
    if isinstance(value, torch.Tensor) or kind_of(value) is not None:
        return True
    if isinstance(value, dict):
        return any(map(holds_live, value.values()))
    if not isinstance(value, list | tuple | deque | set | frozenset):
        return False
    return not only_scalars(value) and any(map(holds_live, value))


class LiveMeshes:
    """The device meshes of the live state, found by the signature that an image records."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._meshes: dict[str, Any] = {}
        self._placements: dict[str, Placement] = {repr(Replicate()): Replicate()}
        for value in tensors:
            if isinstance(value, DTensor):
                mesh = value.device_mesh
                self._meshes.setdefault(json.dumps(mesh_signature(mesh)), mesh)
                self._placements.update((repr(place), place) for place in value.placements)

    @property
    def meshes(self) -> list[Any]:
        """All of them, in the order in which they were met."""
        return list(self._meshes.values())

    def rebuild(self, local: torch.Tensor, spec: SpecFacts) -> DTensor:
        """A DTensor around a local shard; `StateError` where its mesh is not in the live state."""
        mesh = self._meshes.get(json.dumps(spec.mesh))
        if mesh is None:
            raise StateError(
                f"a DTensor was saved on device mesh {spec.mesh}, and no live parameter lies on "
                "such a mesh; build the model with the same mesh before restore"
            )
        shards: list[Placement] = [Shard(dim) for dim in range(len(spec.shape))]
        known = {**{repr(place): place for place in shards}, **self._placements}
        unknown = [text for text in spec.placements if text not in known]
        if unknown or len(spec.placements) != mesh.ndim:
            raise StateError(
                f"a DTensor was saved with placements {list(spec.placements)}, which are not those "
                f"of a live parameter on mesh {spec.mesh}"
            )
        return DTensor.from_local(
            local,
            mesh,
            [known[text] for text in spec.placements],
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=spec.strides,
        )


def tensor_mismatch(live: torch.Tensor, facts: TensorFacts) -> tuple[str, bool] | None:
    """Why a saved tensor cannot be loaded into a live one, None if it can.

    True beside it: only its dtype, its shape or how it overlaps itself, the same on all ranks, is
    another, so that the live tensor may be left as it is where the caller asked for that.
    """
    if isinstance(live, DTensor) != (facts.spec is not None):
        kind = "a DTensor" if facts.spec is not None else "a plain tensor"
        return f"saved as {kind}, is a {type(live).__name__}", False
    if live.dtype != facts.dtype:
        return f"saved as {dtype_name(facts.dtype)}, is {dtype_name(live.dtype)}", True
    if tuple(live.shape) != facts.full_shape:
        return f"saved with shape {list(facts.full_shape)}, has {list(live.shape)}", True
    if isinstance(live, DTensor) and facts.spec is not None:
        why = _spec_mismatch(live, facts, facts.spec)
        if why is not None:
            return why, False
    why = _overlap_mismatch(local_of(live), facts)
    return None if why is None else (why, True)


def _overlap_mismatch(local: torch.Tensor, facts: TensorFacts) -> str | None:
    """Why a tensor of which some elements lie at one place cannot hold the saved values, if so.

    It can where the saved elements lay at one place too: they are sure to be equal.
    """
    if local.is_contiguous():
        return None
    rows = zip(local.shape, local.stride(), facts.strides, strict=True)
    steps = [(now, then) for size, now, then in rows if size > 1]
    repeats = any(now == 0 != then for now, then in steps)
    if all(now == then for now, then in steps) or not (repeats or overlaps_itself(local)):
        return None
    return (
        f"saved with strides {list(facts.strides)}, has {list(local.stride())}, so that some of "
        "its elements are one in memory and cannot hold values of their own: make it a clone() "
        "of itself before restore"
    )


def _spec_mismatch(live: DTensor, facts: TensorFacts, spec: SpecFacts) -> str | None:
    placements = placement_names(live)
    if placements != list(spec.placements):
        return f"saved with placements {list(spec.placements)}, has {placements}"
    mesh = mesh_signature(live.device_mesh)
    if mesh != spec.mesh:
        return f"saved on device mesh {spec.mesh}, is on {mesh}"
    if tuple(live.stride()) != spec.strides:
        return f"saved with strides {list(spec.strides)}, has {list(live.stride())}"
    local = local_of(live)
    if tuple(local.shape) != facts.shape:
        return f"saved with a local shard {list(facts.shape)}, has {list(local.shape)}"
    return None


def copy_into(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Fill a live local tensor, whatever its layout, with saved values of equal shape and dtype."""
    # A tensor made in inference mode may be changed in that mode only.
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        # `copy_` refuses repeated elements. Others at one place it writes one after another, and
        # `tensor_mismatch` has seen to it that they are equal.
        target, source = unexpanded(live), unexpanded(saved)
        if source.shape != target.shape:
            source = source.expand(target.shape)
        if carrier(target.dtype) is not target.dtype:
            target, source = target.view(carrier(target.dtype)), source.view(carrier(target.dtype))
        target.copy_(source)
