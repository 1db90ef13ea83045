"""FSDP2 modules: sharded state in, sharded state out, and nothing resharded by looking."""

from __future__ import annotations

import pytest
import torch

from replica import torch_private
from tests.replica.pool import all_say_ok

WORLD = 2


def test_a_torch_without_the_private_names_is_named(monkeypatch):
    """One clear error says what is missing: a name taken away, then the probe run again."""
    torch_private._probe()
    monkeypatch.delattr(torch, "_neg_view")
    monkeypatch.delattr(torch_private.FSDPModule, "_get_fsdp_state")
    with pytest.raises(ImportError, match=r"FSDPModule._get_fsdp_state, torch._neg_view, which"):
        torch_private._probe()


@pytest.mark.real
def test_fsdp2_state_comes_back_and_stays_as_found(tmp_path):
    """Two gloo processes train, capture, restore and compare shards; see fsdp2_worker.py."""
    all_say_ok("tests.replica.fsdp2_worker", WORLD, tmp_path / "store", cwd=tmp_path)
