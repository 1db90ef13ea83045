"""What a restore says of a live state that is not the saved one, and what it still loads."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from recovery.session import RestoreAborted
from replica.errors import SaveFailed, StateError
from replica.snapshot import Snapshot
from tests.replica.inprocess import Cluster
from tests.replica.snapshot_tools import image_of, load
from tests.replica.test_state import same

NODES = ["a", "b"]


def load_leniently(image, state):
    """Load what fits; the lists of what does not."""
    snapshot = Snapshot(state, random_states=False)
    snapshot.strict = False
    snapshot.prepare(image).commit()
    return snapshot.left_out.lists()


def model_of(value, names="abc", *, width=2):
    """Make a module of layers whose every value is one number."""
    layers = nn.ModuleDict({name: nn.Linear(2, width, bias=False) for name in names})
    for param in layers.parameters():
        nn.init.constant_(param, value)
    return layers


def values_of(layers):
    """Give the number in each layer."""
    return {name: layer.weight[0, 0].item() for name, layer in layers.items()}


def test_a_lenient_restore_loads_the_keys_that_fit(caplog):
    """One layer more, one less and one of another shape: listed once, and the rest is loaded."""
    saved, live = model_of(1.0, "abc"), model_of(0.0, "bcd")
    live["c"] = model_of(0.0, "c", width=3)["c"]
    image = image_of({"m": saved})
    with pytest.raises(StateError, match=r"to load what fits, restore\(strict=False\)"):
        load(image, {"m": live})
    assert values_of(live) == {"b": 0, "c": 0, "d": 0}
    assert load_leniently(image, {"m": live}) == {
        "missing": ["state['m']['a.weight']"],
        "extra": ["state['m']['d.weight']"],
        "unfit": ["state['m']['c.weight'] saved with shape [2, 2], has [3, 2]"],
    }
    assert values_of(live) == {"b": 1, "c": 0, "d": 0}
    (record,) = [one for one in caplog.records if "left out" in one.getMessage()]
    assert "state['m']['a.weight']" in record.getMessage()


def test_a_lenient_restore_never_casts():
    """A tensor of another dtype stays as it is, in a module and in a container."""
    live = {"m": model_of(0.0).double(), "t": torch.zeros(2, dtype=torch.int32)}
    left = load_leniently(image_of({"m": model_of(1.0), "t": torch.ones(2)}), live)
    assert values_of(live["m"]) == {"a": 0, "b": 0, "c": 0}
    assert live["t"].tolist() == [0, 0]
    assert left["unfit"] == [
        *(f"state['m']['{name}.weight'] saved as float32, is float64" for name in "abc"),
        "state['t'] saved as float32, is int32",
    ]


def test_a_lenient_restore_of_names_and_kinds():
    """Objects added and taken away since the save are listed, and what is left is loaded."""
    saved = {"m": model_of(1.0), "gone": model_of(1.0), "was": 7, "n": {"x": 1}}
    live = {"m": model_of(0.0), "new": model_of(0.0, "a"), "was": torch.Generator(), "n": {}}
    left = load_leniently(image_of(saved), live)
    assert left == {
        "missing": ["state['gone'] (module)"],
        "extra": ["state['new'] (module)", "state['was'] (torch.Generator)"],
        "unfit": [],
    }
    assert values_of(live["m"]) == {"a": 1, "b": 1, "c": 1}
    assert (values_of(live["new"]), live["n"]) == ({"a": 0}, {"x": 1})


def test_a_lenient_restore_keeps_what_is_live_in_containers():
    """Tensors and objects that were not saved stay in their dicts and lists, the rest is filled."""
    saved = {"d": {"t": torch.ones(1), "m": model_of(1.0)}, "l": [1, 2], "k": [model_of(1.0), 3]}
    tensor = torch.zeros(1)
    live = {"d": {"t": torch.zeros(1), "u": tensor, "p": 5}, "l": [7, 8, tensor], "k": []}
    left = load_leniently(image_of(saved), live)
    assert live["d"]["t"].item() == 1
    assert list(live["d"]) == ["t", "u"]
    assert live["d"]["u"] is tensor
    assert (live["l"][:2], live["l"][2] is tensor, live["k"]) == ([1, 2], True, [])
    assert left["missing"] == ["state['d']['m'] (module)", "state['k'][0] (module)"]
    assert left["extra"] == ["state['d']['u']", "state['l'][2]"]


def test_moments_of_a_parameter_that_was_left_are_left_too():
    """A layer of another shape begins without moments: the old ones do not fit it."""

    def build(width):
        layers = model_of(0.5, "ab")
        layers["b"] = model_of(0.5, "b", width=width)["b"]
        return layers, torch.optim.AdamW(layers.parameters(), lr=0.1)

    def train(layers, optim):
        for layer in layers.values():
            layer(torch.ones(1, 2)).sum().backward()
        optim.step()

    layers, optim = build(2)
    train(layers, optim)
    image = image_of({"optim": optim, "m": layers})
    layers, optim = build(3)
    left = load_leniently(image, {"optim": optim, "m": layers})
    assert left["unfit"] == [
        "state['optim'] 1 'exp_avg' saved with shape [2, 2], its parameter has [3, 2]",
        "state['optim'] 1 'exp_avg_sq' saved with shape [2, 2], its parameter has [3, 2]",
        "state['m']['b.weight'] saved with shape [2, 2], has [3, 2]",
    ]
    assert list(optim.state) == [layers["a"].weight]
    train(layers, optim)
    assert [int(optim.state[layer.weight]["step"]) for layer in layers.values()] == [2, 1]


def test_moments_of_a_parameter_without_saved_values_are_left_too():
    """A renamed layer stands where another stood: it does not get that one's moments."""
    layers = model_of(1.0, "ab")
    optim = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    layers["a"](torch.ones(1, 2)).sum().backward()
    layers["b"](torch.ones(1, 2)).sum().backward()
    optim.step()
    live = model_of(0.0, "ac")
    fresh = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
    left = load_leniently(image_of({"optim": optim, "m": layers}), {"optim": fresh, "m": live})
    assert left["missing"] == ["state['m']['b.weight']"]
    assert left["extra"] == ["state['m']['c.weight']"]
    assert list(fresh.state) == [live["a"].weight]


def test_an_optimizer_over_other_groups_is_left_as_it_is():
    """Its numbering means other parameters: nothing of it is loaded."""
    layers = model_of(1.0, "ab")
    optim = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    live = torch.optim.SGD(model_of(1.0).parameters(), lr=0.7, momentum=0.9)
    left = load_leniently(image_of({"optim": optim}), {"optim": live})
    assert left["unfit"] == [
        "state['optim'] saved with parameter groups of [2] parameters, has [3]"
    ]
    assert live.param_groups[0]["lr"] == 0.7


class Heavy(torch.optim.SGD):
    """With an option of its own, and torch's loader."""

    def __init__(self, params, *, weight, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group["weight"] = weight


def test_options_that_another_optimizer_did_not_save():
    """Torch's loader would drop them, and the next step would raise: listed, and left as it is."""
    image = image_of({"optim": torch.optim.SGD([torch.ones(1)], lr=0.5)})
    live = Heavy([torch.ones(1)], lr=0.7, weight=3)
    option = "state['optim']['param_groups'][0]['weight']"
    with pytest.raises(StateError, match=r"in the live state but not saved: .*'weight'"):
        load(image, {"optim": live})
    assert load_leniently(image, {"optim": live})["extra"] == [option]
    assert live.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("other", [torch.optim.Adam, torch.optim.RAdam, torch.optim.SGD])
def test_another_kind_of_optimizer_is_refused(other):
    """Torch puts the moments of one into another without a word. Lenient, it is left as it is."""
    image = image_of({"optim": torch.optim.AdamW([torch.ones(1)], lr=0.5)})
    live = other([torch.ones(1)], lr=0.7)
    text = f"state['optim'] saved as optimizer AdamW, is optimizer {other.__name__}"
    with pytest.raises(StateError, match=re.escape(text)):
        load(image, {"optim": live})
    assert load_leniently(image, {"optim": live})["unfit"] == [text]
    assert live.param_groups[0]["lr"] == 0.7
    live.param_groups[0]["params"][0].grad = torch.ones(1)
    live.step()


def test_names_of_parameters_may_be_new():
    """Torch's loader keeps those of the live groups, so none are missing."""
    image = image_of({"optim": torch.optim.SGD([torch.ones(1)], lr=0.5)})
    live = torch.optim.SGD([("w", torch.ones(1))], lr=0.7)
    load(image, {"optim": live})
    assert (live.param_groups[0]["lr"], live.param_groups[0]["param_names"]) == (0.5, ["w"])


@pytest.mark.parametrize(
    ("saved", "live", "text"),
    [
        (model_of(1.0), torch.optim.SGD([torch.ones(1)], lr=1.0), "saved as module, is optimizer"),
        (torch.Generator(), model_of(1.0), "saved as torch.Generator, is module"),
        (3, torch.ones(1), "is a tensor and was not saved as one"),
    ],
    ids=["optimizer", "generator", "tensor"],
)
def test_another_thing_under_one_name_is_an_error_in_both_modes(saved, live, text):
    """A name must mean one kind of thing."""
    image = image_of({"x": saved})
    for attempt in (load, load_leniently):
        with pytest.raises(StateError, match=text):
            attempt(image, {"x": live})


def test_weights_that_are_tied_otherwise_are_an_error_in_both_modes():
    """One memory cannot hold two saved values, and a tie that is gone would train apart."""
    tied = model_of(1.0)
    tied["a"].weight = tied["b"].weight
    for image, live in (
        (image_of({"m": model_of(1.0)}), tied),
        (image_of({"m": tied}), model_of(1.0)),
    ):
        for attempt in (load, load_leniently):
            with pytest.raises(StateError, match="memory"):
                attempt(image, {"m": live})


def test_names_that_differ_by_type_only_stay_apart():
    """0 and "0" are two objects, each with its own values."""
    state = {0: model_of(1.0), "0": model_of(2.0), (0,): 3}
    image = image_of(state)
    fresh = {0: model_of(0.0), "0": model_of(0.0), (0,): 0}
    load(image, fresh)
    assert values_of(fresh[0])["a"] == 1
    assert values_of(fresh["0"])["a"] == 2
    assert fresh[(0,)] == 3
    with pytest.raises(StateError, match=r"saved but not in the live state: state\['0'\]"):
        load(image, {0: model_of(0.0), (0,): 0})


# ---- DTensors


@pytest.fixture
def mesh():
    """Return a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def sharded(mesh, *placements):
    """Make a DTensor of ones."""
    return distribute_tensor(torch.ones(4, 2), mesh, placements or [Shard(0)])


@pytest.mark.parametrize("attempt", [load, load_leniently])
def test_plain_tensors_and_dtensors_never_stand_in_for_one_another(mesh, attempt):
    """Equal in shape and values, and refused both ways by name; so is another placement."""
    plain, whole = torch.ones(4, 2), sharded(mesh)
    transposed = DTensor.from_local(
        torch.ones(4, 2), mesh, [Shard(0)], shape=torch.Size([4, 2]), stride=(1, 4)
    )
    for saved, live, text in (
        (plain, whole, r"state\['t'\] saved as a plain tensor, is a DTensor"),
        (whole, plain, r"state\['t'\] saved as a DTensor, is a Tensor"),
        (whole, sharded(mesh, Shard(1)), r"saved with placements \['Shard\(dim=0\)'\], has"),
        (whole, sharded(mesh, Replicate()), r"saved with placements"),
        (whole, transposed, r"saved with strides \[2, 1\], has \[1, 4\]"),
    ):
        with pytest.raises(StateError, match=text):
            attempt(image_of({"t": saved}), {"t": live})


def trained(param):
    """Make an optimizer that has stepped on a parameter."""
    param = nn.Parameter(param)
    optim = torch.optim.AdamW([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optim.step()
    return optim


def test_moments_are_built_again_where_their_parameter_lies(mesh):
    """Moments come back as DTensors on the live mesh, with the parameter's placements."""
    first = trained(sharded(mesh))
    second = torch.optim.AdamW([nn.Parameter(sharded(mesh))], lr=0.5)
    load(image_of({"optim": first}), {"optim": second})
    (values,), (wanted,) = second.state.values(), first.state.values()
    assert isinstance(values["exp_avg"], DTensor)
    assert values["exp_avg"].placements == (Shard(0),)
    assert same(values["exp_avg"].to_local(), wanted["exp_avg"].to_local())


def test_moments_that_lie_otherwise_than_their_parameter_are_refused(mesh):
    """Plain moments for a sharded parameter, sharded ones for a plain one, another placement."""
    plain, whole = torch.ones(4, 2), sharded(mesh)
    for saved, live, text in (
        (plain, whole, r"state\['optim'\] 0 'exp_avg' saved as a plain tensor, its parameter is"),
        (whole, plain, r"state\['optim'\] 0 'exp_avg' saved as a DTensor, its parameter is none"),
        (whole, sharded(mesh, Shard(1)), r"0 'exp_avg' saved as .*Shard\(dim=0\).*Shard\(dim=1\)"),
    ):
        optim = torch.optim.AdamW([nn.Parameter(live)], lr=0.5)
        state = {"optim": optim, "beside": sharded(mesh)}
        with pytest.raises(StateError, match=text):
            load(image_of({"optim": trained(saved), "beside": whole}), state)
        assert not optim.state


# ---- all ranks together


def names(rank, *, more=False):
    """Give a rank's own state: names may differ from rank to rank."""
    state = {"m": model_of(rank + 1.0), f"part {rank}": [rank, torch.full((rank + 1,), 5.0)]}
    return state | ({"late": torch.Generator()} if more else {})


def saved_by(arena_dir):
    """Let two ranks save step 1."""

    def save(me):
        me.state.update(names(me.rank))
        me.ckpt.save(1).wait("committed", 30)

    Cluster(arena_dir, NODES, "copies:1", counts=[0, 0]).run(save)


def test_each_rank_has_a_list_of_its_own(arena_dir):
    """Names, shapes and values that differ by rank are kept by rank, not mixed and not refused."""
    saved_by(arena_dir)

    def restore(me):
        me.state.update({"m": model_of(0.0), f"part {me.rank}": []})
        assert me.ckpt.restore() == 1
        return values_of(me.state["m"])["a"], me.state[f"part {me.rank}"][0]

    found = Cluster(arena_dir, NODES, "copies:1", counts=[0, 0]).run(restore)
    assert found == [(1, 0), (2, 1)]


def test_a_list_that_differs_on_one_rank_is_an_error_on_all(arena_dir):
    """Rank 1 has one object more: both ranks hear which, nothing is changed, and then it works."""
    saved_by(arena_dir)

    def restore(me):
        me.state.update({"m": model_of(0.0), f"part {me.rank}": []})
        if me.rank == 1:
            me.state["late"] = torch.Generator()
        with pytest.raises(RestoreAborted) as caught:
            me.ckpt.restore()
        assert values_of(me.state["m"])["a"] == 0
        me.state.pop("late", None)
        assert me.ckpt.restore() == 1
        assert values_of(me.state["m"])["a"] == me.rank + 1
        return str(caught.value)

    for text in Cluster(arena_dir, NODES, "copies:1", counts=[0, 0]).run(restore):
        assert "rank 1: the saved and the live state do not match; nothing was changed" in text
        assert "in the live state but not saved: state['late'] (torch.Generator)" in text


def test_a_lenient_restore_of_all_ranks(arena_dir, caplog):
    """The same with strict=False on rank 1: all is loaded; its status and one warning name it."""
    saved_by(arena_dir)

    def restore(me):
        me.state.update({"m": model_of(0.0), f"part {me.rank}": []})
        if me.rank == 1:
            me.state["late"] = torch.Generator()
        assert me.ckpt.restore(strict=me.rank == 0) == 1
        assert values_of(me.state["m"])["a"] == me.rank + 1
        return me.ckpt.status()["left_out"]

    nothing = {"missing": [], "extra": [], "unfit": []}
    found = Cluster(arena_dir, NODES, "copies:1", counts=[0, 0]).run(restore)
    assert found == [nothing, nothing | {"extra": ["state['late'] (torch.Generator)"]}]
    (record,) = [one for one in caplog.records if "left out" in one.getMessage()]
    assert record.getMessage().startswith("rank 1: restored what fits; left out: in the live state")


def test_one_strict_rank_that_refuses_ends_it_for_all(arena_dir):
    """Rank 0 would take less, rank 1 is strict and has an object more: RestoreAborted on both."""
    saved_by(arena_dir)

    def restore(me):
        me.state.update({"m": model_of(0.0), f"part {me.rank}": []})
        if me.rank == 1:
            me.state["late"] = torch.Generator()
        with pytest.raises(RestoreAborted, match=r"rank 1: .*late"):
            me.ckpt.restore(strict=me.rank == 1)
        return values_of(me.state["m"])["a"]

    assert Cluster(arena_dir, NODES, "copies:1", counts=[0, 0]).run(restore) == [0, 0]


def test_with_nothing_to_restore_nothing_is_compared(arena_dir):
    """At a first start the ranks' lists may be any."""

    def restore(me):
        me.state.update(names(me.rank, more=me.rank == 1))
        return me.ckpt.restore()

    assert Cluster(arena_dir, NODES, "copies:1", counts=[0, 0]).run(restore) == [None, None]


# ---- one rank's error


def deep(me):
    """Put a list deep in the state, and give it."""
    hidden = [0, 1, 2, 3]
    me.state["a"] = {"b": hidden}
    return hidden


NAMED = ("rank 1", "state['a']['b'][3]", "_thread.lock")


def test_a_lock_on_one_rank_is_an_error_on_all_at_the_first_save(arena_dir):
    """Rank 1 alone hides a lock: StateError on both with rank, key path and type; then it works."""

    def body(me):
        hidden = deep(me)
        me.ckpt.start()
        if me.rank == 1:
            hidden[3] = threading.Lock()
        with pytest.raises(StateError) as caught:
            me.ckpt.save(1)
        hidden[3] = 3
        me.commit(2)
        assert me.ckpt.status()["committed_step"] == 2
        return str(caught.value)

    for text in Cluster(arena_dir, NODES, "copies:1").run(body):
        assert all(part in text for part in NAMED), text


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_lock_on_one_rank_fails_a_later_save_on_all(arena_dir, on_error):
    """A failed save on both ranks, told as on_error says; step 1 stays whole and step 3 works."""

    def body(me):
        hidden = deep(me)
        me.commit(1)
        if me.rank == 1:
            hidden[3] = threading.Lock()
        ticket = me.ckpt.save(2)
        with pytest.raises(SaveFailed) as caught:
            ticket.wait("committed", 30)
        assert me.ckpt.status()["committed_step"] == 1
        hidden[3] = 3
        if on_error == "raise":
            with pytest.raises(SaveFailed, match="step 2 was not committed"):
                me.ckpt.save(3)
        me.train(9)
        assert me.ckpt.restore() == 1
        assert me.state["a"] == {"b": [0, 1, 2, 3]}
        me.commit(3)
        return str(caught.value)

    for text in Cluster(arena_dir, NODES, "copies:1", on_error=on_error).run(body):
        assert all(part in text for part in NAMED), text
