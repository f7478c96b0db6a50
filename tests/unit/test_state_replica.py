"""A parameter's state in a tensor of its own, in a piece of a flat one, and in a range of that: read, written, changed."""

from dataclasses import replace

import pytest
import torch

from dsframe import Task
from dsframe.checkpoint.resume import _WithoutAverages
from dsframe.engines import after_step, state_replica
from dsframe.engines.deepspeed.state import _FlatView
from dsframe.engines.state_replica import ParameterView
from dsframe.errors import CheckpointError, TaskError
from dsframe.inference import Weights
from dsframe.model import ema
from dsframe.model.persistent import put
from dsframe.model.state import EngineState, ParameterState, narrowed, put_scalars, split
from tests.engines.snapshot import Snapshot

SHAPES = {"a": (2, 3), "b": (4,), "c": ()}


def views_of(flat):
    """Three parameters, with the optimizer's tensors: one for all, or one for each."""
    if flat:
        master = torch.nn.Parameter(torch.randn(11))
        return [
            ParameterView(name, shape, master, start)
            for (name, shape), start in zip(SHAPES.items(), (0, 6, 10), strict=True)
        ]
    return [ParameterView(name, shape, torch.nn.Parameter(torch.randn(shape))) for name, shape in SHAPES.items()]


def frozen_of():
    return [ParameterView("frozen", (3,), torch.randn(3))]


def adam(views):
    return torch.optim.AdamW(list(dict.fromkeys(view.master for view in views)))


def trained(flat):
    """Views, frozen ones, and the optimizer after two updates."""
    views, frozen = views_of(flat), frozen_of()
    optimizer = adam(views)
    for _ in range(2):
        for master in {view.master for view in views}:
            master.grad = torch.randn_like(master)
        optimizer.step()
    return views, frozen, optimizer


def saved(views, frozen, optimizer):
    return Snapshot(EngineState(2, None, {}, {}, state_replica.read(views, frozen, optimizer)))


def snapshot(*parameters):
    return Snapshot(EngineState(1, None, {}, {}, list(parameters)))


def contents(snapshot):
    return {
        name: [(key, tensor.tolist()) for key, tensor in {"": one.weight, **one.moments}.items()] + [one.scalars]
        for name, one in snapshot._parameters.items()
    }


@pytest.mark.parametrize("before", [False, True], ids=["flat", "apart"])
@pytest.mark.parametrize("after", [False, True], ids=["flat", "apart"])
def test_a_state_is_the_same_in_flat_tensors_and_in_separate_ones(before, after):
    first = saved(*trained(not before))
    others, frozen = views_of(not after), frozen_of()
    optimizer = adam(others)
    state_replica.write(others, frozen, optimizer, first)
    assert contents(saved(others, frozen, optimizer)) == contents(first)


@pytest.mark.parametrize("flat", [False, True], ids=["apart", "flat"])
def test_ranges_are_those_of_the_whole(flat):
    """Each parameter's, of weights and of moments, with the frozen one."""
    held = trained(flat)
    of_state = {parameter.name: parameter for parameter in state_replica.read(*held)}
    local = state_replica.shards(*held)
    assert [shard.name for shard in local] == list(of_state)
    for shard in local:
        whole = of_state[shard.name]
        for key, tensor in shard.tensors.items():
            complete = {"weight": whole.weight, **whole.moments}[key]
            assert tensor.shape == tuple(complete.shape)
            assert (tensor.first, tensor.size) == (0, complete.numel())
            assert torch.equal(tensor.read(), complete.flatten())


def test_state_of_another_shape_than_the_weight_has_its_own():
    view = ParameterView("a", (2, 3), torch.zeros(2, 3))
    optimizer = adam([view])
    optimizer.state[view.master] = {"row": torch.ones(2), "step": torch.tensor(1.0)}
    (shard,) = state_replica.shards([view], [], optimizer)
    assert (shard.tensors["row"].shape, shard.tensors["row"].size) == ((2,), 2)
    other = ParameterView("a", (2, 3), torch.zeros(2, 3))
    again = adam([other])
    state_replica.write([other], [], again, saved([view], [], optimizer))
    assert again.state[other.master]["row"].tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match=r"a: the optimizer's \[2\] cannot be cut into shares"):
        ParameterView("a", (2, 3), torch.zeros(6), 0).moment(torch.ones(2))


def test_counters_are_on_the_device_of_their_own_group():
    """Torch's capturable updates read them there; others on the CPU."""
    others = views_of(flat=False)
    others[1:] = [replace(view, master=view.master.detach().to("meta")) for view in others[1:]]
    masters = [view.master for view in others]
    optimizer = torch.optim.AdamW([{"params": masters[:1]}, {"params": masters[1:], "capturable": True}])
    state_replica.write(others, frozen_of(), optimizer, saved(*trained(flat=False)))
    assert [optimizer.state[master]["step"].device.type for master in masters] == ["cpu", "meta", "meta"]


class Counting(torch.optim.Optimizer):
    """An optimizer of others, as DeepSpeed's Adam is."""

    def __init__(self):
        super().__init__([torch.zeros(1)], {})


def test_other_optimizers_count_in_plain_numbers():
    held, cpu = {}, torch.device("cpu")
    put_scalars(Counting(), held, {"step": 3.0, "scale": 0.5, "warm": True}, {}, cpu)
    assert held == {"step": 3, "scale": 0.5, "warm": True}
    assert (type(held["step"]), type(held["warm"])) == (int, bool)
    muon = Counting()
    muon.aux_optimizer = torch.optim.AdamW([torch.zeros(1)])
    put_scalars(muon, held, {"step": 3.0}, {}, cpu)
    assert isinstance(held["step"], torch.Tensor), "of the Adam inside"


def test_counters_of_deepspeeds_optimizers_are_numbers_and_of_users_as_they_are(monkeypatch):
    held, kept = {"step": torch.tensor(3.0)}, []
    for module in ("deepspeed.ops", "mine"):
        monkeypatch.setattr(Counting, "__module__", module)
        kept.append(split(held, (2,), Counting()))
    assert kept == [({}, {"step": 3.0}), ({}, {"step": [3.0]})]


def test_another_model_or_counters_of_a_shared_tensor_that_differ_are_refused():
    views, frozen, optimizer = trained(flat=True)
    apart = trained(flat=False)
    apart[2].state[apart[0][1].master]["step"] += 1
    with pytest.raises(CheckpointError, match="but its neighbours"):
        state_replica.write(views, frozen, optimizer, saved(*apart))
    with pytest.raises(CheckpointError, match="another model"):
        state_replica.write(views[:2], frozen, optimizer, saved(views, frozen, optimizer))


def test_a_buffer_of_another_size_keeps_its_dtype():
    buffer = torch.zeros(1, dtype=torch.float64)
    put(torch.ones(2), buffer)
    assert (buffer.tolist(), buffer.dtype) == ([1.0, 1.0], torch.float64)


def test_a_view_writes_where_it_is_told_and_reads_in_fp32():
    view, other = ParameterView("a", (2,), torch.zeros(2, dtype=torch.bfloat16)), torch.zeros(2)
    view.put(torch.ones(2), other)
    assert (view.master.tolist(), other.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert view.whole(view.cut(view.master)).dtype == torch.float32
    optimizer = Counting()
    optimizer.param_groups[0]["params"] = [view.master]
    counted = ParameterState("a", torch.ones(2), {}, {"step": 3.0})
    state_replica.write([view], [], optimizer, snapshot(counted))
    assert optimizer.state[view.master] == {"step": 3}


def test_no_range_is_taken_of_state_of_another_shape():
    """As many numbers in another order are not the weight's."""
    turned = ParameterState("a", torch.ones(2, 3), {"exp_avg": torch.ones(3, 2)}, {})
    with pytest.raises(CheckpointError, match=r"a: the optimizer's exp_avg has shape \[3, 2\], the weight \[2, 3\]"):
        narrowed(turned, 0, 2)


def test_a_view_of_a_checkpoint_shows_ranges_as_it_shows_parameters():
    """Engines with shards evaluate averages, too, and keep none that the file does not ask for."""
    parameter = ParameterState("a", torch.zeros(3), {ema.KEY: torch.arange(3.0)}, {})
    checkpoint = snapshot(parameter)
    checkpoint.keeps = lambda key: True
    averages, without = Weights(checkpoint, averages=True), _WithoutAverages(checkpoint)
    assert averages.parameter("a").weight.tolist() == [0.0, 1.0, 2.0]
    assert averages.part("a", 1, 2).weight.tolist() == [1.0, 2.0]
    assert without.parameter("a").moments == without.part("a", 1, 2).moments == {}


def test_what_was_not_updated_before_a_save_is_not_updated_after_it():
    """An optimizer that has made a step, for example at its start, begins anew."""
    views, frozen = views_of(flat=False), frozen_of()
    fresh = saved(views, frozen, adam(views))
    others, beside, optimizer = trained(flat=False)
    state_replica.write(others, beside, optimizer, fresh)
    assert not optimizer.state
    assert contents(saved(others, beside, optimizer)) == contents(fresh)


def test_a_moment_that_is_none_is_made():
    """SGD's before its first update."""
    view = ParameterView("a", (2,), torch.zeros(2))
    optimizer = torch.optim.SGD([view.master], momentum=0.9)
    optimizer.state[view.master]["momentum_buffer"] = None
    parameter = ParameterState("a", torch.ones(2), {"momentum_buffer": torch.full((2,), 3.0)}, {})
    state_replica.write([view], [], optimizer, snapshot(parameter))
    assert optimizer.state[view.master]["momentum_buffer"].tolist() == [3.0, 3.0]


class Halving(Task):
    """Halves a weight by its largest number, or without it."""

    def __init__(self, elementwise):
        self.after_step_elementwise = elementwise

    def after_step(self, name, weight):
        weight.div_(2.0 if self.after_step_elementwise else weight.max())


def a_range():
    """Numbers 1 and 2 of a parameter ``[[9, 1], [2, 8]]``, at 3 in this rank's flat tensor; others have the rest."""
    master = torch.tensor([5.0, 5.0, 5.0, 1.0, 2.0, 5.0])
    gather = lambda held: torch.cat([torch.tensor([9.0]), held, torch.tensor([8.0])]).view(2, 2)  # noqa: E731
    return _FlatView("a", (2, 2), master, 3, 2, 1, gather)


@pytest.mark.parametrize(("elementwise", "after"), [(True, [0.5, 1.0]), (False, [1 / 9, 2 / 9])])
def test_after_a_step_a_task_writes_to_all_of_a_weight(elementwise, after):
    view, whole = a_range(), ParameterView("b", (2,), torch.tensor([4.0, 2.0]))
    after_step.call(Halving(elementwise), [view, whole])
    assert view.master.tolist() == [5.0, 5.0, 5.0, *(pytest.approx(number) for number in after), 5.0]
    assert whole.master.tolist() == ([2.0, 1.0] if elementwise else [1.0, 0.5])


def test_what_needs_the_whole_weight_is_not_element_wise():
    task = Halving(True)
    task.after_step = lambda name, weight: weight.div_(weight.norm())
    with pytest.raises(TaskError, match=r"Halving.after_step: \w*norm is not element-wise"):
        after_step.call(task, [a_range()])
