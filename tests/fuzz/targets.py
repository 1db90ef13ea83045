"""All fuzz targets."""

from __future__ import annotations

from tests.fuzz import decisions, edges

TARGETS = [*decisions.TARGETS, *edges.TARGETS]
BY_NAME = {target.name: target for target in TARGETS}
