"""Arithmetic of GF(256), polynomial 0x11d, by tables: for matrices and self-tests, not for bulk.

Addition is XOR. Every element but 0 is a power of alpha = 2, so a product is a sum of logarithms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from erasure.buffers import ByteArray

POLYNOMIAL = 0x11D
_ORDER = 255  # of the multiplicative group: alpha ** 255 == 1


def _exponents() -> ByteArray:
    powers = [1]
    while len(powers) < _ORDER:
        doubled = powers[-1] << 1
        powers.append(doubled ^ POLYNOMIAL if doubled > 0xFF else doubled)
    return np.array(powers, np.uint8)


EXP = _exponents()
"""uint8[255]: EXP[i] = alpha ** i."""

LOG: npt.NDArray[np.intp] = np.zeros(256, np.intp)
LOG[EXP] = np.arange(_ORDER)
"""intp[256]: the inverse of EXP; LOG[0] has no meaning."""


def multiply(left: ByteArray, right: ByteArray) -> ByteArray:
    """Return the products, element by element, with numpy's broadcasting."""
    nonzero = (left != 0) & (right != 0)
    return np.where(nonzero, EXP[(LOG[left] + LOG[right]) % _ORDER], np.uint8(0))


def matmul(left: ByteArray, right: ByteArray) -> ByteArray:
    """Return the matrix product of uint8[r, c] and uint8[c, n] as uint8[r, n]."""
    product = np.zeros((left.shape[0], right.shape[1]), np.uint8)
    for column in range(left.shape[1]):
        product ^= multiply(left[:, column, None], right[None, column])
    return product


def inverse(matrix: ByteArray) -> ByteArray:
    """Return the inverse of a regular uint8[n, n], by Gauss-Jordan elimination."""
    n = matrix.shape[0]
    work = np.hstack([matrix, np.eye(n, dtype=np.uint8)])
    for i in range(n):
        pivot = i + int(np.flatnonzero(work[i:, i])[0])
        work[[i, pivot]] = work[[pivot, i]]
        work[i] = multiply(work[i], EXP[-LOG[work[i, i]] % _ORDER])
        factors = work[:, i].copy()
        factors[i] = 0
        work ^= multiply(factors[:, None], work[None, i])
    return np.ascontiguousarray(work[:, n:])
