"""What each micro-batch counts where a task's loss is a mean over numbers of items that differ."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from dsframe import Task
from dsframe.config.resolve.batch import Batch
from dsframe.errors import TaskError
from dsframe.model.built import BuiltModel
from dsframe.model.forward import loss_of
from dsframe.model.micro_batch import MicroBatch
from dsframe.trainer import Trainer
from dsframe.training.weighting import LossWeights, refuse

PADDING = -100


class Padded(Task):
    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, ignore_index=PADDING)

    def loss_weight(self, targets):
        return (targets != PADDING).sum()


class Masked(Padded):
    """The mean as people write it, whose backward pass divides by nothing where nothing counts."""

    def loss(self, outputs, targets):
        counts = (targets != PADDING).float()
        return ((outputs - targets) ** 2 * counts).sum() / counts.sum()


class Plain(Padded):
    loss_weight = Task.loss_weight


def padded(number):
    return torch.arange(6).masked_fill(torch.arange(6) >= number, PADDING)


def factors(counts, batch, task):
    """By rank. ``counts``: of each rank's micro-batches, how many of 6 targets are no padding."""
    row = []

    def on(rank, total):
        world = SimpleNamespace(rank=rank, size=len(counts))
        plan = SimpleNamespace(task=task, batch=batch, world=world, device=torch.device("cpu"))
        step = [(number, padded(number)) for number in counts[rank]]
        if batch.sequence_parallel_size > 1:  # each rank reads whole rows, and takes its slice
            step = [(0, torch.cat([padded(number) for (number,) in counts]).unsqueeze(0))]
        engine = SimpleNamespace(plan=plan, sum_over_ranks=total)
        weights = LossWeights(engine)
        return [float(one.weight) for one in weights.settle(iter(step))]

    def collect(value):
        row.append(value.item())
        return value

    for rank in range(len(counts)):
        on(rank, collect)
    return [on(rank, lambda value: torch.full_like(value, sum(row))) for rank in range(len(counts))]


def batch(ranks, micro_batches, **more):
    return Batch(12 * ranks * micro_batches, 12, micro_batches, ranks, **more)


def test_every_item_of_a_step_counts_the_same():
    assert factors([[6, 2], [0, 4]], batch(2, 2), Padded()) == [
        [2.0, pytest.approx(2 / 3)],
        [0.0, pytest.approx(4 / 3)],
    ]
    assert factors([[6, 2], [0, 4]], batch(2, 2), Plain()) == [[1.0, 1.0], [1.0, 1.0]]
    assert factors([[0], [0]], batch(2, 1), Padded()) == [[0.0], [0.0]]


def test_ranks_that_read_the_same_samples_count_them_once():
    tensor_parallel = factors([[6], [6], [2], [2]], batch(2, 1, tensor_parallel_size=2), Padded())
    assert tensor_parallel == [[1.5], [1.5], [0.5], [0.5]]


def test_slices_of_a_sequence_count_by_what_counts_in_them():
    """The mean over both ranks is that over all items: (1.5 x the first's mean + 0.5 x the second's) / 2."""
    assert factors([[6], [2]], batch(1, 1, sequence_parallel_size=2), Padded()) == [[1.5], [0.5]]
    refuse(Padded(), batch(1, 1, sequence_parallel_size=2))


class Summed(Plain):
    loss_is = "sum"


def test_a_sum_is_that_of_all_micro_batches_and_ranks():
    assert factors([[6, 2], [0, 4]], batch(2, 2), Summed()) == [[4.0, 4.0]] * 2


def test_sums_of_slices_are_refused():
    with pytest.raises(TaskError, match=r'Summed\.loss_is = "sum" cannot be used with sequence parallelism'):
        refuse(Summed(), batch(1, 1, sequence_parallel_size=2))
    refuse(Summed(), batch(2, 1))


def test_a_weight_is_for_means(monkeypatch):
    monkeypatch.setattr(Summed, "loss_weight", Padded.loss_weight)
    with pytest.raises(TaskError, match=r"Summed has loss_weight, which is for means"):
        refuse(Summed(), batch(1, 1))


@pytest.mark.parametrize(("weight", "found"), [(torch.ones(3), r"shape \[3\]"), (None, "NoneType")])
def test_a_weight_is_one_number(weight, found, monkeypatch):
    monkeypatch.setattr(Padded, "loss_weight", lambda self, targets: weight)
    with pytest.raises(TaskError, match=rf"Padded\.loss_weight returned {found}; return one number"):
        factors([[6]], batch(1, 1), Padded())


def test_nothing_but_padding_has_no_loss_and_no_gradient():
    scores, targets = torch.randn(6, 8, requires_grad=True), torch.full((6,), PADDING)
    loss = loss_of(Padded(), scores, MicroBatch(None, targets, torch.tensor(0.0)), {})
    loss.backward()
    assert loss.item() == 0
    assert not scores.grad.any()
    again = torch.ones(6, requires_grad=True)
    loss_of(Masked(), again * 2, MicroBatch(None, targets, torch.tensor(0.0)), {}).backward()
    assert not again.grad.any()


@pytest.mark.parametrize("weight", [torch.tensor(0), 0.0])
def test_nothing_but_padding_spoils_no_evaluation(weight, monkeypatch):
    monkeypatch.setattr(Padded, "loss_weight", lambda self, targets: weight)
    found = Padded().metrics(torch.randn(6, 8), torch.full((6,), PADDING))["loss"]
    assert (float(found.total), float(found.count)) == (0.0, 0.0)


@pytest.mark.parametrize("task", [Plain(), Summed()])
def test_batches_of_several_sizes_that_count_the_same_are_said_once(task, capsys):
    """Of a mean with a collate; a batch of which tensors have several lengths shows no number of rows."""
    task.collate = torch.utils.data.default_collate
    world = SimpleNamespace(rank=0, size=1, is_main=True)
    weights = LossWeights(SimpleNamespace(plan=SimpleNamespace(task=task, batch=batch(1, 1), world=world)))
    lines = []
    for inputs, targets in ((2, 2), (5, 2), (2, 2), (3, 3), (4, 4)):
        (one,) = weights.settle(iter([(torch.zeros(inputs, 3), torch.zeros(targets))]))
        assert one.weight == 1.0
        lines.append(capsys.readouterr().err)
    expected = "makes micro-batches of 2 and of 3 rows, which count the same"
    assert [expected in line for line in lines] == [False, False, False, task.loss_is == "mean", False]
    assert not any(lines[:3])


def test_a_long_step_gives_signs_of_life():
    """All of its micro-batches have been read by then."""
    trainer = object.__new__(Trainer)
    trainer._watchdog = watchdog = MagicMock()
    trainer._trial = MagicMock(watched=lambda batch, index: batch)
    trainer.training, trainer.engine = MagicMock(first_step=1), MagicMock(built=BuiltModel())
    trainer.engine.plan.batch.accumulation_steps = 3
    step = list(trainer._read(iter("abc")))
    for number, item in enumerate(trainer._observed(step, 2), start=1):
        assert item == "abc"[number - 1]
        assert watchdog.beat.call_count == 3
        assert watchdog.alive.call_count == number
