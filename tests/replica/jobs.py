"""What a warm worker can be asked to do: each function is a job, its arguments and answer are JSON.

One process has one group and one Checkpointer at a time, kept in ``HERE`` from job to job. The
state is a toy whose value at (owner, step) is known, so that any process can say whether what it
has is right.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import replica
import replica.opening
import replica.saver
import replica.store
from erasure.errors import PlanariaError
from replica import fault_points
from replica.demo.train import build, parse_options
from replica.encode import EncodePass
from replica.fetch import Fetcher
from replica.transports.gloo import GlooChannel
from tests.replica.alike import Alike
from tests.replica.control import Control, background
from tests.replica.pool import serve_store

torch.set_num_threads(1)


def announce(event: str) -> None:
    """Tell the test that something was reached; the worker puts its own function here."""
    raise NotImplementedError(event)


class _Events(list):
    """The events so far, and a wait for one to come."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def append(self, event: dict) -> None:
        """Take one more; called in whichever thread it happens."""
        with self._more:
            super().append(event)
            self._more.notify_all()

    def wait_for(self, there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``there`` holds, which is asked at every event; whether it does."""
        with self._more:
            return self._more.wait_for(there, timeout_s)


class _Here:
    def __init__(self) -> None:
        self.checkpointer: Any = None
        self.state: dict[str, Any] = {}
        self.ticket: Any = None
        self.tickets: dict[int, Any] = {}
        self.events = _Events()
        self.undo: list[Callable[[], None]] = []
        self.store: Any = None
        self.mode = "thread"
        self.client: Any = None
        self.training: Any = None


HERE = _Here()


# ---- groups


def host_store() -> int:
    """Serve a store from this process; its port."""
    HERE.store = serve_store()
    return HERE.store.port


def join(rank: int, world: int, port: int, prefix: str) -> None:
    """Make the default process group over the store at ``port``."""
    timeout = timedelta(seconds=30)
    HERE.client = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    store = dist.PrefixStore(prefix, HERE.client)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def join_by_file(rank: int, world: int, path: str) -> None:
    """Make the default process group over a store that is a file."""
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timeout
    )


def leave() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    HERE.client = None


def reset() -> str:
    """Undo all that a test did here; "clean", or an error that ends this worker."""
    while HERE.undo:
        HERE.undo.pop()()
    if HERE.checkpointer is not None:
        # Peers may be gone and the save under way hopeless: that is for the test to judge.
        with contextlib.suppress(PlanariaError):
            HERE.checkpointer._close(2.0, goodbye=False)
    leave()
    for one in CONTROL:
        one.forget()
    HERE.__init__()
    limit = time.monotonic() + 5.0
    for thread in threading.enumerate():
        if thread.name.startswith("planaria"):
            thread.join(max(0.0, limit - time.monotonic()))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("planaria")]
    if left:
        raise RuntimeError(f"threads that do not end: {left}")
    return "clean"


def hang() -> None:
    """Never return."""
    threading.Event().wait()


# ---- the toy state


def toy(owner: int, step: int, elements: int) -> dict[str, Any]:
    """Return the state of ``owner`` at ``step``; owners differ in size too."""
    base = torch.arange(elements + 13 * owner, dtype=torch.float32)
    return {
        "weights": base * (step + 1) + owner / 8,
        "nested": {
            "flags": torch.tensor([owner, step], dtype=torch.int64),
            7: [step, (owner, 0.5)],
        },
        "text": f"owner {owner}, step {step}",
    }


def same(left: Any, right: Any) -> bool:
    """Whether two toys are equal in every bit and type."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def set_state(owner: int, step: int) -> None:
    """Change the live toy in place, as training would."""
    wanted = toy(owner, step, HERE.state["weights"].numel() - 13 * owner)
    HERE.state["weights"].copy_(wanted["weights"])
    HERE.state["nested"]["flags"].copy_(wanted["nested"]["flags"])
    HERE.state["nested"][7] = wanted["nested"][7]
    HERE.state["text"] = wanted["text"]


def state_is(owner: int, step: int) -> bool:
    """Whether the live toy is that of ``owner`` at ``step``."""
    return same(HERE.state, toy(owner, step, HERE.state["weights"].numel() - 13 * owner))


# ---- the Checkpointer


def set_mode(mode: str) -> None:
    """Note where the work is done; a process that does it looks for its faults when it starts."""
    HERE.mode = mode
    if mode == "process":
        control()


def make(owner: int, step: int, elements: int = 4000, **options: Any) -> None:
    """Make a Checkpointer over the toy of ``owner`` at ``step``."""
    set_mode(options.setdefault("background", background()))
    HERE.state = toy(owner, step, elements)
    HERE.events = _Events()
    HERE.checkpointer = replica.Checkpointer(HERE.state, on_event=HERE.events.append, **options)


def make_bare(elements: int, **options: Any) -> None:
    """Make a Checkpointer over one tensor of zeros."""
    set_mode(options.setdefault("background", background()))
    HERE.state = {"weights": torch.zeros(elements)}
    HERE.checkpointer = replica.Checkpointer(HERE.state, **options)


def bare_values() -> list[float]:
    """Return the values of that tensor."""
    return HERE.state["weights"].tolist()


def poison() -> None:
    """Put a value in the state that cannot be carried."""
    HERE.state["nested"]["bad"] = threading.Lock()


def cure() -> None:
    """Take it out again."""
    del HERE.state["nested"]["bad"]


def resize(owner: int, elements: int) -> None:
    """Replace the big tensor by one of another size."""
    HERE.state["weights"] = torch.zeros(elements + 13 * owner)


def start() -> None:
    """Open."""
    HERE.checkpointer.start()


def restore() -> int | None:
    """Restore; the step."""
    return HERE.checkpointer.restore()


def save(owner: int, step: int) -> dict[str, Any]:
    """Set the toy to ``step`` and save it; whether that was skipped, and the seconds it took."""
    set_state(owner, step)
    return save_as_is(step)


def save_as_is(step: int) -> dict[str, Any]:
    """Save what there is."""
    started = time.monotonic()
    HERE.ticket = HERE.tickets[step] = HERE.checkpointer.save(step)
    seconds = time.monotonic() - started
    return {"skipped": HERE.ticket.skipped, "reason": HERE.ticket.reason, "seconds": seconds}


def settle(step: int | None = None, timeout_s: float = 40.0) -> str:
    """Wait for a save, the last one by default; "committed", "skipped", or why it failed."""
    ticket = HERE.ticket if step is None else HERE.tickets[step]
    try:
        ticket.wait("committed", timeout_s)
    except replica.SaveFailed as failed:
        return str(failed)
    return "skipped" if ticket.skipped else "committed"


def commit(owner: int, step: int, timeout_s: float = 40.0) -> str:
    """Save and wait."""
    save(owner, step)
    return settle(step, timeout_s)


def status() -> dict[str, Any]:
    """Return what the Checkpointer says."""
    return HERE.checkpointer.status()


def events(kind: str) -> list[dict]:
    """Return the events of a kind so far."""
    return [dict(event) for event in HERE.events if event["event"] == kind]


def await_event(kind: str, timeout_s: float) -> dict | None:
    """Wait for an event of a kind; the first of them, None when none came."""
    HERE.events.wait_for(lambda: bool(events(kind)), timeout_s)
    return next(iter(events(kind)), None)


def await_protection(timeout_s: float) -> str:
    """Wait until what is kept is fully protected; how protected it is."""
    HERE.events.wait_for(lambda: status()["protected"] == "full", timeout_s)
    return status()["protected"]


def close() -> None:
    """Close; the group stays."""
    HERE.checkpointer.close()
    HERE.checkpointer = None


def give_up() -> None:
    """End a with block by an exception, as survivors do whose collective fails, and leave."""
    HERE.checkpointer.__exit__(RuntimeError, RuntimeError("a peer has died"), None)
    HERE.checkpointer = None
    leave()


def train(steps: int, first: int, owner: int) -> dict[str, list[int]]:
    """All-reduce on the trainer's group and save at each step; which steps were taken."""
    tickets = []
    for step in range(first, first + steps):
        dist.all_reduce(torch.ones(4))
        set_state(owner, step)
        tickets.append(HERE.checkpointer.save(step))
    for ticket in tickets:
        ticket.wait("committed", 40.0)
    taken = [ticket.step for ticket in tickets if not ticket.skipped]
    return {"taken": taken, "skipped": [t.step for t in tickets if t.skipped]}


# ---- real training


def build_training(seed: int) -> None:
    """Build the demo's training anew: FSDP2 model, AdamW, schedule, loader."""
    options = parse_options(["--device", "cpu", "--seed", str(seed)])
    HERE.training = build(options, torch.device("cpu"))


def make_for_training(**options: Any) -> None:
    """Make a Checkpointer over the training."""
    set_mode(options.setdefault("background", background()))
    HERE.events = _Events()
    state = HERE.training.state()
    HERE.checkpointer = replica.Checkpointer(state, on_event=HERE.events.append, **options)


def train_on(first: int, last: int, *, save: bool) -> list[str]:
    """Train steps ``first`` to ``last``, saving each without waiting; the losses, exactly."""
    losses = []
    for step in range(first, last + 1):
        losses.append(HERE.training.step().hex())
        if save:
            HERE.ticket = HERE.checkpointer.save(step)
    return losses


def training_digest() -> str:
    """Return the digest of model, optimizer, schedule, loader and random states."""
    return HERE.training.digest()


def build_alike(seed: int) -> None:
    """Build the training whose traces are compared."""
    HERE.training = Alike(seed)


def make_alike(**options: Any) -> None:
    """Make a Checkpointer over it."""
    set_mode(options.setdefault("background", background()))
    HERE.checkpointer = replica.Checkpointer(HERE.training.state, **options)


def run_alike(first: int, last: int, kill_at: int = 0) -> list[dict[str, str]]:
    """Run its steps, saved at each if there is a Checkpointer; their traces."""
    return HERE.training.run(HERE.checkpointer, first, last, kill_at)


# ---- faults


def set_environment(name: str, value: str) -> None:
    """Set an environment variable until the reset."""
    os.environ[name] = value
    HERE.undo.append(lambda: os.environ.pop(name, None))


def pretend(module: str, name: str, value: Any) -> None:
    """Replace a constant of a module of ours."""
    elsewhere("pretend", lasting=True, module=module, name=name, value=value)
    _patch(getattr(replica, module), name, value)


def _patch(owner: Any, name: str, value: Any) -> None:
    former = getattr(owner, name)
    setattr(owner, name, value)
    HERE.undo.append(lambda: setattr(owner, name, former))


def strike(number: signal.Signals) -> None:
    """Send a signal to this very thread: it must not go on while another one takes it."""
    signal.pthread_kill(threading.get_ident(), number)


CONTROL: list[Control] = []
"""Of this worker; made when it is first needed."""


def _heard(event: str) -> None:
    announce(event)


def elsewhere(job: str, /, *, lasting: bool = False, **args: Any) -> bool:
    """Have a fault made in the background process, if the work is done there; whether it is."""
    if HERE.mode == "thread":
        return False
    control().do(job, lasting=lasting, **args)
    return True


def control() -> Control:
    """Return the line to background processes, which these look for from then on."""
    if not CONTROL:
        CONTROL.append(Control(_heard))
    return CONTROL[0]


def at(point: str, action: str) -> None:
    """At the first passage of ``point``: "kill" or "stop" this process by its own hand, or "raise".

    Points: ``key PREFIX``, just before a store key that starts so is set; ``send``, with bulk bytes
    just posted; ``encode``, before the shard is digested.
    """
    if elsewhere("at", point=point, action=action):
        return
    acts = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    passed: list[bool] = []

    def act() -> None:
        if passed:
            return
        passed.append(True)
        if action == "raise":
            raise replica.ArenaError("a fault made by the test")
        announce(f"{action} at {point}")
        strike(acts[action])

    if point.startswith("key "):
        _wrap(replica.store.TorchStore, "set", lambda _, key, *__: key.startswith(point[4:]), act)
    elif point == "send":
        _wrap(GlooChannel, "send", lambda *_: True, act, after=True)
    else:
        _wrap(EncodePass, "run", lambda *_: True, act)


def arm(point: str, action: str) -> None:
    """At the first passage of a fault point: "kill" or "stop" this process by its own hand."""
    if elsewhere("arm", point=point, action=action):
        return
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

    def fail(reached: str) -> None:
        if reached == point:
            fault_points.set_hook(None)
            strike(signals[action])

    fault_points.set_hook(fail)
    HERE.undo.append(lambda: fault_points.set_hook(None))


def _wrap(
    owner: type,
    name: str,
    when: Callable[..., bool],
    act: Callable[[], None],
    *,
    after: bool = False,
) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        if when(*args) and not after:
            act()
        result = inner(*args)
        if when(*args) and after:
            act()
        return result

    _patch(owner, name, wrapped)


def stand_still(where: str, name: str, word: str) -> None:
    """From now on this method of a class of ours says ``word``, and never comes back."""
    if elsewhere("stand_still", where=where, name=name, word=word):
        return

    def method(*_: Any) -> None:
        announce(word)
        threading.Event().wait()

    _patch({"Fetcher": Fetcher, "GlooChannel": GlooChannel}[where], name, method)


def have_it_stay(where: str, word: str) -> None:
    """Have the background process, this or the next, stay at a method and say ``word`` there."""
    elsewhere("stay", where=where, word=word)


def have_it_stay_here(word: str) -> None:
    """Have the next background process stay before it is ready."""
    elsewhere("stay_here", word=word)


def freeze_in_a_send() -> None:
    """Stand still with bulk bytes posted, as a peer that hangs."""
    if not elsewhere("freeze_in_a_send"):
        _wrap(GlooChannel, "send", lambda *_: True, lambda: strike(signal.SIGSTOP), after=True)


def hold_saves() -> None:
    """From now on saves stay in flight, staged and not sent, until they are let go."""
    if elsewhere("hold_saves"):
        return
    HERE.gate = threading.Event()
    inner = EncodePass.run

    def held(self: EncodePass) -> None:
        announce("save held")
        HERE.gate.wait(60)
        inner(self)

    _patch(EncodePass, "run", held)
    HERE.undo.append(HERE.gate.set)


def hold_again() -> None:
    """Hold the next saves too, after some were let go."""
    if not elsewhere("hold_again"):
        HERE.gate.clear()


def let_saves_go() -> None:
    """Let held saves go on."""
    if not elsewhere("let_saves_go"):
        HERE.gate.set()
