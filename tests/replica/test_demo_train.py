"""The demo's training: bit-deterministic, resumable, judged by a digest that misses nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch

from replica.demo.compare import compare, outcome
from replica.demo.data import TextLoader, standard_library_text
from replica.demo.guard import is_foreign
from replica.demo.journal import Journal, JournalReader, parse_line
from replica.demo.model import ByteGPT, ModelConfig
from replica.demo.nodes import Place, start_reference_worker
from replica.demo.run import running_store
from replica.demo.state_digest import state_digest
from replica.demo.train import parse_options

STEPS = 4


@pytest.mark.real
def test_two_runs_are_the_same_bit_for_bit(tmp_path, arena_dir):
    """Two runs of two ranks in fresh processes give equal losses and states, one per rank."""
    places = [make_place(tmp_path / name, arena_dir / name) for name in ("one", "two")]
    with running_store(places[0]) as first, running_store(places[1]) as second:
        workers = start_run(places[0], first) + start_run(places[1], second)
        codes = [worker.wait(100) for worker in workers]
    assert codes == [0] * 4, [path.read_text() for path in tmp_path.rglob("*.log")]
    one, two = (outcome(JournalReader(place.journal_dir("run")).new_lines()) for place in places)
    assert len(one.losses) == 2 * STEPS
    assert len(set(one.digests.values())) == 2
    assert compare(one, two, world=2, steps=STEPS).differences == ()


def make_place(work_dir, arenas_dir):
    """Return directories for one plain run, which has no arenas."""
    work_dir.mkdir()
    run_id = f"test-{os.getpid()}-{work_dir.name}"
    return Place(run_id=run_id, work_dir=work_dir, arenas_dir=arenas_dir)


def start_run(place, store):
    """Start two ranks of one plain run."""
    train = ["--no-checkpoint", "--device", "cpu", "--steps", str(STEPS), "--seed", "3"]
    train += ["--journal-dir", str(place.journal_dir("run"))]
    return [
        start_reference_worker(place, rank=rank, world=2, store=store, train=train)
        for rank in range(2)
    ]


def make_loader(rank=0, world=2, text=None):
    """Return a small loader over the real text."""
    text = standard_library_text() if text is None else text
    return TextLoader(text, rank=rank, world=world, batch=2, context=16)


def draw(loader, batches):
    """Return the bytes of some batches."""
    return [torch.stack(loader.next_batch()) for _ in range(batches)]


def seed_loader(shift, noise=1):
    """Seed the two random states that a loader draws from."""
    random.seed(shift)
    np.random.seed(noise)  # noqa: NPY002 - the loader draws from the global state


def test_loader_goes_on_where_it_was():
    """Position and random states, given to a new loader, give the same bytes."""
    seed_loader(1)
    loader = make_loader()
    draw(loader, 3)
    position, shift = loader.state_dict(), random.getstate()
    noise = np.random.get_state()  # noqa: NPY002 - the loader draws from the global state
    expected = draw(loader, 4)
    seed_loader(2, 2)
    resumed = make_loader()
    resumed.load_state_dict(position)
    random.setstate(shift)
    np.random.set_state(noise)  # noqa: NPY002 - the same
    assert all(torch.equal(a, b) for a, b in zip(expected, draw(resumed, 4), strict=True))


def test_each_random_state_changes_the_bytes():
    """A resume that forgets either random state, or the position, reads other bytes."""
    seed_loader(1)
    reference = draw(make_loader(), 20)
    seed_loader(2)
    other_shift = draw(make_loader(), 20)
    seed_loader(1, 2)
    other_noise = draw(make_loader(), 20)
    seed_loader(1)
    moved = make_loader()
    moved.load_state_dict(moved.state_dict() | {"position": 2})
    for other in (other_shift, other_noise, draw(moved, 20)):
        assert any(not torch.equal(a, b) for a, b in zip(reference, other, strict=True))


def test_ranks_read_different_windows():
    """In one pass over the text no window is read twice, by whichever rank."""
    text = np.arange(16 * 30, dtype=np.int64).astype(np.uint8)
    loaders = [make_loader(rank, 2, text) for rank in range(2)]
    starts = [
        (position * 2 + rank) * 7919 % 29 for position in range(14) for rank in range(len(loaders))
    ]
    assert len(set(starts)) == len(starts)
    inputs, targets = loaders[0].next_batch()
    assert inputs.shape == targets.shape == (2, 16)
    assert inputs.dtype == torch.int64


def test_loader_refuses_another_text():
    """A position saved over another text is an error, not another sequence of bytes."""
    state = make_loader(text=np.zeros(1000, np.uint8)).state_dict()
    with pytest.raises(ValueError, match="text_digest is"):
        make_loader(text=np.ones(1000, np.uint8)).load_state_dict(state)
    with pytest.raises(ValueError, match="windows is"):
        make_loader(text=np.zeros(2000, np.uint8)).load_state_dict(state)
    with pytest.raises(ValueError, match="must hold 2 windows"):
        make_loader(text=np.zeros(20, np.uint8))


def test_model_has_the_stated_size_and_drops_values():
    """The parameter count is the documented one; two passes differ in training only."""
    torch.manual_seed(0)
    model = ByteGPT(ModelConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 136_960
    inputs = torch.arange(128).view(2, 64)
    assert model(inputs, inputs) != model(inputs, inputs)
    model.eval()
    assert model(inputs, inputs) == model(inputs, inputs)


@pytest.mark.parametrize(
    ("field", "value"),
    [("context", 0), ("features", -64), ("heads", 3), ("layers", 0), ("dropout", 1.0)],
)
def test_model_sizes_are_checked(field, value):
    """A size that cannot be built is refused, by the name of its field."""
    with pytest.raises(ValueError, match=field):
        ModelConfig(**{field: value})


BASE = {"a": torch.arange(4.0), "b": [1, (2.0, None)], "c": np.arange(3), "d": {"x": True}}


def test_digest_is_of_the_values():
    """Equal values in other memory give the same digest."""
    twin = {"a": torch.arange(4.0), "b": [1, (2.0, None)], "c": np.arange(3), "d": {"x": True}}
    assert state_digest(BASE) == state_digest(twin)


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.tensor([0.0, 1.0, 2.0, np.nextafter(np.float32(3), np.float32(4))])},
        {"a": torch.arange(4.0).double()},
        {"a": torch.arange(4.0).view(2, 2)},
        {"b": [1, [2.0, None]]},
        {"b": [True, (2.0, None)]},
        {"b": [1, (2, None)]},
        {"b": [1, (2.0, None), 3]},
        {"c": np.arange(3, dtype=np.int32)},
        {"c": np.arange(1, 4)},
        {"d": {"y": True}},
        {"d": OrderedDict(x=True)},
        {"e": None},
    ],
    ids=str,
)
def test_digest_sees_every_difference(change):
    """One bit, dtype, shape, container, key, type or extra entry changes the digest."""
    assert state_digest(BASE) != state_digest(BASE | change)


def test_digest_sees_the_order_of_keys():
    """The same entries in another order are another state."""
    assert state_digest({"a": 1, "b": 2}) != state_digest({"b": 2, "a": 1})
    assert state_digest({"a": 1}) != state_digest({0: 1})


def test_digest_refuses_what_it_cannot_judge():
    """An unknown value is named, never skipped."""
    with pytest.raises(TypeError, match=r"/'a'/0: a object"):
        state_digest({"a": [object()]})


def test_journal_lines_come_back_exactly(tmp_path):
    """What is written is read once, losses to the last bit; a cut line waits for its end."""
    journal, reader = Journal(tmp_path, node="n"), JournalReader(tmp_path)
    journal.identify(rank=1, world=2, round_id="r")
    journal.step(1, 1 / 3)
    (line,) = reader.new_lines()
    assert (line.event, line.node, line.rank, line.world, line.round_id) == ("step", "n", 1, 2, "r")
    assert float.fromhex(line.facts["loss_bits"]) == 1 / 3
    (path,) = tmp_path.glob("*.journal")
    with path.open("ab") as file:
        file.write(b'{"event": "start", "at_s": 1.0, ')
        file.flush()
        assert reader.new_lines() == []
        file.write(b'"node": "n", "pid": 1}\n')
    assert [entry.event for entry in reader.new_lines()] == ["start"]
    assert reader.new_lines() == []


@pytest.mark.parametrize("text", ["[]", "{}", "nothing", '{"event": "step"}'])
def test_foreign_lines_are_refused(text):
    """A line that no worker writes is an error, not an empty event."""
    with pytest.raises(ValueError, match=r"journal|Expecting"):
        parse_line(text)


@pytest.mark.parametrize(
    ("path", "foreign"),
    [
        ("/tmpfs/run/node-1/head", True),
        ("/tmpfs/run/node-00", True),
        ("/tmpfs/run", True),
        ("/tmpfs/run/node-0", False),
        ("/tmpfs/run/node-0/user/slot", False),
        ("/tmpfs/running/node-1", False),
        ("/etc/hosts", False),
    ],
)
def test_foreign_arenas_are_told_from_own(path, foreign):
    """Only what lies among the run's arenas and not in the node's own counts."""
    assert is_foreign(path, own="/tmpfs/run/node-0", all_arenas="/tmpfs/run") is foreign


GUARDED = """
import sys
from pathlib import Path
from replica.demo.guard import guard_arenas
own = Path(sys.argv[1])
guard_arenas(own, lambda path: print("noted", path))
(own / "mine").write_text("x")
try:
    (own.parent / "node-1" / "theirs").read_text()
except PermissionError as error:
    print("refused", error)
"""


@pytest.mark.real
def test_opening_another_nodes_arena_fails_and_is_noted(tmp_path):
    """The own file opens, the peer's does not; in a process of its own: no hook goes away."""
    for node in ("node-0", "node-1"):
        (tmp_path / node).mkdir()
    (tmp_path / "node-1" / "theirs").write_text("secret")
    told = subprocess.run(
        [sys.executable, "-c", GUARDED, str(tmp_path / "node-0")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    assert told[0] == f"noted {tmp_path}/node-1/theirs"
    assert told[1].startswith(f"refused {tmp_path}/node-1/theirs is another node's arena")
    assert (tmp_path / "node-0" / "mine").read_text() == "x"


def test_training_options_are_read():
    """The worker's command line arrives in its fields."""
    options = parse_options(
        ["--steps", "3", "--seed", "2", "--device", "cpu", "--no-checkpoint", "--sabotage"]
    )
    assert (options.steps, options.seed, options.device) == (3, 2, "cpu")
    assert (options.checkpoint, options.sabotage, options.guard_arenas) == (False, True, False)
    assert parse_options([]).checkpoint
