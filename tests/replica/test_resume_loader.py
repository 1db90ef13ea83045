"""Data loaders go on at the sample where they were: torchdata's own, with workers and without."""

from __future__ import annotations

import copy

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.replica.inprocess import Cluster
from tests.replica.snapshot_tools import image_of, load

# By torchdata's own code, in a torch that is newer than it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES, BATCH = 23, 4
BATCHES = -(-SAMPLES // BATCH)


class Numbers(torch.utils.data.Dataset):
    """Sample i is the number i."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        """Give the number."""
        return index


def loader_of(workers, seed=5, samples=None, *, own=True):
    """Make a shuffled loader with a generator of its own, or one that draws from torch's."""
    torch.manual_seed(seed)
    return StatefulDataLoader(
        samples or Numbers(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed) if own else None,
    )


class Reader:
    """Takes batches from a loader for ever, epoch after epoch, and notes the sample ids."""

    def __init__(self, loader):
        self.loader, self.ids, self._batches = loader, [], None

    def read(self, count):
        """Take so many batches; the ids of these, an empty list where an epoch ended."""
        found = []
        while count:
            if self._batches is None:
                self._batches = iter(self.loader)
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                found.append([])
            else:
                found.append(batch.tolist())
                count -= 1
        return found


def end_workers(loader):
    """End the workers of the iterator that there is, if any."""
    end = getattr(loader._iterator, "_shutdown_workers", None)
    if end is not None:
        end()


@pytest.fixture
def reader():
    """Return a function that makes a reader, whose workers end with the test.

    Left to the garbage collector they may take ten seconds.
    """
    made = []

    def make(*args, **options):
        made.append(Reader(loader_of(*args, **options)))
        return made[-1]

    yield make
    for one in made:
        end_workers(one.loader)


def state_of(loader):
    """Give what the loader draws from, and the loader."""
    return {"generator": loader.generator, "loader": loader}


PLACES = {"first": 0, "middle": 2, "last": BATCHES, "end": BATCHES}


def read_to(reader, place):
    """Read up to before the first batch, the middle, after the last, or the end that comes then."""
    found = reader.read(PLACES[place])
    if place == "end":
        assert next(reader._batches, None) is None
        reader._batches = None
    return found


@pytest.mark.parametrize(("workers", "own"), [(0, True), (0, False), (2, False)])
@pytest.mark.parametrize("place", PLACES)
def test_the_next_two_epochs_are_those_of_the_run_that_went_on(place, workers, own, reader):
    """A fresh loader takes the image and gives the same ids in the same epochs; all draws too."""
    uninterrupted = reader(workers, own=own)
    before = read_to(uninterrupted, place)
    wanted = uninterrupted.read(2 * BATCHES)
    drawn = torch.rand(2)
    saved = reader(workers, own=own)
    assert read_to(saved, place) == before
    image = image_of(state_of(saved.loader), random_states=True)
    assert saved.read(2 * BATCHES) == wanted
    assert torch.equal(torch.rand(2), drawn)
    again = reader(workers, seed=99, own=own)
    load(image, state_of(again.loader), random_states=True)
    assert again.read(2 * BATCHES) == wanted
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_restores_in_one_epoch(workers, reader):
    """Saved after two batches, and after two more by the run that took this: none is repeated."""
    wanted = reader(workers).read(2 * BATCHES)
    first = reader(workers)
    ids = first.read(2)
    image = image_of(state_of(first.loader))
    for seed in (98, 99):
        second = reader(workers, seed=seed)
        load(image, state_of(second.loader))
        ids += second.read(2)
        image = image_of(state_of(second.loader))
    last = reader(workers, seed=97)
    load(image, state_of(last.loader))
    ids += last.read(2 * BATCHES - 6)
    assert ids == wanted


def epochs_of(sampler, loader, at, stop=None):
    """Read to the end of the third epoch, or ``stop`` batches; the ids. ``at`` counts epochs."""
    found = []
    while at["epoch"] < 3:
        sampler.set_epoch(at["epoch"])
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == stop:
                return found
        at["epoch"] += 1
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, BATCHES, BATCHES + 2])
def test_what_a_program_sets_before_an_epoch_holds_in_the_one_that_goes_on(stop, workers):
    """A sampler is told the epoch after the restore, as before every other; draws are as ever."""

    def make():
        sampler = torch.utils.data.DistributedSampler(Numbers(), 1, 0, seed=3)
        loader = StatefulDataLoader(
            Numbers(), batch_size=BATCH, sampler=sampler, num_workers=workers
        )
        return sampler, loader, {"epoch": 0}

    torch.manual_seed(5)
    wanted = epochs_of(*make())
    drawn = torch.rand(2)
    torch.manual_seed(5)
    sampler, loader, at = make()
    assert epochs_of(sampler, loader, at, stop) == wanted[:stop]
    image = image_of({"loader": loader, "at": at}, random_states=True)
    end_workers(loader)
    sampler, loader, at = make()
    torch.manual_seed(6)
    load(image, {"loader": loader, "at": at}, random_states=True)
    assert epochs_of(sampler, loader, at) == wanted[stop:]
    assert torch.equal(torch.rand(2), drawn)


def test_a_copy_of_a_loader_that_was_restored_is_a_loader_of_its_own(reader):
    """What puts the draw back belongs to the copy, and goes with the first iterator."""
    first = reader(0)
    first.read(2)
    image = image_of(state_of(first.loader))
    wanted = first.read(3)
    second = reader(0, seed=9)
    load(image, state_of(second.loader))
    twin = copy.deepcopy(second.loader)
    assert Reader(twin).read(3) == wanted
    assert "_get_iterator" in vars(second.loader)
    assert second.read(3) == wanted
    assert "_get_iterator" not in {**vars(second.loader), **vars(twin)}


class Part(Numbers):
    """A rank's part, of a length of its own."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 9 + 4 * self.rank

    def __getitem__(self, index):
        """Give a number that no other rank has."""
        return 100 * self.rank + index


def test_each_rank_goes_on_in_its_own_part(arena_dir):
    """Two ranks with parts of unlike lengths stand at unlike places: each gets its own back."""

    def reader_of(me):
        found = Reader(loader_of(0, seed=me.rank, samples=Part(me.rank)))
        me.state.update(state_of(found.loader))
        return found

    def save(me):
        reader = reader_of(me)
        reader.read(1 + me.rank)
        me.ckpt.save(1).wait("committed", 30)
        return reader.read(6)

    def restore(me):
        reader = reader_of(me)
        assert me.ckpt.restore() == 1
        return reader.read(6)

    options = {"redundancy": "copies:1", "counts": [0, 0]}
    wanted = Cluster(arena_dir, ["a", "b"], **options).run(save)
    assert Cluster(arena_dir, ["a", "b"], **options).run(restore) == wanted
    assert all(id_ // 100 == rank for rank in range(2) for batch in wanted[rank] for id_ in batch)
