"""numpy dtypes as plain nodes, and back: whatever is written is first read by the reader.

A dtype is described as .npy files do it, with lists and tuples tagged as the tree tags them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from replica.image import ImageError

_TEXT = re.compile(r"[<>|=][biufcmMSUV]\d{1,9}(\[\d*[a-zA-Z]{1,2}(/\d+)?\])?")
_KINDS = "biufcmMSUV"
_MAX_DEPTH = 16


def dtype_refusal(dtype: np.dtype[Any]) -> str | None:
    """Why arrays of a dtype cannot be carried, None if they can."""
    # Comparisons of dtypes leave it out, and so would the cache.
    if np.lib.format.drop_metadata(dtype) is not dtype:
        return f"whose dtype {dtype} has metadata, which would be lost"
    # Records are another type of the same dtype.
    if dtype.kind == "V" and dtype.type is not np.void:
        return f"whose dtype {dtype} would come back as one of {np.void.__name__}"
    return _refusal(dtype)


def describe(dtype: np.dtype[Any]) -> Any:
    """Node of a dtype that `dtype_refusal` lets pass."""
    return _node(np.lib.format.dtype_to_descr(dtype))


def dtype_from(descr: Any) -> np.dtype[Any]:
    """A numpy dtype from its description; `ImageError` for one that holds objects or is none."""
    _check(descr, 0)
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise ImageError(f"shard image: numpy dtype {dtype} holds objects")
    return dtype


@lru_cache(maxsize=256)
def _refusal(dtype: np.dtype[Any]) -> str | None:
    if dtype.hasobject or dtype.kind not in _KINDS:
        return f"whose dtype {dtype} does not lie in its own bytes"
    try:
        made = dtype_from(np.lib.format.dtype_to_descr(dtype))
    except (ImageError, ValueError, TypeError) as fault:
        return f"whose dtype {dtype} could not be read back: {fault}"
    if made != dtype:
        return f"whose dtype {dtype} would come back as {made}"
    return None


def _node(part: object) -> Any:
    if isinstance(part, list):
        return ["list", *map(_node, part)]
    return ["tuple", *map(_node, part)] if isinstance(part, tuple) else part


def _check(part: object, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ImageError("shard image: a numpy dtype nested too deeply")
    if isinstance(part, list | tuple):
        for inner in part:
            _check(inner, depth + 1)
    elif isinstance(part, str):
        if len(part) > 1 and part[0] in "<>|=" and not _TEXT.fullmatch(part):
            raise ImageError(f"shard image: numpy dtype {part!r} is not supported")
    elif type(part) is not int or not 0 <= part < 1 << 31:
        raise ImageError("shard image: a numpy dtype with a part that is no text and no size")
