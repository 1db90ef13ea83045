"""State to shard image and back: what the driver calls.

Order and ownership. `capture_into` returns when every byte is in the caller's buffer: from then on
tensors and Python values may change. `prepare` copies out of the buffer and changes nothing;
`LoadPlan.commit` then changes the live state and no longer needs the buffer. The snapshot keeps
views of the last buffers it wrote to, until the plan changes or `forget_buffers` is called.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import numpy as np

from erasure.errors import PlanariaError
from replica.copies import CopyPlan
from replica.errors import StateError
from replica.fresh import LeafReader
from replica.image import Bytes, Image, ShardHeader, read_image
from replica.leaves import LeafList
from replica.loading import Loader
from replica.predict import predicted_state_bytes
from replica.random_states import prepare_random_states
from replica.state import capture_state
from replica.tree import Node, Unsupported, leaf_names, tree_text


class NeedCapacity(PlanariaError):
    """The state does not fit the buffer; nothing was written. `capacity_bytes` is what to bring."""

    def __init__(self, *, capacity_bytes: int, have_bytes: int) -> None:
        super().__init__(
            f"the shard needs a buffer of {capacity_bytes} bytes, this one has {have_bytes}"
        )
        self.capacity_bytes = capacity_bytes
        self.have_bytes = have_bytes


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
        self._copies: CopyPlan | None = None

    def plan(self, rank: int) -> Plan:
        """Walk the state as it is now.

        Raises `StateError` that names rank, key path and type of what cannot be carried.
        """
        leaves, tree, copies = self._capture(rank)
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
        _, tree, copies = self._capture(rank, outline=True)
        return copies.capacity_bytes(tree) + predicted_state_bytes(self._state)

    def capture_into(self, buffer: Bytes, header: ShardHeader) -> int:
        """Capture the live state now into `buffer`; returns shard_bytes.

        `buffer` is a writable uint8[capacity]. When this returns every byte is there, and the
        caller may change tensors and values. Raises `NeedCapacity` before it writes if the buffer
        is too small, and `StateError` for a value that cannot be carried.
        """
        _check_buffer(buffer)
        leaves, tree, copies = self._capture(header.owner)
        if copies.layout.tree_start + len(tree) > buffer.nbytes:
            copies.forget_buffers()
            raise NeedCapacity(capacity_bytes=copies.capacity_bytes(tree), have_bytes=buffer.nbytes)
        copies.copy(leaves, buffer)
        return copies.layout.write_frame(buffer, header, tree)

    def prepare(self, buffer: Bytes) -> LoadPlan:
        """Parse an image and check it against the live state.

        `buffer` is uint8[n], n from shard_bytes to capacity, and may be read-only. Every tensor
        is copied to new memory. Raises `StateError` that lists missing, extra and different keys;
        changes nothing.
        """
        try:
            return self._prepare(read_image(buffer))
        except RecursionError:
            raise StateError(
                "the saved state is nested too deeply for what is left of this thread's stack; "
                "call restore from fewer levels of functions"
            ) from None

    def _prepare(self, image: Image) -> LoadPlan:
        reader = LeafReader(image)
        saved_state, saved_random = _root(reader.root)
        loader = Loader(reader, self._state)
        actions = loader.actions
        loader.load(saved_state)
        if self._random_states:
            if saved_random is None:
                loader.findings.missing.append("random states")
            else:
                actions.append(prepare_random_states(loader.decoder.decode(saved_random)))
        loader.findings.check(image.header.owner)
        return LoadPlan(image.header, actions)

    def forget_buffers(self) -> None:
        """Let go of the views of buffers used before, so that their mappings can be closed."""
        if self._copies is not None:
            self._copies.forget_buffers()

    def _capture(self, rank: int, *, outline: bool = False) -> tuple[LeafList, bytes, CopyPlan]:
        try:
            node, random_node, leaves = capture_state(
                self._state, random_states=self._random_states, outline=outline
            )
        except Unsupported as fault:
            raise StateError(f"rank {rank}: {fault.describe()}") from fault
        copies = self._copies
        if copies is None or not copies.matches(leaves):
            copies = CopyPlan(leaves, _names(node, random_node))
        if not outline:
            self._copies = copies
        try:
            return leaves, tree_text(["tuple", node, random_node], copies.tables), copies
        except ValueError as fault:
            raise StateError(f"rank {rank}: the state is too large: {fault}") from fault


def _names(node: Node, random_node: Node) -> list[tuple[int, str]]:
    return [*leaf_names(node), *leaf_names(random_node, "planaria.random")]


def _root(node: Node) -> tuple[Node, Node]:
    if type(node) is not list or len(node) != 3 or node[0] != "tuple":
        raise StateError("shard image: the root of the tree is damaged")
    return node[1], node[2]


def _check_buffer(buffer: Bytes) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"need a contiguous uint8[n], got {buffer.dtype}{buffer.shape}")
    if not buffer.flags.writeable:
        raise ValueError("the buffer is read-only")
