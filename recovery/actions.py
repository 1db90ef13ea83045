"""What a session asks its driver to do, and what the driver answers.

A session (``commit.save_session``, ``session.restore_session``) is a generator: it yields one
action, the driver carries it out and sends the answer in, until the session returns its outcome.
Sessions hold every decision and no clock, socket or file; so the simulator drives the very same
code with its own edges.

    action       answer
    Publish      None
    Await        Got(values) | Missing(keys) when the deadline passed
                 | Decided(value) when the watched key appeared
    CompareSet   the value that the key has now (ours if we were first)
    others       as their docstrings say

A driver whose store cannot be reached throws ``StoreLost`` into the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recovery.errors import RecoveryError


class StoreLost(RecoveryError):
    """The store did not answer; what others decided is unknown."""


@dataclass(frozen=True)
class Publish:
    """Set ``key`` to ``value``."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Await:
    """Wait until all ``keys`` are set, or the session's deadline passes, or ``watch`` is set.

    ``what`` says what is waited for, in words for a log. While others may be moving bytes,
    ``moving_bytes`` (the most that any one rank moves) lets the driver lengthen the deadline by a
    stated lowest rate. ``look``: do not wait, say at once what is missing; asked after a
    deadline, to name who was late.
    """

    keys: tuple[str, ...]
    what: str
    watch: str | None = None
    moving_bytes: int = 0
    look: bool = False


@dataclass(frozen=True)
class CompareSet:
    """Set ``key`` to ``value`` if nobody has set it."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Got:
    """Every awaited key is set. ``values`` by key."""

    values: Mapping[str, bytes]


@dataclass(frozen=True)
class Missing:
    """The deadline passed; ``keys`` were not set."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Decided:
    """The watched key is set."""

    value: bytes


Action = Publish | Await | CompareSet
Answer = Got | Missing | Decided | bytes | None
