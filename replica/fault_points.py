"""Named points of a save, a restore, a mend and a close at which a test can make its process fail.

One hook for the whole process, off unless code sets it: no option and no environment variable does.
While it is off a point costs one comparison. A test that injects failures sets it, in the process
that is to fail, before the call that is to fail:

    def die(point: str) -> None:
        if point == "save.ack":
            os.kill(os.getpid(), signal.SIGKILL)

    fault_points.set_hook(die)

With ``background="process"`` the points are passed in the background process: name a module that
sets the hook there by ``load_in_background``, before the process is started.

The hook is called in whichever thread reaches the point, the background thread and those that move
bytes included, and more than once where a point is passed more than once: a save has several
fragments. What it raises is raised there, as if that line had failed.

    save.plan            about to say that this rank's plan is made (first save of a process)
    save.stage           the step is admitted, nothing is copied yet
    save.offer           about to offer: the shard is staged
    save.encode          holders are ready, no byte is digested or sent yet
    save.first_chunk     the first chunk of a fragment has left
    save.last_chunk      the last chunk of a fragment has left, its digests have not
    save.ack             about to acknowledge what was received and verified
    save.held            about to report HELD
    save.commit          rank 0: about to write the decision; others: about to wait for it
    save.release         the decision "committed" is read and in the arena's head, nothing is freed
    restore.inventory    about to report what this arena holds
    restore.transfer     bytes are asked for and being served
    restore.decode       all bytes are here, not put together yet
    restore.vote         about to vote
    restore.load         the vote was "go", no live object is changed yet
    mend.report          a mend is called for, nothing is reported for it yet
    mend.transfer        holders are ready, no byte is sent yet
    mend.result          what was sent is in place, about to say so
    close                about to close
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "save.plan",
    "save.stage",
    "save.offer",
    "save.encode",
    "save.first_chunk",
    "save.last_chunk",
    "save.ack",
    "save.held",
    "save.commit",
    "save.release",
    "restore.inventory",
    "restore.transfer",
    "restore.decode",
    "restore.vote",
    "restore.load",
    "mend.report",
    "mend.transfer",
    "mend.result",
    "close",
)

Hook = Callable[[str], None]

_hook: Hook | None = None
_module = ""


def set_hook(hook: Hook | None) -> None:
    """Call ``hook`` with the name of every point that this process reaches; None: no more."""
    global _hook  # noqa: PLW0603 - one per process, and a point must cost nothing without it
    _hook = hook


def load_in_background(module: str) -> None:
    """Have every background process that is started from now on import ``module`` first; "": none.

    Raises ValueError for what is no dotted name.
    """
    global _module  # noqa: PLW0603 - as the hook
    if module and not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"module is {module!r}, expected a dotted name")
    _module = module


def module_in_background() -> str:
    """The module that a background process imports first; "": none."""
    return _module


def reach(point: str) -> None:
    """Say that ``point`` is reached."""
    if _hook is not None:
        _hook(point)


def reach_key(key: str) -> None:
    """Say which point is reached by one about to set, or to wait for, the store key ``key``.

    Sessions are pure, so the points inside them are known by the keys that they ask for.
    """
    if _hook is not None:
        point = _point_of(key)
        if point:
            _hook(point)


_BY_WORD = {
    "planned": "save.plan",
    "offer": "save.offer",
    "ack": "save.ack",
    "held": "save.held",
    "decision": "save.commit",
}
_BY_LATER_WORD = {
    ("restore", "inventory"): "restore.inventory",
    ("restore", "moved"): "restore.vote",
    ("mend", "sent"): "mend.result",
}


def _point_of(key: str) -> str:
    first, *later = key.split("/")
    found = [_BY_LATER_WORD[first, word] for word in later if (first, word) in _BY_LATER_WORD]
    return found[0] if found else _BY_WORD.get(first, "")
