"""One digest of everything that a rank carries from one step to the next.

Two ranks that went through the same training have the same digest; a difference in one bit, in a
key's type or in the order of a container gives another. It shares no code with the library's own
snapshots on purpose: it judges them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states that training draws from: torch's, numpy's and Python's."""
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the loader draws from it
        "python": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def state_digest(state: Mapping[str, Any]) -> str:
    """Return the xxh3-128 digest, as hexadecimal, over names, types and bytes of a nested state.

    Objects with ``state_dict`` are asked for it; of a DTensor the local shard counts.

    Raises:
        TypeError: a value of a kind that a training state does not have.
    """
    hasher = xxhash.xxh3_128()
    _feed(hasher, "", state)
    return hasher.hexdigest()


def _feed(hasher: xxhash.xxh3_128, path: str, value: Any) -> None:
    if isinstance(value, Mapping):
        _feed_text(hasher, path, f"{type(value).__name__} of {len(value)}")
        for key, item in value.items():
            _feed(hasher, f"{path}/{key!r}", item)
    elif isinstance(value, list | tuple):
        _feed_text(hasher, path, f"{type(value).__name__} of {len(value)}")
        for index, item in enumerate(value):
            _feed(hasher, f"{path}/{index}", item)
    elif isinstance(value, Tensor | np.ndarray):
        _feed_array(hasher, path, value)
    elif callable(getattr(value, "state_dict", None)):
        _feed(hasher, path, value.state_dict())
    else:
        _feed_text(hasher, path, _scalar_text(path, value))


def _feed_text(hasher: xxhash.xxh3_128, path: str, text: str) -> None:
    hasher.update(f"{path}={text}\n".encode())


def _feed_array(
    hasher: xxhash.xxh3_128, path: str, value: Tensor | np.ndarray[Any, np.dtype[Any]]
) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    _feed_text(hasher, path, f"{value.dtype} {tuple(value.shape)}")
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        value = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    hasher.update(np.ascontiguousarray(value).tobytes())


def _scalar_text(path: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{type(value).__name__} {value.hex()}"
    if value is None or isinstance(value, bool | int | str | bytes):
        return f"{type(value).__name__} {value!r}"
    raise TypeError(
        f"no digest of {path}: a {type(value).__name__} is not part of a training state"
    )
