"""Capture a state into a fresh buffer, load it into another: what the snapshot's tests share."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import torch

from replica.image import ShardHeader
from replica.snapshot import Snapshot

HEADER = ShardHeader(job="job", epoch=2, step=7, generation="ab" * 16, owner=1, world=3)


def image_of(state, *, random_states=False, header=HEADER):
    """Return uint8[shard_bytes], the image of a state without its pad."""
    snapshot = Snapshot(state, random_states=random_states)
    plan = snapshot.plan(header.owner, self_check=True)
    buffer = np.full(plan.capacity_bytes, 0xEE, np.uint8)
    return buffer[: snapshot.capture_into(buffer, header)]


def load(image, state, *, random_states=False):
    """Load an image, given as read-only bytes, into a live state."""
    given = image.copy()
    given.flags.writeable = False
    Snapshot(state, random_states=random_states).prepare(given).commit()


def returned(value):
    """Give what comes back when a value is saved and nothing is there to load it into."""
    state = {"box": {}}
    load(image_of({"box": {"value": value}}), state)
    return state["box"]["value"]


def bits(value):
    """Compare tensors by this: dtype, shape and the bytes of all elements, in C order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element may have any stride, and view() wants 1.
    flat = flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat
    return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()


def header_of(image):
    """Parse the header as any reader of safetensors would."""
    (length,) = struct.unpack("<Q", image[:8].tobytes())
    return json.loads(image[8 : 8 + length].tobytes())


def with_header(image, members, *, length=None):
    """Return an image with other header members, and the data of the old one behind them."""
    (old,) = struct.unpack("<Q", image[:8].tobytes())
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    text = text.ljust(old)
    prefix = struct.pack("<Q", len(text) if length is None else length)
    return np.frombuffer(prefix + text + image[8 + old :].tobytes(), np.uint8)


def tree_of(image):
    """Give the tree of an image as JSON."""
    start, stop = header_of(image)["planaria.tree"]["data_offsets"]
    (length,) = struct.unpack("<Q", image[:8].tobytes())
    return json.loads(image[8 + length + start : 8 + length + stop].tobytes())


def with_tree(image, tree):
    """Return an image with another tree, whose length the header declares."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    members = header_of(image)
    start = members["planaria.tree"]["data_offsets"][0]
    members["planaria.tree"]["data_offsets"][1] = start + len(text)
    members["planaria.tree"]["shape"] = [len(text)]
    members["planaria.pad"]["data_offsets"] = [start + len(text)] * 2
    members["planaria.pad"]["shape"] = [0]
    (length,) = struct.unpack("<Q", image[:8].tobytes())
    kept = image[: 8 + length + start].tobytes() + text
    return with_header(np.frombuffer(kept, np.uint8), members)


def header_at(step):
    """Give a header of another step."""
    return replace(HEADER, step=step)
