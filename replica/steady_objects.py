"""What of an optimizer decides the text that is kept for it, and its tensors.

It is looked at through its own attributes, without `state_dict()`: the same facts mean the same
keys in the same order. One that says its state by code of its own, or that somebody hooked into,
is not looked at here: `Changed` leaves it to the whole walk, which asks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from replica.torch_private import is_stock_saver

_STATES: frozenset[type] = frozenset({dict, defaultdict})


class Changed(Exception):
    """What is read is not as it was, or not of a kind that is known here."""


@dataclass(frozen=True)
class OptimizerLook:
    """One look at an optimizer."""

    numbers: list[int]
    """Of the parameters that have state, in its order, as `state_dict()` numbers them."""
    keys: list[tuple[str, ...]]
    """Of the state of each."""
    values: list[Any]
    """Under those keys, one parameter after another."""
    groups: list[dict[str, Any]]
    """What `state_dict()` has as "param_groups"."""


def look_at_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerLook:
    """What `state_dict()` would be made of. Raises `Changed` for code and hooks of others."""
    groups, state = optimizer.param_groups, optimizer.state
    if not is_stock_saver(optimizer) or type(groups) is not list or type(state) not in _STATES:
        raise Changed
    number_of: dict[int, int] = {}
    packed, start = [], 0
    for group in groups:
        if type(group) is not dict or type(group.get("params")) is not list:
            raise Changed
        params = group["params"]
        # As torch numbers them: of one that is twice in a group the last place counts, of one that
        # is in two groups the first.
        here = {id(param): number for number, param in enumerate(params, start)}
        number_of = here | number_of
        start += len(params)
        rest = {key: value for key, value in group.items() if key != "params"}
        packed.append({**rest, "params": [number_of[id(param)] for param in params]})
    numbers = [number_of.get(id(param), -1) for param in state]
    kept = list(state.values())
    if -1 in numbers or not {dict}.issuperset(map(type, kept)):
        raise Changed
    if not {str}.issuperset(map(type, chain.from_iterable(kept))):
        raise Changed
    values = list(chain.from_iterable(map(dict.values, kept)))
    return OptimizerLook(numbers, list(map(tuple, kept)), values, packed)
