"""State to shard image and back: what the driver calls.

Order and ownership. `capture_into` returns when every byte is in the caller's buffer: from then on
tensors and Python values may change; `begin_capture` may leave some tensors for later. `prepare`
copies out of the buffer and changes nothing; `LoadPlan.commit` then changes the live state and no
longer needs the buffer. The snapshot keeps views of the last buffers it wrote to, until the plan
changes or `forget_buffers` is called.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from replica import overlap, source
from replica.copied_optimizers import CopiedOptimizers
from replica.copies import CopyPlan
from replica.errors import StateError
from replica.fresh import LeafReader
from replica.image import Bytes, ShardHeader, read_image
from replica.leaves import LeafList
from replica.loading import LeftOut, Loader
from replica.pending import PendingGradients
from replica.predict import predicted_state_bytes
from replica.random_states import prepare_random_states
from replica.self_check import CHECK_HEADER, Captured, check_readable
from replica.source import NeedCapacity
from replica.state import Live, capture_state, kind_of, live_state, outline_state
from replica.steady import Asked, Recipe, recipe_for
from replica.tensor_kinds import MISALIGNED
from replica.torch_private import transform
from replica.tree import Node, is_readable, joined_text, leaf_names, tree_text
from replica.tree_reader import leaf_keys
from replica.unsupported import Unsupported, path_text

log = logging.getLogger("planaria")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a capture of the present state takes."""

    shard_bytes: int
    capacity_bytes: int
    """Buffer size with room for the Python values to grow."""
    fingerprint: str
    """Equal while geometry, sharing and sharding of all tensors stay the same."""
    tensors: int
    entries: int

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"{self.tensors} tensors in {self.entries} entries, shard of {self.shard_bytes} bytes, "
            f"buffer of {self.capacity_bytes}, plan {self.fingerprint[:8]}"
        )


class LoadPlan:
    """A restore that was checked and is ready to run."""

    def __init__(self, header: ShardHeader, actions: list[Callable[[], None]]) -> None:
        self.header = header
        self._actions: list[Callable[[], None]] | None = actions

    def commit(self) -> None:
        """Change the live state, random states last.

        Once only. An object whose own `load_state_dict` fails ends it with `StateError`; the
        state is then half old and half new, and this process must not train on.
        """
        if self._actions is None:
            raise StateError("this restore was committed before; prepare it anew")
        actions, self._actions = self._actions, None
        for action in actions:
            action()


class Snapshot:
    """The state of one rank: plans it, captures it into a buffer, loads it from one.

    `state` is kept by reference: objects, tensors and containers registered there are the live
    ones. Plain values at its top level are replaced in it on load.
    """

    def __init__(self, state: MutableMapping[str, object], *, random_states: bool) -> None:
        if not isinstance(state, MutableMapping):
            raise StateError(
                f"the state must be a dict of names to objects, got a {type(state).__name__}"
            )
        self._state = state
        self._random_states = random_states
        self._pending = PendingGradients(state)
        self._copied = CopiedOptimizers()
        self.strict = True
        """Whether `prepare` refuses a saved state that fits the live one in part only."""
        self.left_out = LeftOut()
        """What the last restore that was not strict has left out."""
        self.overlap: overlap.Overlap | None = None
        """What `begin_capture` asks which leaves it may leave for later; None: none."""
        self._copies: CopyPlan | None = None
        self._recipe: Recipe | None = None
        self._ahead: tuple[LeafList, bytes, CopyPlan] | None = None
        self._vain: Recipe | None = None
        """The recipe by which nothing could be read ahead."""

    def plan(self, rank: int, *, self_check: bool = False) -> Plan:
        """Walk the state as it is now, and with `self_check` read back what was written of it.

        Raises `StateError` that names rank, key path and type of what cannot be carried, or would
        not come back as it is.
        """
        self._pending.watch()
        self._copied.check(self._state, rank)
        seen: list[object] | None = [] if self_check else None
        with _collector_paused():
            leaves, tree, copies = self._capture(rank, seen=seen)
            if seen is not None:
                captured = Captured(
                    state=self._state, seen=seen, leaves=leaves, tree=tree, copies=copies
                )
                restore = partial(self._prepare, header=CHECK_HEADER, strict=True)
                check_readable(captured, rank, restore)
        return Plan(
            shard_bytes=copies.layout.tree_start + len(tree),
            capacity_bytes=copies.capacity_bytes(tree),
            fingerprint=copies.fingerprint,
            tensors=len(leaves.tensors),
            entries=len(copies.layout.entries),
        )

    def estimate_bytes(self, rank: int = 0) -> int:
        """Buffer size to reserve before the first step.

        The present state, and for optimizers that have not stepped what their kind will keep per
        parameter. Loaders are not asked, and optimizers of an unknown kind are guessed:
        `capture_into` asks for more if it must. Raises `StateError` like `plan`.
        """
        with _collector_paused():
            _, tree, copies = self._capture(rank, outline=True)
        return copies.capacity_bytes(tree) + predicted_state_bytes(self._state)

    def capture_into(self, buffer: Bytes, header: ShardHeader) -> int:
        """Capture the live state now into `buffer`; returns shard_bytes.

        `buffer` is a writable uint8[capacity]. When this returns every byte is there, and the
        caller may change tensors and values. Raises `NeedCapacity` before it writes if the buffer
        is too small, and `StateError` for a value that cannot be carried.
        """
        return self._capture_into(buffer, header, None).nbytes

    def begin_capture(self, buffer: Bytes, header: ShardHeader) -> source.Captured:
        """Capture the live state as of now, but for the leaves that `overlap` leaves for later.

        As `capture_into`, except that the caller has to `start` the late copy of what is returned,
        and to have it `finish` before anything reads `buffer` or writes to it.
        """
        return self._capture_into(buffer, header, self.overlap)

    def read_ahead(self) -> None:
        """Read what a capture reads before it copies; for one in which the state stays as it is.

        It is used by the next capture, unless anything is read in between or `forget_ahead` called.
        Nothing is read for the first capture, nor where objects would be asked for their state:
        that may be work for all ranks together, of whom some have no such save.
        """
        recipe = self._recipe
        if recipe is None or recipe is self._vain or transform():
            return
        with _collector_paused():
            self._ahead = self._capture_again(_ask_nobody)
        self._vain = recipe if self._ahead is None else None

    def forget_ahead(self) -> None:
        """Let go of what was read ahead and not used."""
        self._ahead = None

    def _capture_into(
        self, buffer: Bytes, header: ShardHeader, overlapping: overlap.Overlap | None
    ) -> source.Captured:
        _check_buffer(buffer)
        self._pending.check(header.step, header.owner)
        ahead, self._ahead = self._ahead, None
        with _collector_paused():
            leaves, tree, copies = ahead or self._capture(header.owner)
        if copies.layout.tree_start + len(tree) > buffer.nbytes:
            copies.forget_buffers()
            raise NeedCapacity(capacity_bytes=copies.capacity_bytes(tree), have_bytes=buffer.nbytes)
        late = overlapping.late(self._state, leaves, copies) if overlapping else frozenset()
        rest = copies.copy(leaves, buffer, late=late)
        nbytes = copies.layout.write_frame(buffer, header, tree)
        if overlapping is None or not rest.pieces:
            return source.Captured(nbytes)
        return source.Captured(nbytes, overlapping.begin(rest, leaves, copies, buffer))

    def prepare(self, buffer: Bytes) -> LoadPlan:
        """Parse an image and check it against the live state.

        `buffer` is uint8[n], n from shard_bytes to capacity, and may be read-only. Every tensor
        is copied to new memory. Raises `StateError` that lists missing, extra and different keys;
        changes nothing. Unless `strict`, keys without a counterpart and tensors of another dtype or
        shape are no error: they are left as they are, which the commit notes in `left_out`.
        """
        try:
            image = read_image(buffer)
            return self._prepare(LeafReader(image), header=image.header, strict=self.strict)
        except RecursionError:
            raise StateError(
                "the saved state is nested too deeply for what is left of this thread's stack; "
                "call restore from fewer levels of functions"
            ) from None

    def _prepare(self, reader: LeafReader, *, header: ShardHeader, strict: bool) -> LoadPlan:
        saved_state, saved_random = _root(reader.root)
        loader = Loader(reader, self._state)
        actions = loader.actions
        loader.load(saved_state)
        actions += loader.late_actions
        if self._random_states:
            if saved_random is None:
                loader.findings.missing.append("random states")
            else:
                states = loader.decoder.decode(saved_random)
                actions.append(prepare_random_states(states, loader.meshes.meshes))
        owner = header.owner
        left_out = loader.findings.check(owner, strict=strict)
        actions.append(partial(self._note_left_out, owner, left_out))
        return LoadPlan(header, actions)

    def _note_left_out(self, rank: int, left_out: LeftOut) -> None:
        self.left_out = left_out
        if left_out:
            log.warning("rank %d: restored what fits; left out: %s", rank, left_out.describe())

    def forget_buffers(self) -> None:
        """Let go of the views of buffers used before, so that their mappings can be closed."""
        if self._copies is not None:
            self._copies.forget_buffers()

    def _capture(
        self, rank: int, *, outline: bool = False, seen: list[object] | None = None
    ) -> tuple[LeafList, bytes, CopyPlan]:
        # Addresses of what is made when it is asked for hold until it is asked for again.
        self._ahead = None
        inside = transform()
        if inside:
            raise StateError(
                f"rank {rank}: the state cannot be read inside of {inside}, where tensors are "
                "written to later or not at all: save outside of it"
            )
        live = Asked(outline_state if outline else live_state)
        again = None if outline or seen is not None else self._capture_again(live)
        if again is not None:
            return again
        try:
            node, random_node, leaves = capture_state(
                self._state, random_states=self._random_states, live=live, seen=seen
            )
        except Unsupported as fault:
            raise StateError(f"rank {rank}: {fault.describe()}") from fault
        copies = self._copies
        names = _names(node, random_node)
        if copies is None or not (copies.has_names(names) and copies.matches(leaves)):
            try:
                copies = CopyPlan(leaves, names)
                _check_sharing(copies, node, random_node)
            except StateError as fault:
                raise StateError(f"rank {rank}: {fault}") from fault
        try:
            tree = tree_text(["tuple", node, random_node], copies.tables)
        except ValueError as fault:
            raise StateError(f"rank {rank}: the state is too large: {fault}") from fault
        if not outline:
            self._copies = copies
            self._recipe = recipe_for(self._state, node, random_node, leaves, live)
        return leaves, tree, copies

    def _capture_again(self, live: Live) -> tuple[LeafList, bytes, CopyPlan] | None:
        """Capture by what is known from the last time; None when the state has changed since."""
        recipe, copies = self._recipe, self._copies
        found = recipe.read(self._state, live) if recipe is not None else None
        if found is None or copies is None or not copies.matches(found[0]):
            return None
        tree = joined_text(found[1], copies.tables)
        return (found[0], tree, copies) if is_readable(tree) else None


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A walk makes many objects: the collector would look at all of the process's for nothing.

    With 4,000 tensors that took half of the first save's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ask_nobody(value: object) -> None:
    """For a reading that ends where an object would be asked for its state."""
    if kind_of(value) is not None:
        raise Unsupported(value, "which is not asked ahead of a save")


def _names(node: Node, random_node: Node) -> list[tuple[int, str]]:
    return [*leaf_names(node), *leaf_names(random_node, "planaria.random")]


def _check_sharing(copies: CopyPlan, node: Node, random_node: Node) -> None:
    if copies.misaligned is not None:
        keys = {**leaf_keys(node), **leaf_keys(random_node, ("planaria.random",))}
        one, other = (path_text(keys[leaf]) for leaf in copies.misaligned)
        raise StateError(f"{one} and {other} {MISALIGNED}")


def _root(node: Node) -> tuple[Node, Node]:
    if type(node) is not list or len(node) != 3 or node[0] != "tuple":
        raise StateError("shard image: the root of the tree is damaged")
    return node[1], node[2]


def _check_buffer(buffer: Bytes) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"need a contiguous uint8[n], got {buffer.dtype}{buffer.shape}")
    if not buffer.flags.writeable:
        raise ValueError("the buffer is read-only")
