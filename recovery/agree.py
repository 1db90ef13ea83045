"""One small agreement over the store: each rank says a value, all read the merged ones."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from recovery.actions import Await, Got, Publish
from recovery.tree import GatherFailed, Merge, gather, silent_ranks


def agree_session(
    prefix: str, rank: int, world: int, value: bytes, merge: Merge
) -> Generator[Any, Any, bytes]:
    """The merged values of all ranks. Raises GatherFailed naming the ranks that did not speak.

    When all spoke and the result is not there, that is rank 0, which writes it.
    """
    merged = yield from gather(f"{prefix}/value", rank, world, value, merge)
    if merged is not None:
        yield Publish(f"{prefix}/result", merged)
        return merged
    answer = yield Await((f"{prefix}/result",), f"the result of {prefix}")
    if isinstance(answer, Got):
        return answer.values[f"{prefix}/result"]
    raise GatherFailed((yield from silent_ranks(f"{prefix}/value", world)), None)
