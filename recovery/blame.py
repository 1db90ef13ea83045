"""Who kept a save waiting: asked once a deadline has passed, so that the reason names the cause.

A rank that waits for a holder's READY may wait in truth for a third rank whose offer that holder
lacks. All such waits stay inside a coding group and follow one order (offers, READY,
acknowledgements), so whoever lacks a key of the earliest stage that is not complete is to blame.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from recovery.actions import Await, Missing
from recovery.layout import Layout
from recovery.tree import name_ranks


def late_in_group(
    layout: Layout, generation_id: str, rank: int, when: str = ""
) -> Generator[Any, Any, str]:
    """Say in words which ranks of ``rank``'s group are late, or "" when all keys are there."""
    owners = layout.ranks_of_group(layout.group_of(rank))
    fragments = [f for owner in owners for f in layout.sent_by(owner)]
    stages = {
        "offer": {f"offer/{generation_id}/{owner}": owner for owner in owners},
        "READY": {f"ready/{generation_id}/{f.owner}/{f.index}": f.holder for f in fragments},
        "acknowledgement": {
            f"ack/{generation_id}/{f.owner}/{f.index}": f.holder for f in fragments
        },
    }
    for what, ranks in stages.items():
        answer = yield Await(tuple(sorted(ranks)), f"any {what} of the group", look=True)
        if isinstance(answer, Missing):
            late = sorted({ranks[key] for key in answer.keys})
            return not_come(what, late, when)
    return ""


def not_come(what: str, late: Sequence[int], when: str = "") -> str:
    """Say that ``what`` did not come from the ranks ``late``, ``when`` that was, and what to do.

    A rank offers what it has copied in save(), so one without an offer has not saved this step.
    """
    names = name_ranks(late)
    if what != "offer":
        return f"no {what} from {names}{when}"
    return (
        f"{names} did not save this step{when} (late, dead, or never asked to): "
        "every rank must call save() with the same steps"
    )
