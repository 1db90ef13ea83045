"""Ranks that hold unlike amounts, or unlike values under one name: each gets back its own."""

from __future__ import annotations

import copy

import pytest
import torch

import replica
from replica.group import MemoryGroup
from tests.replica.inprocess import all_of, outcomes

MIB = 1 << 20


def there_and_back(arena_dir, states, redundancy, lost=()):
    """Save a state per rank, each on a node of its own; lose nodes; restore into `fresh` states.

    Returns what every rank has then. `states` are (saved, fresh) by rank.
    """
    world = len(states)

    def run(step):
        groups = list(MemoryGroup.make(world))

        def body(rank):
            # A lost node comes back under another name, with nothing.
            node = f"node{rank}" + ("-new" if step is None and rank in lost else "")
            where = arena_dir / node
            where.mkdir(exist_ok=True)
            live = states[rank][step is None]
            with replica.Checkpointer(
                live,
                job="job",
                group=groups[rank],
                node_id=node,
                arena_dir=str(where),
                redundancy=redundancy,
                random_states=False,
            ) as ckpt:
                if step is None:
                    assert ckpt.restore() == 1
                else:
                    ckpt.save(step).wait("committed", 60.0)
            return live

        return all_of(outcomes(world, body, 120.0))

    run(1)
    return run(None)


def pair(state):
    """Return a state and one like it with other values, to be restored into."""
    fresh = copy.deepcopy(state)
    for value in fresh.values():
        if isinstance(value, torch.Tensor):
            value.fill_(9)
    return state, {key: 9 if isinstance(value, int) else value for key, value in fresh.items()}


def same(one, other):
    """Compare two flat states."""
    return list(one) == list(other) and all(
        torch.equal(one[key], other[key])
        if isinstance(one[key], torch.Tensor)
        else one[key] == other[key]
        for key in one
    )


def rows(rank):
    """Return rank's part of a tensor of 3 rows over 8 ranks, as torch.chunk deals them."""
    chunks = torch.arange(6.0).reshape(3, 2).chunk(8)
    return chunks[rank].clone() if rank < len(chunks) else torch.zeros(0, 2)


def test_uneven_and_empty_ranks(arena_dir):
    """3 rows over 8 ranks, one without a state, one of plain values, one of empty tensors.

    The last rank has 100 times more than the others. Two nodes are lost, the empty one too.
    """
    states = [
        {"w": rows(rank), "rank": rank, "more": torch.full((250,), rank)} for rank in range(8)
    ]
    states[5] = {}
    states[6] = {"only": [1, 2.5, "x"], "rank": 6}
    states[7] = {"none": torch.zeros(0), "cube": torch.zeros(3, 0, 5, dtype=torch.int8)}
    states[4] = {"more": torch.arange(25_000.0), "rank": 4}
    pairs = [pair(state) for state in states]
    found = there_and_back(arena_dir, pairs, "stripe:6+1", lost=(4, 5))
    assert all(same(one, saved) for one, (saved, _) in zip(found, pairs, strict=True))


def test_shards_of_nothing_a_byte_and_many_in_one_group(arena_dir):
    """Sizes 0, 1 byte and 64 MB in one coding group: any lost node's shard comes back."""
    states = [
        {},
        {"byte": torch.tensor([7], dtype=torch.uint8)},
        {"large": torch.arange(16 * MIB, dtype=torch.int32)},
        {"odd": torch.arange(12_345, dtype=torch.int16)},
    ]
    pairs = [pair(state) for state in states]
    found = there_and_back(arena_dir, pairs, "stripe:2+1", lost=(1, 2))
    assert all(same(one, saved) for one, (saved, _) in zip(found, pairs, strict=True))


def test_one_name_has_a_value_of_its_own_on_each_rank(arena_dir):
    """The same names hold other values on each rank, one of them only on rank 2.

    A copy that differs by one bit on rank 3 comes back with that bit: nothing is taken for a
    replica of another.
    """
    shared = torch.arange(100.0)
    nearly = shared.clone()
    nearly.view(torch.int32)[50] ^= 1
    states = [
        {
            "weight": torch.tensor([rank]),
            "cfg": rank,
            "replica": nearly if rank == 3 else shared.clone(),
            **({"only": ("here", rank)} if rank == 2 else {}),
        }
        for rank in range(4)
    ]
    pairs = [pair(state) for state in states]
    found = there_and_back(arena_dir, pairs, "copies:1", lost=(1,))
    for rank, one in enumerate(found):
        assert one["weight"].tolist() == [rank]
        assert one["cfg"] == rank
        assert ("only" in one) == (rank == 2)
        assert torch.equal(
            one["replica"].view(torch.int32), states[rank]["replica"].view(torch.int32)
        )
    assert found[2]["only"] == ("here", 2)


@pytest.mark.parametrize("state", [{}, {"n": 1}, {"t": torch.zeros(0, 3)}])
def test_a_job_of_ranks_with_next_to_nothing(arena_dir, state):
    """Every rank is empty, has only a number, or only a tensor without elements."""
    pairs = [pair(copy.deepcopy(state)) for _ in range(2)]
    found = there_and_back(arena_dir, pairs, "copies:1", lost=(0,))
    assert all(same(one, saved) for one, (saved, _) in zip(found, pairs, strict=True))
