"""Page-locking of the arena's mappings, so that a GPU copies straight into them.

A device-to-host copy into ordinary memory goes through a small buffer of the driver and holds the
caller up meanwhile. Into page-locked memory the device writes by itself. Each mapping is locked
once, before the first copy into it, and unlocked before it goes: the driver would otherwise hold
pages that are no longer ours, and refuse the address when it is mapped again.

Nothing here imports torch by itself: arenas are listed by commands that must start at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

log = logging.getLogger("planaria")

_PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for every device of this process."""


class Mapping(mmap.mmap):
    """A mapping that is unlocked before it goes; ``unlock`` is set while it is locked."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        """Unlock: this runs before the memory is unmapped, a weak reference's callback after it."""
        if self.unlock is not None:
            self.unlock()


class Runtime(Protocol):
    """What page-locking needs of the device's runtime."""

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock memory; why that failed, "" when it did not."""
        ...

    def unlock(self, address: int) -> str:
        """The reverse, with the same answer."""
        ...


class PageLocks:
    """Locks mappings. One that cannot be locked is told once, and no other is tried after it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.refusal = ""
        """Why pages are not locked in this process; empty while they are."""

    def lock(self, buffer: npt.NDArray[np.uint8]) -> bool:
        """Lock the mapping behind ``buffer``, if it has one; whether it is locked now.

        Memory that is no ``Mapping`` is left as it is: nobody would unlock it in time. Copies into
        memory that is not locked are right too, only slower.
        """
        mapping = mapping_of(buffer)
        if mapping is None or self.refusal:
            return False
        if mapping.unlock is not None:
            return True
        whole = np.frombuffer(mapping, np.uint8)
        address, nbytes = int(whole.ctypes.data), len(mapping)
        self.refusal = self._runtime.lock(address, nbytes)
        if self.refusal:
            log.warning(
                "%d bytes of the arena cannot be page-locked: %s. Saves from the GPU go on with "
                "slower copies; raise the limit of locked memory (ulimit -l, docker: --ulimit "
                "memlock=-1) and restart to have fast ones",
                nbytes,
                self.refusal,
            )
            return False
        mapping.unlock = _Unlock(self._runtime, address)
        return True


class _Unlock:
    """Unlocks once, and only in the process that has locked: a forked child has no device."""

    def __init__(self, runtime: Runtime, address: int) -> None:
        self._runtime, self._address, self._pid = runtime, address, os.getpid()

    def __call__(self) -> None:
        # At the interpreter's end the runtime may be gone; the kernel unlocks what is left.
        if os.getpid() == self._pid and not sys.is_finalizing():
            failure = self._runtime.unlock(self._address)
            if failure:
                log.warning("page-locked memory was not unlocked: %s", failure)


def mapping_of(buffer: npt.NDArray[np.uint8]) -> Mapping | None:
    """The mapping that an array, or a view of one, lies in; None when it lies elsewhere."""
    holder: Any = buffer
    while holder is not None and not isinstance(holder, Mapping):
        holder = holder.obj if isinstance(holder, memoryview) else getattr(holder, "base", None)
    return holder


class CudaRuntime:
    """torch's binding of the CUDA runtime."""

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock memory for every device; why that failed, "" when it did not."""
        return _answer(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unlock(self, address: int) -> str:
        """The reverse, with the same answer."""
        return _answer(_cudart().cudaHostUnregister(address))


def _cudart() -> Any:
    import torch  # noqa: PLC0415 - see the module's docstring

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _answer(code: Any) -> str:
    """Say what went wrong, and let the runtime forget it.

    A failed call stays this thread's last error, and the next kernel that torch launches would
    raise it as its own. torch has no call that clears it, so one small kernel is sacrificed.
    """
    if int(code) == 0:
        return ""
    import torch  # noqa: PLC0415 - see the module's docstring

    text = f"CUDA error {int(code)}"
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        text += f", {str(error).splitlines()[0]}"
    return text
