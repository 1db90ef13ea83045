"""Small tensors copied by address: by whichever way, every byte arrives and no other is touched."""

from __future__ import annotations

import numpy as np
import pytest

from replica import gather
from replica.gather import Gathers, Small

SIZES = (1, 2, 3, 4, 8, 16, 40, 300)


def random_smalls(rng, source, *, odd_sources, odd_targets):
    """Return smalls, their addresses and what each is to bring."""
    base = source.__array_interface__["data"][0]
    smalls, pointers, wanted, start = [], [], [], 0
    for position in range(int(rng.integers(1, 200))):
        size = int(rng.choice(SIZES))
        offset = int(rng.integers(source.nbytes - size))
        offset -= 0 if odd_sources else offset % 8
        start += 0 if odd_targets else -start % 8
        smalls.append(Small(start, size, position))
        pointers.append(base + offset)
        wanted.append(source[offset : offset + size])
        start += size
    return smalls, pointers, wanted, start


@pytest.mark.parametrize("odd_sources", [False, True])
@pytest.mark.parametrize("odd_targets", [False, True])
@pytest.mark.parametrize("way", ["loop", "system call", "one by one"])
def test_every_byte_arrives_and_no_other_is_touched(
    way, odd_targets, odd_sources, rng, monkeypatch
):
    """Numbers and longer ones, at addresses of any alignment, in each of the ways."""
    if way != "loop":
        monkeypatch.setattr(gather, "copy_loop", lambda: None)
    if way == "one by one":
        monkeypatch.setattr(gather, "_read", None)
    source = rng.integers(0, 256, 1 << 16, np.uint8)
    for _ in range(20):
        smalls, pointers, wanted, end = random_smalls(
            rng, source, odd_sources=odd_sources, odd_targets=odd_targets
        )
        buffer = np.full(end + 5, 0xEE, np.uint8)
        twin = buffer.copy()
        for small, found in zip(smalls, wanted, strict=True):
            twin[small.start : small.start + small.nbytes] = found
        Gathers(smalls).copy(np.array(pointers, np.uint64), buffer, source)
        assert buffer.tobytes() == twin.tobytes()


def test_far_apart(monkeypatch):
    """Numbers in two mappings: what lies between them, mapped or not, is not read."""
    monkeypatch.setattr(gather, "copy_loop", lambda: None)
    values = [np.full(1, index, np.uint32) for index in range(4)]
    far = np.zeros(1 << 28, np.uint8)[-4:].view(np.uint32)  # a mapping of its own
    far[:] = 9
    arrays = [*values, far]
    pointers = [array.__array_interface__["data"][0] for array in arrays]
    buffer = np.zeros(20, np.uint8)
    smalls = [Small(4 * at, 4, at) for at in range(5)]
    Gathers(smalls).copy(np.array(pointers, np.uint64), buffer, arrays)
    assert buffer.view(np.uint32).tolist() == [0, 1, 2, 3, 9]
