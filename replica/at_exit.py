"""The end of a process that still has background threads: they are made to stand still.

A thread that sits in a transport or a store request cannot be woken. If its wait ends while the
interpreter is being torn down, the thread is ended by unwinding through C++ frames that forbid it,
and the process aborts instead of ending with its own code (seen: "terminate called without an
active exception", code -6). So the very last thing of ours at exit is to park every such thread.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys
import threading
import time

THREAD_PREFIX = "planaria "
"""All background threads have names that start so."""
_GRACE_S = 0.3
_SETTLE_US = 10_000


class _SigAction(ctypes.Structure):
    """The C library's ``struct sigaction``, the same in glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def park_threads() -> None:
    """Park what has not ended after a short grace; those threads never run again."""
    deadline_s = time.monotonic() + _GRACE_S
    left = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
    for thread in left:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    left = [thread for thread in left if thread.is_alive()]
    if left:
        _park(left)


def _park(threads: list[threading.Thread]) -> None:
    """Have each thread call ``pause`` in a signal handler during which it takes no other signal."""
    # Through PyDLL, which keeps the interpreter lock: a thread parked while it had that lock would
    # stop the whole process.
    libc = ctypes.PyDLL(None)
    sys.setswitchinterval(3600.0)
    action = _SigAction(handler=ctypes.cast(libc.pause, ctypes.c_void_p).value)
    libc.sigfillset(ctypes.byref(action, _SigAction.mask.offset))
    libc.sigaction(int(signal.SIGRTMAX), ctypes.byref(action), None)
    for thread in threads:
        if thread.is_alive() and thread.ident is not None:
            signal.pthread_kill(thread.ident, signal.SIGRTMAX)
    libc.usleep(_SETTLE_US)


# Registered before any Checkpointer registers its close, so it runs after all of them.
atexit.register(park_threads)
