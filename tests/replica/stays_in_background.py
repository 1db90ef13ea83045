"""Loaded by a background process under test before anything else: the jobs of ``stays``."""

from __future__ import annotations

from tests.replica import stays
from tests.replica.control import Listener

_LINE = Listener(vars(stays))
stays.announce = lambda event: _LINE.say(event=event)
_LINE.start()
