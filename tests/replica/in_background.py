"""Loaded by a background process under test before anything else: faults, as ``control`` says.

Where a job would kill or stop its own process, it kills or stops the trainer, and this with it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import ChainMap

from tests.replica import jobs, stays
from tests.replica.control import Listener


def strike(number: signal.Signals) -> None:
    """Send a signal to the trainer and to the very thread of this process that is here."""
    os.kill(os.getppid(), number)
    if number == signal.SIGKILL:
        threading.Event().wait()
    signal.pthread_kill(threading.get_ident(), number)


_LINE = Listener(ChainMap(vars(stays), vars(jobs)))
jobs.announce = stays.announce = lambda event: _LINE.say(event=event)
jobs.strike = strike
_LINE.start()
