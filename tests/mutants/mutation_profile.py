"""The hypothesis profile of a mutation run: the same examples every time, and no shrinking."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    phases=(Phase.explicit, Phase.generate),
)
