"""The dumb twin: GF(256) as schoolbook says, one byte at a time. Slow, and easy to believe."""

from __future__ import annotations


def times(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), modulo 0x11d."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


TABLES = [bytes(times(a, b) for b in range(256)) for a in range(256)]


def combine(row: list[int], data: list[bytes], nbytes: int) -> bytes:
    """Sum row[i] * data[i], data padded with zeros to nbytes."""
    total = 0
    for factor, block in zip(row, data, strict=True):
        padded = block.ljust(nbytes, b"\0")
        total ^= int.from_bytes(padded.translate(TABLES[factor]), "little")
    return total.to_bytes(nbytes, "little")
