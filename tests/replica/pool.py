"""Warm worker processes for the tests, and worlds of them: started once, by exec, and used again.

A worker that was killed, or does not come clean in time, is replaced. Every wait has a deadline;
when it passes, the failure shows the stacks and the log of the worker that was waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import psutil
import torch.distributed as dist

from tests.sources import ROOT

DEADLINE_S = 120.0
"""For anything that does not say otherwise: far more than it takes on a busy machine.

A job may start a background process, which loads torch while the workers that replace others do.
"""
_LOG_BYTES_MAX = 20_000
_FOREIGN = ("TORCHELASTIC_", "PLANARIA_", "SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class JobFailed(Exception):
    """A job raised: ``kind`` is the name of the exception's type, ``text`` its sentence."""

    def __init__(self, error: dict, who: str) -> None:
        super().__init__(f"{who}: {error['kind']}: {error['text']}\n{error['trace']}")
        self.kind, self.text = error["kind"], error["text"]


def worker_environment() -> dict[str, str]:
    """Return the environment of workers and scripts: nobody's launcher, one thread, loopback."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    # torch asks the name server for the name of every address that it connects to.
    ours = {"RES_OPTIONS": "timeout:1 attempts:1", "GLOO_SOCKET_IFNAME": "lo"}
    return kept | ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def all_say_ok(module, world, *arguments, cwd) -> None:
    """Run ``python -m module RANK WORLD ...`` as every rank: each prints ok and nothing else."""
    command = [sys.executable, "-W", "error", "-m", module]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(world), *map(str, arguments)],
            cwd=cwd,
            env=worker_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for rank, (out, err) in enumerate(said):
        assert out == "ok\n", f"rank {rank}: {err}"


def serve_store() -> object:
    """Return a torch store that listens on a free port of the loopback interface.

    On IPv4 alone: seen as IPv6, the addresses of its clients are not in /etc/hosts, and the whole
    store waits for the name server at every connection.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Worker:
    """One worker process. A job is started with ``start`` and its answer had with ``result``."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._log_from = 0
        self._said = b""
        self._events: list[str] = []
        self._answers: list[dict] = []
        self.process = self._launch()
        self.pid = self.process.pid

    def _launch(self) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.replica.worker", str(os.getpid())],
            cwd=ROOT,
            env=worker_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )

    def start(self, job: str, /, **args: object) -> None:
        """Begin a job; one at a time."""
        line = json.dumps({"job": job, "args": args}) + "\n"
        self.process.stdin.write(line.encode())

    def result(self, deadline_s: float = DEADLINE_S) -> object:
        """Return what the job under way returned; raise JobFailed if it raised."""
        self._read_until(lambda: self._answers, "an answer", deadline_s)
        answer = self._answers.pop(0)
        if "error" in answer:
            raise JobFailed(answer["error"], f"worker {self.pid}")
        return answer["value"]

    def call(self, job: str, /, deadline_s: float = DEADLINE_S, **args: object) -> object:
        """Run a job to its end."""
        self.start(job, **args)
        return self.result(deadline_s)

    def hear(self, event: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the worker has announced ``event``."""
        self._read_until(lambda: event in self._events, f"event {event!r}", deadline_s)
        self._events.remove(event)

    def stopped(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until all its threads stand still after SIGSTOP."""
        waiter = threading.Thread(
            target=os.waitid, args=(os.P_PID, self.pid, os.WSTOPPED), daemon=True
        )
        waiter.start()
        waiter.join(deadline_s)
        if waiter.is_alive():
            self.fail(f"did not stop within {deadline_s} s")

    def go_on(self) -> None:
        """Let a stopped worker run again, and its background process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                child.resume()
        self.process.send_signal(signal.SIGCONT)

    def died(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until it has died by SIGKILL."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.fail(f"did not die within {deadline_s} s")
        if code != -signal.SIGKILL:
            self.fail(f"ended with {code}, expected to be killed")

    def end(self) -> None:
        """Kill it, if it still runs, and let go of its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def forget_log(self) -> None:
        """What a failure shows begins here."""
        self._log_from = os.fstat(self._log.fileno()).st_size

    def log(self) -> str:
        """Return what it wrote to standard error in this test, the end of it if that is much."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_from, size - _LOG_BYTES_MAX)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace")

    def fail(self, what: str) -> None:
        """Fail the test, with the stacks of all threads and the log."""
        size = os.fstat(self._log.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        written = os.fstat(self._log.fileno()).st_size - size
        text = f"worker {self.pid} {what}\n--- its log, {written} bytes of stacks at the end\n"
        raise AssertionError(text + self.log())

    def _read_until(self, there: object, what: str, deadline_s: float) -> None:
        limit = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not there():
                if not selector.select(max(0.0, limit - time.monotonic())):
                    self.fail(f"did not give {what} within {deadline_s} s")
                some = os.read(self.process.stdout.fileno(), 1 << 16)
                if not some:
                    self.fail(f"ended with {self.process.wait()} instead of {what}")
                self._take(some)

    def _take(self, some: bytes) -> None:
        *lines, self._said = (self._said + some).split(b"\n")
        for message in map(json.loads, lines):
            if "event" in message:
                self._events.append(message["event"])
            else:
                self._answers.append(message)


class Pool:
    """``size`` workers, or as many as are wanted at once. ``give_back`` keeps the clean ones."""

    def __init__(self, size: int, make: Callable[[], Worker] = Worker) -> None:
        self._size, self._make = size, make
        self._idle: list[Worker] = []
        self._lent: list[Worker] = []

    def warm(self) -> None:
        """Start what is missing without waiting for it."""
        while len(self._idle) + len(self._lent) < self._size:
            self._idle.append(self._make())

    def take(self, count: int) -> list[Worker]:
        """Lend ``count`` workers that are ready."""
        self._size = max(self._size, len(self._lent) + count)
        self.warm()
        taken = [self._idle.pop(0) for _ in range(count)]
        self._lent += taken
        for worker in taken:
            worker.hear("ready")
            worker.forget_log()
        return taken

    def replace(self, worker: Worker) -> Worker:
        """Return a fresh worker for one that was killed."""
        self.remove(worker)
        (fresh,) = self.take(1)
        return fresh

    def remove(self, worker: Worker) -> None:
        """End a worker for good and start its successor."""
        self._lent.remove(worker)
        worker.end()
        self.warm()

    def give_back(self) -> None:
        """Take all lent workers back; those that do not come clean are replaced."""
        lent = list(self._lent)
        for worker in lent:
            with contextlib.suppress(OSError):
                worker.go_on()
                worker.start("reset")
        for worker in lent:
            try:
                # An answer that a failed test left unread comes first.
                while worker.result(deadline_s=20.0) != "clean":
                    pass
            except (JobFailed, AssertionError):
                self.remove(worker)
            else:
                self._lent.remove(worker)
                worker._events.append("ready")
                self._idle.insert(0, worker)

    @property
    def pids(self) -> set[int]:
        """Every worker that runs."""
        return {worker.pid for worker in self._idle + self._lent}

    def end(self) -> None:
        """End every worker."""
        for worker in self._idle + self._lent:
            worker.end()
        self._idle, self._lent = [], []


def results(workers: Sequence[Worker], deadline_s: float = DEADLINE_S) -> list:
    """Return the answers of jobs that were started on several workers, in their order."""
    return [worker.result(deadline_s) for worker in workers]


def failures(workers: Sequence[Worker], deadline_s: float = DEADLINE_S) -> list[tuple[str, str]]:
    """Return (kind, text) of the jobs under way, each of which must fail."""
    found = []
    for worker in workers:
        try:
            value = worker.result(deadline_s)
        except JobFailed as failed:
            found.append((failed.kind, failed.text))
        else:
            worker.fail(f"answered {value!r}, expected an error")
    return found
