"""The fast kernel: Intel's ISA-L (BSD-3) through ctypes, which releases the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import metadata

import numpy as np

from erasure.buffers import Block
from erasure.errors import KernelUnavailable
from erasure.kernels.base import Combine, Recipe, self_test

SYSTEM_LIBRARY = "libisal.so.2"

CALL_BYTES = 512 * 1024 * 1024
"""ISA-L takes its lengths as a C int: longer work is split, well below its limit."""

_TABLE_BYTES = 32  # that ec_init_tables writes for each element of the matrix


class IsalKernel:
    """One loaded ISA-L library.

    Raises KernelUnavailable if it lacks the two functions or computes wrong bytes. Buffers need no
    alignment.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._name = name
        try:
            self._init_tables = library.ec_init_tables
            self._encode = library.ec_encode_data
        except AttributeError as missing:
            raise KernelUnavailable(f"{name} is not ISA-L's erasure code: {missing}") from missing
        self._init_tables.restype = None
        self._init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._encode.restype = None
        self._encode.argtypes = [*[ctypes.c_int] * 3, *[ctypes.c_void_p] * 3]
        self_test(self)

    @property
    def name(self) -> str:
        """For logs: the library and where it came from."""
        return self._name

    def combine(self, recipe: Recipe) -> Combine:
        """Expand the tables of the recipe's matrix once; see Kernel."""
        rows = np.ascontiguousarray(recipe.rows)
        wanted, given = rows.shape
        tables = (ctypes.c_ubyte * (_TABLE_BYTES * rows.size))()
        self._init_tables(given, wanted, rows.ctypes.data, tables)
        encode = self._encode
        sources_type, outputs_type = ctypes.c_void_p * given, ctypes.c_void_p * wanted

        def combine(sources: Sequence[Block], outputs: Sequence[Block]) -> None:
            nbytes = outputs[0].size
            for at in range(0, nbytes, CALL_BYTES):
                read_at = sources_type(*[block.start + at for block in sources])
                write_at = outputs_type(*[block.start + at for block in outputs])
                encode(min(CALL_BYTES, nbytes - at), given, wanted, tables, read_at, write_at)

        return combine


def find_isal() -> tuple[str, ...]:
    """Return the paths to try, best first: the system's library, then the one in PyECLib's wheel.

    Only PyECLib's file is used: its Python code, which copies every fragment, is never imported.
    """
    try:
        files = metadata.files("pyeclib") or []
    except metadata.PackageNotFoundError:
        files = []
    bundled = [str(file.locate()) for file in files if file.name.startswith("libisal")]
    return (SYSTEM_LIBRARY, *sorted(bundled))


def load_isal() -> IsalKernel:
    """Return the first library of `find_isal` that loads and passes its self-test.

    Raises KernelUnavailable with the reason for each.
    """
    reasons = []
    for path in find_isal():
        try:
            return IsalKernel(ctypes.CDLL(path), f"ISA-L ({path})")
        except (OSError, KernelUnavailable) as error:
            reasons.append(f"{path}: {error}")
    raise KernelUnavailable(
        f"no usable ISA-L ({'; '.join(reasons)}): install planaria[fast] or the system's libisal2"
    )
