"""The default group of a script that a test has started."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def join(asked: dict) -> None:
    """Make the default group over the store at ``asked["port"]``."""
    client = dist.TCPStore(
        "127.0.0.1",
        asked["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    store = dist.PrefixStore(asked["prefix"], client)
    dist.init_process_group("gloo", store=store, rank=asked["rank"], world_size=asked["world"])
