"""Starting a background process that ends with its trainer and hears no signal that is not its."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from replica.fault_points import module_in_background

# The name tells the package that what only a trainer needs is not to be imported.
_NAME = "planaria-background"
BOOT = f"import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); sys.argv[0] = {_NAME!r}"
# First of all, since loading torch takes long: a trainer that ends meanwhile takes it along.
_TETHER = "import ctypes; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)"
_MAIN = "from replica.background import main; main()"
# Meant for the trainer, by hand, by a launcher or by a scheduler: it decides what they mean. The
# last three are the terminal's, which may stop who writes there and is not in the foreground.
NOT_FOR_IT = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
}
"""To be blocked in the thread that starts it: it inherits that."""


def launch(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process, which speaks by the socket ``descriptor``. Raises OSError.

    The kernel ends it with the thread that calls this.
    """
    paths = "\n".join(path or os.getcwd() for path in sys.path)  # noqa: PTH109 - as sys.path
    module = module_in_background()
    boot = "; ".join([_TETHER, BOOT, *([f"import {module}"] if module else []), _MAIN])
    return subprocess.Popen(
        [sys.executable, "-c", boot, paths, str(descriptor), str(os.getpid())],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A group of its own: what is meant for all of the trainer's is not meant for it.
        process_group=0,
    )
