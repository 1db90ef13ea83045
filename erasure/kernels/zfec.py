"""The portable kernel: zfec, plain C without vector code.

The only module that imports zfec (GPL or TGPPL), and only when this kernel is built: with ISA-L
present that never happens, and everything runs with zfec uninstalled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from erasure.buffers import Block
from erasure.errors import KernelUnavailable
from erasure.kernels.base import Combine, Recipe, self_test

_BLOCK_BYTES = 64 * 1024
"""zfec returns new bytes for every block: small ones reuse warm memory, and the copy is cheap."""


class ZfecKernel:
    """zfec's encoder and decoder, block by block. Raises KernelUnavailable if it cannot load."""

    def __init__(self) -> None:
        try:
            import zfec  # noqa: PLC0415 - it is GPL and its import runs its command line's: only on use
        except ImportError as missing:
            raise KernelUnavailable(f"zfec cannot be imported: {missing}") from missing
        self._zfec = zfec
        self_test(self)

    @property
    def name(self) -> str:
        """For logs: the library and where it came from."""
        return f"zfec {self._zfec.__version__}"

    def combine(self, recipe: Recipe) -> Combine:
        """Make the encoder and decoder of the recipe's code once; see Kernel."""
        k, n = recipe.code.k, recipe.code.n
        encoder, decoder = self._zfec.Encoder(k, n), self._zfec.Decoder(k, n)
        have, want, all_data = list(recipe.have), list(recipe.want), list(range(k))
        position = {index: at for at, index in enumerate(recipe.given)}
        zeros = np.zeros(_BLOCK_BYTES, np.uint8)

        def combine(sources: Sequence[Block], outputs: Sequence[Block]) -> None:
            for at in range(0, outputs[0].size, _BLOCK_BYTES):
                targets = [output.array[at : at + _BLOCK_BYTES] for output in outputs]
                nbytes = targets[0].size
                blocks = [
                    sources[position[index]].array[at : at + nbytes]
                    if index in position
                    else zeros[:nbytes]
                    for index in have
                ]
                if have != all_data:
                    # zfec sorts both lists in place: it gets copies.
                    blocks = decoder.decode(blocks, list(have))
                for target, made in zip(targets, encoder.encode(blocks, want), strict=True):
                    np.copyto(target, np.frombuffer(made, np.uint8))

        return combine
