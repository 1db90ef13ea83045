"""The root of every error of this distribution, and the branch that `erasure` raises.

PlanariaError               anything that this distribution raises on purpose
`-- ErasureError            the arithmetic of stripes
    |-- CodeError           yours: a code, an index or a buffer breaks a rule (also a ValueError)
    |-- KernelUnavailable   the machine's: no library for the arithmetic, or one that gets it wrong
    `-- TooFewFragments     too much is lost: fewer than k distinct fragments of a stripe
"""

from __future__ import annotations


class PlanariaError(Exception):
    """Root of every error that `erasure`, `recovery` and `replica` raise on purpose."""


class ErasureError(PlanariaError):
    """Root of the errors of `erasure`."""


class CodeError(ErasureError, ValueError):
    """A caller's mistake: a code, a fragment index or a buffer that breaks a documented rule."""


class KernelUnavailable(ErasureError):
    """A library for the arithmetic is missing, cannot be loaded, or fails its self-test."""


class TooFewFragments(ErasureError):
    """A stripe cannot be rebuilt.

    `have` and `need` are counts of distinct fragments.
    """

    def __init__(self, *, have: int, need: int) -> None:
        """Build the sentence from the two counts."""
        super().__init__(
            f"too much is lost: {have} distinct fragments of the stripe are here, {need} are needed"
        )
        self.have = have
        self.need = need

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the two counts when the error is copied to another process."""
        return _too_few, (self.have, self.need)


def _too_few(have: int, need: int) -> TooFewFragments:
    return TooFewFragments(have=have, need=need)
