"""``python -m benchmarks NAME [--json]``: run one benchmark and print its figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import copies, cuda_stall, overlap, slowdown, stall

BENCHMARKS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "copies": copies.run,
    "cuda_stall": cuda_stall.run,
    "overlap": overlap.run,
    "slowdown": slowdown.run,
    "stall": lambda: overlap.run() | stall.run(),
}


def main() -> int:
    """Print one JSON object, or a line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    options = parser.parse_args()
    figures = BENCHMARKS[options.name]()
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    return 1 if figures.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
