"""One late copy: memory that is copied after ``save`` has returned, before an optimizer changes it.

The pieces lie in one list. A thread of ours takes one after another, and whoever cannot wait for it
takes what is left (``help``). A copy ends once: whole, or given up with a reason; given up, no
piece is begun any more, and it has ended for its memory when the pieces under way have returned
(P22).

Three nets catch who changes the memory in between, none of them a promise but the last: the version
counters of the tensors, which `.data` and fused kernels leave alone; the address of each storage,
which a move to shared memory changes; and with ``check`` the digests of all bytes, before and
after.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from erasure.digest import digest
from erasure.errors import PlanariaError
from replica.at_exit import THREAD_PREFIX
from replica.changes import Changes
from replica.errors import SaveFailed, StateError
from replica.memcopy import PIECE_BYTES, Piece, copy_pieces

log = logging.getLogger("planaria")


@dataclass(frozen=True)
class LateTensor:
    """A tensor that is copied late. ``watched``: the same, or the DTensor around it."""

    name: str
    watched: torch.Tensor
    storage: torch.UntypedStorage
    """Held, for the tensor may be given another one before it is copied."""
    address: int
    version: int


class LateCopy:
    """Copies ``pieces`` once; piece i belongs to ``tensors[owners[i]]``. ``keep`` holds the target.

    Made in the training thread: with ``check`` that reads every byte once. ``start`` begins.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        owners: Sequence[int],
        tensors: Sequence[LateTensor],
        *,
        keep: object,
        rank: int,
        check: bool = False,
    ) -> None:
        self.nbytes = sum(nbytes for _, _, nbytes in pieces)
        self._pieces, self._owners, self._tensors = pieces, owners, tensors
        self._keep, self._rank, self._pid = keep, rank, os.getpid()
        self._before = [_digest(source, size) for _, source, size in pieces] if check else []
        self._turns = list(_turns(pieces))
        self._next = self._copied = self._running = 0
        self._started = self._over = False
        self._failure: PlanariaError | None = None
        self._on_ended: Callable[[], None] = _nothing
        self._changes = Changes()
        self._lock = self._changes.lock

    def start(self, on_ended: Callable[[], None]) -> None:
        """Begin in the background; ``on_ended`` is called once, when nothing touches the target.

        Where no thread can be started any more (the interpreter ends) all is
        copied here.
        """
        self._on_ended, self._started = on_ended, True
        name = f"{THREAD_PREFIX}late copy"
        try:
            threading.Thread(target=self._copy_all, name=name, daemon=True).start()
        except RuntimeError:
            self._copy_all()
        except BaseException:
            self.give_up(SaveFailed("interrupted before the late copy had begun"))
            raise

    def help(self, timeout_s: float) -> None:
        """Copy here what nobody has begun, and wait for the rest.

        Returns when the copy has ended, and gives it up at the deadline: training goes on, and the
        save is aborted.
        """
        # In a forked child the threads are its parent's, and so is the save.
        if self._pid != os.getpid():
            return
        if not self._started:
            # Interrupted before that, and nobody keeps the target for it.
            self.give_up(SaveFailed("the late copy was never begun"))
        self._turn(everything=True)
        self._wait(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Wait until every byte is in place. Raises StateError or SaveFailed where one is not."""
        self._wait(timeout_s)
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def give_up(self, failure: PlanariaError) -> None:
        """Begin no further piece; ``finish`` raises ``failure`` unless the copy is whole by now."""
        with self._lock:
            if not self._over:
                self._over, self._failure = True, failure
            on_ended = self._settle()
        self._tell(on_ended)

    def _wait(self, timeout_s: float) -> None:
        if self._changes.wait_for(lambda: self._over, timeout_s):
            return
        with self._lock:
            turns, running = len(self._turns) - self._next, self._running
        self.give_up(
            SaveFailed(
                f"rank {self._rank}: the late copy of {self.nbytes} bytes did not end within "
                f"{timeout_s:.1f} s: {turns} of {len(self._turns)} parts were not begun, {running} "
                "were under way; is this node's memory overloaded, or was the process stopped?"
            )
        )

    def _copy_all(self) -> None:
        """In the thread of this copy."""
        try:
            while self._turn():
                pass
        except Exception:
            log.exception("rank %d: the late copy broke off", self._rank)

    def _turn(self, *, everything: bool = False) -> bool:
        """Copy the next part, or all that is left; False: nobody has to begin anything more."""
        taken, copied = False, 0
        try:
            with self._lock:
                first, last = self._next, len(self._turns)
                if self._over or first == last:
                    return False
                last = last if everything else first + 1
                self._next, taken = last, True
                self._running += 1
            numbers = range(self._turns[first].start, self._turns[last - 1].stop)
            self._move(numbers)
            copied = len(numbers)
        except PlanariaError as failure:
            self.give_up(failure)
        except BaseException as error:
            self.give_up(SaveFailed(f"{type(error).__name__} in the late copy: {error}"))
            raise
        finally:
            if taken:
                self._return(copied)
        return True

    def _move(self, numbers: range) -> None:
        for owner in dict.fromkeys(self._owners[number] for number in numbers):
            self._check_address(self._tensors[owner])
        copy_pieces(self._pieces[numbers.start : numbers.stop], self)
        for number in numbers if self._before else ():
            self._check_digest(number)

    def _return(self, copied: int) -> None:
        with self._lock:
            self._running -= 1
            self._copied += copied
            if not self._over and self._copied == len(self._pieces):
                self._over, self._failure = True, self._changed_tensor()
            on_ended = self._settle()
        self._tell(on_ended)

    def _settle(self) -> Callable[[], None]:
        """Under the lock: tell who waits; what is to be called when the lock is left."""
        self._changes.tell()
        if not self._over or self._running:
            return _nothing
        on_ended, self._on_ended = self._on_ended, _nothing
        # The memory is free from here on, whatever still refers to this.
        self._keep, self._tensors = None, ()
        return on_ended

    def _tell(self, on_ended: Callable[[], None]) -> None:
        """Whoever waits for the end may be gone, and this may be the optimizer's thread."""
        try:
            on_ended()
        except Exception:
            log.exception("rank %d: the end of a late copy is told to nobody", self._rank)

    def _changed_tensor(self) -> StateError | None:
        for tensor in self._tensors:
            if tensor.watched._version != tensor.version:  # noqa: SLF001 - it has no public name
                return self._broken(tensor, "was changed")
        return None

    def _check_address(self, tensor: LateTensor) -> None:
        if tensor.storage.data_ptr() != tensor.address:
            raise self._broken(tensor, "was moved to other memory")

    def _check_digest(self, number: int) -> None:
        target, _, nbytes = self._pieces[number]
        if _digest(target, nbytes) != self._before[number]:
            raise self._broken(self._tensors[self._owners[number]], "was changed")

    def _broken(self, tensor: LateTensor, what: str) -> StateError:
        return StateError(
            f"rank {self._rank}: {tensor.name} {what} after save() had returned and before an "
            'optimizer\'s step, which overlap=True does not allow: call ticket.wait("staged") '
            "before you do that, or save without overlap"
        )


def _nothing() -> None:
    """Nobody waits for the end of it."""


def _turns(pieces: Sequence[Piece]) -> Iterator[range]:
    """Numbers of pieces that are copied in one go: about as many bytes as one large piece has."""
    begin = nbytes = 0
    for number, (_, _, size) in enumerate(pieces):
        if nbytes and nbytes + size > PIECE_BYTES:
            yield range(begin, number)
            begin, nbytes = number, 0
        nbytes += size
    if pieces:
        yield range(begin, len(pieces))


def _digest(address: int, nbytes: int) -> bytes:
    return digest(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))
