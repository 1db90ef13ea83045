"""Which dtypes there are, what they are called, and how their bytes are carried.

The list comes from the installed torch; only the safetensors format's own codes are written down,
because they are that format's and not torch's.
"""

from __future__ import annotations

import torch

RAW_CODE = "U8"

# The codes that the safetensors format defines for whole elements of at least one byte.
CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_CODE_OF = {name: code for code, name in CODES.items()}
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """Name without the module: `float32`."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of the installed torch by its name."""


def code_of(dtype: torch.dtype) -> str | None:
    """The safetensors code of a dtype, None where the format has none."""
    return _CODE_OF.get(dtype_name(dtype))


def code_bytes(code: str) -> int:
    """Bytes of one element of a safetensors code; KeyError for a code that is not in `CODES`."""
    return DTYPES[CODES[code]].itemsize


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose `copy_` moves the same bytes.

    torch lacks copy kernels for several narrow dtypes; an integer of the same size moves them.
    Complex numbers keep their own kernel, which knows about conjugate views.
    """
    if code_of(dtype) is not None or dtype.is_complex:
        return dtype
    return _INTEGER_OF_SIZE[dtype.itemsize]
