"""The libraries that do the arithmetic on bulk bytes, behind one protocol, and their choice."""

from __future__ import annotations

import logging
from functools import lru_cache

from erasure.errors import KernelUnavailable
from erasure.kernels.base import Combine, Kernel, Recipe, self_test
from erasure.kernels.isal import load_isal
from erasure.kernels.zfec import ZfecKernel

__all__ = ["Combine", "Kernel", "Recipe", "best_kernel", "load_isal", "load_zfec", "self_test"]

_log = logging.getLogger("planaria")


def load_zfec() -> Kernel:
    """Return the portable kernel; raises KernelUnavailable if zfec is not installed."""
    return ZfecKernel()


@lru_cache(maxsize=1)
def best_kernel() -> Kernel:
    """Return the fastest kernel that loads: ISA-L, else zfec. Logs once which, and why.

    Raises KernelUnavailable with both reasons if there is none.
    """
    try:
        kernel: Kernel = load_isal()
    except KernelUnavailable as no_isal:
        kernel = _portable(no_isal)
    else:
        _log.info("erasure code computed by %s", kernel.name)
    return kernel


def _portable(no_isal: KernelUnavailable) -> Kernel:
    try:
        kernel = load_zfec()
    except KernelUnavailable as no_zfec:
        raise KernelUnavailable(f"{no_isal}; {no_zfec}") from no_zfec
    _log.warning("erasure code computed by %s, 10 to 20 times slower: %s", kernel.name, no_isal)
    return kernel
