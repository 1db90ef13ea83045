"""One small agreement over the store: each rank says a value, all read the merged ones."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from recovery.actions import Await, Got, Publish
from recovery.tree import (
    GatherFailed,
    GatherSpoiled,
    Merge,
    check_spoiled,
    gather,
    silent_ranks,
    spoil,
)


def agree_session(
    prefix: str, rank: int, world: int, value: bytes, merge: Merge
) -> Generator[Any, Any, bytes]:
    """The merged values of all ranks. Raises GatherFailed naming the ranks that did not speak.

    When all spoke and the result is not there, that is rank 0, which writes it. Raises
    GatherSpoiled on every rank when one said what ``merge`` cannot take.
    """
    try:
        merged = yield from gather(f"{prefix}/value", rank, world, value, merge)
    except GatherSpoiled as spoiled:
        yield Publish(f"{prefix}/result", spoil(str(spoiled)))
        raise
    if merged is not None:
        yield Publish(f"{prefix}/result", merged)
        return merged
    answer = yield Await((f"{prefix}/result",), f"the result of {prefix}")
    if isinstance(answer, Got):
        result: bytes = answer.values[f"{prefix}/result"]
        check_spoiled(result)
        return result
    raise GatherFailed((yield from silent_ranks(f"{prefix}/value", world)), None)
