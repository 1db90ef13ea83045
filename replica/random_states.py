"""The random states of this process: Python, numpy, torch on the CPU and on CUDA devices.

Reading them draws no number. CUDA is asked only when the process uses it already, since the first
question would set up a context. DTensor's random tracker draws from the device's own generator, so
its state is that one's; what is kept besides is that there is a tracker, because one that the first
draw makes would begin by giving every rank the random state of rank 0.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from replica.errors import StateError
from replica.image import ImageError
from replica.torch_private import rng_region, set_rng_region
from replica.tree_reader import NO_VALUE

log = logging.getLogger("planaria")

_NAMES = {"python", "numpy", "torch", "cuda", "cuda_device", "dtensor"}
_POSITION_MAX = {"MT19937": 624, "Philox": 4}
"""Words that a generator keeps; its position is an index into them."""


def capture_random_states() -> dict[str, object]:
    """Plain values (no tensors) that hold every random state of this process."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, array("I", words).tobytes(), gauss),
        # Without legacy=True numpy's tuple would not say which generator it belongs to.
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "torch": _bytes(torch.get_rng_state()),
        **_cuda_states(),
        "dtensor": rng_region(),
    }


def prepare_random_states(saved: object, meshes: Iterable[DeviceMesh] = ()) -> Callable[[], None]:
    """Check saved states on generators of our own; the returned call sets this process's.

    DTensor's tracker, where the saving process had one and this has none, is made on one of
    `meshes`. `StateError` when the states are damaged or belong to other generators than this
    process has.
    """
    # Images of older versions lack the last two.
    if type(saved) is not dict or set(saved) | {"cuda_device", "dtensor"} != _NAMES:
        raise ImageError("shard image: random states of another form")
    try:
        version, words, gauss = saved["python"]
        python = (version, tuple(array("I", words)), gauss)
        random.Random().setstate(python)  # noqa: S311
        numpy_state = _checked_numpy(saved["numpy"])
        cpu = _tensor(saved["torch"])
        torch.Generator().set_state(cpu)
        cuda = [_tensor(state) for state in saved["cuda"]]
        device, region = saved.get("cuda_device"), saved.get("dtensor")
        _check_facts(device, region, len(cuda))
    except StateError:
        raise
    except NO_VALUE as fault:
        raise ImageError(f"shard image: damaged random states: {fault}") from fault
    _check_cuda(len(cuda))
    start = partial(_set_tracker, region, [one for one in meshes if one.device_type != "cpu"])

    def restore() -> None:
        start()  # first, since it seeds torch's generators
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(cpu)
        for place, state in zip(_cuda_places(len(cuda), device), cuda, strict=True):
            torch.cuda.set_rng_state(state, place)

    return restore


def _cuda_states() -> dict[str, object]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"cuda": [], "cuda_device": None}
    devices = range(torch.cuda.device_count())
    states = [_bytes(torch.cuda.get_rng_state(device)) for device in devices]
    return {"cuda": states, "cuda_device": torch.cuda.current_device()}


def _cuda_places(count: int, device: int | None) -> list[int]:
    """The device for each saved state: a rank that now uses another one takes its stream along."""
    places = list(range(count))
    if device is not None:
        here = torch.cuda.current_device()
        if here < count:
            places[here] = device
        places[device] = here
    return places


def _check_facts(device: object, region: object, count: int) -> None:
    if device is not None and (type(device) is not int or not 0 <= device < count):
        raise ImageError(f"shard image: random states of {count} CUDA devices, used: {device!r}")
    if region is not None and type(region) is not bool:
        raise ImageError(f"shard image: DTensor's random tracker is {region!r}")


def _set_tracker(region: bool | None, meshes: list[DeviceMesh]) -> None:  # noqa: FBT001 - as saved
    if region is None or set_rng_region(meshes[0] if meshes else None, enabled=region):
        return
    log.warning(
        "the run that saved had a random tracker of DTensor and no live DTensor lies on a device "
        "mesh to make one on: draws of DTensors will begin with the random state of rank 0"
    )


def _check_cuda(count: int) -> None:
    here = torch.cuda.device_count() if count else 0
    if count > here:
        raise StateError(
            f"random states of {count} CUDA devices were saved, and this process sees {here}; "
            "start it with as many visible devices, or save with random_states=False"
        )


def _checked_numpy(state: Any) -> dict[str, Any]:
    if type(state) is not dict:
        raise ImageError("shard image: numpy's random state of another form")
    live = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
    if state["bit_generator"] != live:
        raise StateError(
            f"numpy's global generator was {state['bit_generator']!r} when saved and is {live!r} "
            "here; set it up as the run that saved did"
        )
    check_numpy_position(state)
    if live == "MT19937":
        np.random.RandomState(0).set_state(state)
    return state


def check_numpy_position(state: Any) -> None:
    """Refuse a position outside of a generator's words: numpy would read there without a look."""
    name = state["bit_generator"]
    if name not in _POSITION_MAX:
        return
    place = state["state"]["pos"] if name == "MT19937" else state["buffer_pos"]
    if type(place) is not int or not 0 <= place <= _POSITION_MAX[name]:
        raise ImageError(f"numpy's {name} stands at {place!r}, expected 0 to {_POSITION_MAX[name]}")


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: object) -> torch.Tensor:
    if type(state) is not bytes:
        raise ImageError("shard image: torch's random state is no byte string")
    made = torch.empty(len(state), dtype=torch.uint8, device="cpu")
    made.numpy()[:] = np.frombuffer(state, np.uint8)
    return made
