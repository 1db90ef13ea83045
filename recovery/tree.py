"""A gather up a tree of ranks: none reads more than ``FANOUT`` keys, nothing is all-to-all.

A value that cannot be merged is not dropped and raises nowhere in between: it travels up in words,
so that rank 0 can tell all ranks whose it was.

Level 0 has one node per rank; node j of level l + 1 stands for nodes j * FANOUT ... of level l and
is worked by the lowest rank under it, so rank 0 works the root. Every rank publishes its value at
level 0; whoever works a node reads its children, merges and publishes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from recovery.actions import Await, Decided, Got, Missing, Publish
from recovery.errors import RecoveryError

FANOUT = 64
BLAMED_MAX = 16
"""So many late nodes of a level are looked into when ranks are to be named."""
WORD_BYTES_MAX = 1 << 28
"""What another process says is not parsed when it is longer."""

Merge = Callable[[Sequence[bytes]], bytes]
"""Makes one value of several; RecoveryError when one of them is not what it should be."""

_SPOILED = b"spoiled:"
_WORDS_MAX = 2000


@dataclass(frozen=True)
class Node:
    """Node ``index`` of ``level`` and the nodes under it, by their indices on the level below."""

    level: int
    index: int
    children: tuple[int, ...]


class GatherFailed(RecoveryError):
    """A gather ended early.

    ``missing`` names the ranks that were waited for; ``decided`` is a watched value.
    """

    def __init__(self, missing: tuple[int, ...], decided: bytes | None) -> None:
        super().__init__(f"no word from {name_ranks(missing)}" if missing else "decided elsewhere")
        self.missing = missing
        self.decided = decided


class GatherSpoiled(RecoveryError):
    """A gather has a value that is not what was asked for; the words name the rank."""


def nodes_worked_by(rank: int, world: int, fanout: int = FANOUT) -> tuple[Node, ...]:
    """The inner nodes that ``rank`` works, lowest level first."""
    found, level, width, stride = [], 0, world, 1
    while width > 1:
        level, stride, below = level + 1, stride * fanout, width
        width = -(-width // fanout)
        if rank % stride == 0:
            index = rank // stride
            found.append(
                Node(level, index, tuple(range(index * fanout, min((index + 1) * fanout, below))))
            )
    return tuple(found)


def key(prefix: str, level: int, index: int) -> str:
    """Store key under which the value of one node of the tree is published."""
    return f"{prefix}/{level}/{index}"


def gather(
    prefix: str,
    rank: int,
    world: int,
    value: bytes,
    merge: Merge,
    *,
    watch: str | None = None,
    moving_bytes: int = 0,
    fanout: int = FANOUT,
) -> Generator[Any, Any, bytes | None]:
    """Gather one value per rank; returns the merged value on rank 0, None elsewhere.

    Raises GatherFailed when the deadline passes or the watched key is set, and on rank 0
    GatherSpoiled when a rank's value could not be merged.
    """
    yield Publish(key(prefix, 0, rank), value)
    merged = value
    for node in nodes_worked_by(rank, world, fanout):
        keys = tuple(key(prefix, node.level - 1, child) for child in node.children)
        answer = yield Await(keys, f"{prefix} of level {node.level - 1}", watch, moving_bytes)
        if isinstance(answer, Missing):
            late = tuple(sorted(int(k.rsplit("/", 1)[1]) for k in answer.keys))
            missing = yield from _descend(prefix, node.level - 1, late, world, fanout)
            raise GatherFailed(missing, None)
        if isinstance(answer, Decided):
            raise GatherFailed((), answer.value)
        if not isinstance(answer, Got):
            raise TypeError(f"the driver answered an Await with {answer!r}")
        merged = _merged(node, [answer.values[k] for k in keys], merge, fanout)
        yield Publish(key(prefix, node.level, node.index), merged)
    if rank != 0:
        return None
    check_spoiled(merged)
    return merged


def spoil(reason: str) -> bytes:
    """A value that says why there is none; ``check_spoiled`` raises it again elsewhere."""
    return _SPOILED + encode_words(reason)


def check_spoiled(value: bytes) -> None:
    """Raise GatherSpoiled when ``value`` says that there is none."""
    if value.startswith(_SPOILED):
        raise GatherSpoiled(value.removeprefix(_SPOILED).decode("utf-8", "replace"))


def encode_words(text: str) -> bytes:
    """Words for the store, cut at a bound; what no UTF-8 can carry is shown as "?"."""
    return text[:_WORDS_MAX].encode("utf-8", "replace")


def _merged(node: Node, values: Sequence[bytes], merge: Merge, fanout: int) -> bytes:
    spoiled = next((value for value in values if value.startswith(_SPOILED)), None)
    if spoiled is not None:
        return spoiled
    try:
        return merge(values)
    except RecoveryError as error:
        words = f"some rank under node {node.index} of level {node.level}: {error}"
    for child, value in zip(node.children, values, strict=True):
        try:
            merge([value])
        except RecoveryError as error:
            worker = child * fanout ** (node.level - 1)
            return spoil(f"rank {worker}: {error}")
    return spoil(words)


def silent_ranks(
    prefix: str, world: int, fanout: int = FANOUT
) -> Generator[Any, Any, tuple[int, ...]]:
    """After a deadline: the ranks because of which a gather has not ended, rank 0 if none else."""
    level = len(nodes_worked_by(0, world, fanout))
    return (yield from _descend(prefix, level, (0,), world, fanout))


def _descend(
    prefix: str, level: int, late: tuple[int, ...], world: int, fanout: int
) -> Generator[Any, Any, tuple[int, ...]]:
    """The ranks that keep the nodes ``late`` of ``level`` waiting: below them, or working them."""
    found: list[int] = []
    while level and late:
        width = -(-world // fanout ** (level - 1))
        under = {
            node: range(node * fanout, min((node + 1) * fanout, width))
            for node in late[:BLAMED_MAX]
        }
        keys = tuple(key(prefix, level - 1, child) for some in under.values() for child in some)
        answer = yield Await(keys, f"{prefix} of level {level - 1}", look=True)
        gone = (
            {int(k.rsplit("/", 1)[1]) for k in answer.keys}
            if isinstance(answer, Missing)
            else set()
        )
        found += [node * fanout**level for node, some in under.items() if gone.isdisjoint(some)]
        level, late = level - 1, tuple(sorted(gone))
    return tuple(sorted({*found, *late}))


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3" or "ranks 1, 3"; long lists are cut, with their count."""
    shown = ", ".join(str(rank) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def dump(value: object) -> bytes:
    """Canonical JSON bytes for the store."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def load(raw: bytes, what: str) -> Any:
    """JSON from another process; RecoveryError names ``what`` when it is not."""
    if len(raw) > WORD_BYTES_MAX:
        raise RecoveryError(f"{what} has {len(raw)} bytes, at most {WORD_BYTES_MAX} are taken")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecoveryError(f"{what} is not JSON: {error}") from error


def merge_texts(values: Sequence[bytes]) -> bytes:
    """Concatenate gathered JSON lists of texts."""
    return dump([text for value in values for text in texts_from(value)])


def texts_from(raw: bytes) -> list[str]:
    """A JSON list of texts from another process, or RecoveryError."""
    texts = load(raw, "a list of texts")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RecoveryError(f"a list of texts is {str(texts)[:200]!r}")
    return texts
