"""The constant members of a tree: each leaf with the place of its bytes, DTensor specs, meshes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replica.dtypes import dtype_name
from replica.leaves import Home, LeafList, is_fortran
from replica.numpy_types import describe
from replica.torch_private import DTensor, shard_order
from replica.tree import Node

TABLE_FORMAT = 1
_signatures: dict[int, tuple[weakref.ref[Any], Node]] = {}
CONJ, NEG = 1, 2
"""Flags of a tensor in a shared stretch of memory, whose bytes are kept as they lie."""


def tables_text(
    leaves: LeafList, homes: tuple[Home, ...], blocks: list[int], plain: dict[int, int]
) -> str:
    """Members of a JSON object. `homes` are the tensors', `blocks` gives the entry of each block.

    `plain` gives the entry of each leaf that is no tensor.
    """
    specs: dict[str, int] = {}
    meshes: dict[str, int] = {}
    spec_of = {
        leaf: _number(specs, _spec_row(whole, meshes)) for leaf, whole in leaves.wholes.items()
    }
    home_of = dict(zip(leaves.tensors, homes, strict=True))
    rows = []
    for index, value in enumerate(leaves.values):
        if isinstance(value, torch.Tensor):
            home = home_of[index]
            rows.append(_tensor_row(value, home, blocks[home.block], spec_of.get(index, -1)))
        elif isinstance(value, np.ndarray):
            descr = describe(value.dtype)
            rows.append(["a", plain[index], descr, list(value.shape), is_fortran(value)])
        else:
            rows.append(["b", plain[index]])
    text = json.dumps(rows, separators=(",", ":"))
    return (
        f'"format":{TABLE_FORMAT},"leaves":{text},'
        f'"specs":[{",".join(specs)}],"meshes":[{",".join(meshes)}]'
    )


def _tensor_row(value: torch.Tensor, home: Home, entry: int, spec: int) -> list[Node]:
    # A packed entry holds the values as they are seen, a stretch of memory what lies there.
    flags = CONJ * value.is_conj() + NEG * value.is_neg() if home.offset_bytes >= 0 else 0
    return [
        "t",
        entry,
        dtype_name(value.dtype),
        list(value.shape),
        list(value.stride()),
        home.offset_bytes,
        flags,
        value.device.type,
        spec,
    ]


def _number(rows: dict[str, int], row: Node) -> int:
    return rows.setdefault(json.dumps(row, separators=(",", ":")), len(rows))


def _spec_row(whole: DTensor, meshes: dict[str, int]) -> Node:
    mesh = _number(meshes, mesh_signature(whole.device_mesh))
    return [list(whole.shape), list(whole.stride()), placement_names(whole), mesh]


def placement_names(whole: DTensor) -> list[str]:
    """Placements as text, in mesh order; one more for an order of sharding that is another.

    No saved DTensor has that one, so a live one that has it is taken for none of them.
    """
    order = shard_order(whole)
    return [*map(repr, whole.placements), *([] if order is None else [order])]


def mesh_signature(mesh: Any) -> Node:
    """What tells one device mesh from another: ranks, dimension names, device type.

    Not to be changed by the caller: to make it takes longer than all else about a DTensor, and
    thousands of them lie on one mesh, which never changes.
    """
    known = _signatures.get(id(mesh))
    if known is None or known[0]() is not mesh:
        names = mesh.mesh_dim_names
        made = [mesh.mesh.tolist(), None if names is None else list(names), mesh.device_type]
        known = _signatures[id(mesh)] = (weakref.ref(mesh, _forget(id(mesh))), made)
    return known[1]


def _forget(number: int) -> Callable[[object], object]:
    return lambda _: _signatures.pop(number, None)
