"""Many pieces of memory copied by one call, past the cache: a loop that LLVM compiles.

Neither torch nor numpy nor the C library copies a list of pieces in one call, without the
interpreter's lock. And they write through the cache: memory is read before it is overwritten, a
third of all traffic for nothing, and what the training had in the cache is gone. What that is worth
is in `docs/performance.md`, why it is done so in `docs/adr/0009-copy-loop.md`.

llvmlite is optional. Where it is missing, or what it makes copies wrong bytes, there is no loop.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger("planaria")

Words = npt.NDArray[np.uint64]

CopyLoop = Callable[[int, int], None]
"""loop(address of uint64[n, 3], n): copies n pieces, each an address to, one from, and bytes.

The array is contiguous, and no target overlaps anything. It needs no lock of the interpreter.
"""

STREAM_BYTES = 4096
"""Pieces of so many bytes are written past the cache; what is left of a shorter line is not."""

# Up to the first line of 64 bytes of the target, then by lines, then the rest. The fence: other
# cores see what was written past the cache before anything that this thread does afterwards.
_SOURCE = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
{declaration}
define void @copy_pieces(ptr %rows, i64 %count) {{
entry:
  br label %next
next:
  %row = phi i64 [0, %entry], [%row_after, %done]
  %more = icmp ult i64 %row, %count
  br i1 %more, label %piece, label %end
piece:
  %word = mul i64 %row, 3
  %at_to = getelementptr i64, ptr %rows, i64 %word
  %at_from = getelementptr i64, ptr %at_to, i64 1
  %at_bytes = getelementptr i64, ptr %at_to, i64 2
  %to_word = load i64, ptr %at_to
  %from_word = load i64, ptr %at_from
  %bytes = load i64, ptr %at_bytes
  %to = inttoptr i64 %to_word to ptr
  %from = inttoptr i64 %from_word to ptr
  %minus = sub i64 0, %to_word
  %to_line = and i64 %minus, 63
  %streams = icmp uge i64 %bytes, {stream_bytes}
  %head = select i1 %streams, i64 %to_line, i64 %bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %head, i1 false)
  br i1 %streams, label %lines, label %done
lines:
  %left = sub i64 %bytes, %head
  %whole = and i64 %left, -64
  %lines_end = add i64 %head, %whole
  br label %line
line:
  %at = phi i64 [%head, %lines], [%at_after, %line]
  %line_from = getelementptr i8, ptr %from, i64 %at
  %line_to = getelementptr i8, ptr %to, i64 %at
  %value = load <8 x i64>, ptr %line_from, align 1
  store <8 x i64> %value, ptr %line_to, align 64, !nontemporal !0
  %at_after = add i64 %at, 64
  %another = icmp ult i64 %at_after, %lines_end
  br i1 %another, label %line, label %rest
rest:
  %rest_from = getelementptr i8, ptr %from, i64 %lines_end
  %rest_to = getelementptr i8, ptr %to, i64 %lines_end
  %rest_bytes = sub i64 %bytes, %lines_end
  call void @llvm.memcpy.p0.p0.i64(ptr %rest_to, ptr %rest_from, i64 %rest_bytes, i1 false)
  br label %done
done:
  %row_after = add i64 %row, 1
  br label %next
end:
  {fence}
  ret void
}}
!0 = !{{i32 1}}
"""
# LLVM's own fence does not order such writes on x86.
_X86 = {
    "declaration": "declare void @llvm.x86.sse.sfence()",
    "fence": "call void @llvm.x86.sse.sfence()",
}
_OTHERS = {"declaration": "", "fence": "fence seq_cst"}

_GUARD_BYTES = 64


class _Refused(Exception):
    """What was compiled is not to be used."""


@lru_cache(maxsize=1)
def copy_loop() -> CopyLoop | None:
    """The loop, compiled at the first call; None where there is none, which is logged once."""
    try:
        loop = _compiled()
        _self_test(loop)
    except (ImportError, OSError, RuntimeError, AttributeError, MemoryError, _Refused) as reason:
        log.info(
            "memory is copied piece by piece: planaria[fast] brings what is faster: %s", reason
        )
        return None
    log.info("memory is copied by a loop that LLVM has compiled")
    return loop


def _compiled() -> CopyLoop:
    from llvmlite import binding  # noqa: PLC0415 - optional, and slow to load

    _check_executable()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    # For any processor of the kind: what a virtual machine says of its own is not always so, and
    # wider registers were no faster.
    machine = target.create_target_machine(opt=2)
    words = _X86 if target.name.startswith("x86") else _OTHERS
    module = binding.parse_assembly(_SOURCE.format(**words, stream_bytes=STREAM_BYTES))
    module.verify()
    engine: Any = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("copy_pieces")
    # Never freed: a thread may be in there when the interpreter ends.
    engine.detach()
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(address)


def _check_executable() -> None:
    """Raise OSError where memory that was written must not be run: LLVM does not look, and dies."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        first = ctypes.c_char.from_buffer(page)
        address = ctypes.c_void_p(ctypes.addressof(first))
        del first
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        if protect(address, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "the system forbids machine code made at run time")


def _self_test(loop: CopyLoop) -> None:
    """Raise unless it copies pieces of many sizes and alignments, and touches nothing beside."""
    source = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    target = np.full(1 << 20, 0xA5, np.uint8)
    wanted = target.copy()
    rows = []
    for begin, shift, size in _test_pieces():
        wanted[begin : begin + size] = source[begin - shift : begin - shift + size]
        rows.append((begin, begin - shift, size))
    bases = (target.ctypes.data, source.ctypes.data, 0)
    words = np.array(rows, np.uint64) + np.array(bases, np.uint64)
    loop(words.ctypes.data, len(words))
    if not np.array_equal(target, wanted):
        raise _Refused("the compiled loop copies wrong bytes")


def _test_pieces() -> Iterator[tuple[int, int, int]]:
    begin = _GUARD_BYTES
    for size in (
        0,
        1,
        4,
        63,
        64,
        65,
        STREAM_BYTES - 1,
        *range(STREAM_BYTES, STREAM_BYTES + 130, 43),
    ):
        for shift in (0, 1, 8, 33):
            yield begin, shift, size
            begin += size + _GUARD_BYTES + shift
