"""A deterministic simulation of Planaria: the production code of ``recovery`` on fake edges.

Beside the floors: nothing imports it and it is not shipped. ``python -m simulations --seed 1``.
"""

from __future__ import annotations

__all__: list[str] = []
