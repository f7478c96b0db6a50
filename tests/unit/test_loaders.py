"""What the file and the task say of the data, as the loaders of each rank have it."""

from fractions import Fraction

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

import dsframe
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.errors import TaskError
from dsframe.training.loaders import loaders, sets
from tests.files import ds_config

ROWS = torch.arange(22.0).reshape(11, 2)
DATA = TensorDataset(ROWS, ROWS)


def collate(rows):
    inputs, targets = default_collate(rows)
    return inputs, targets + 100


def eval_collate(rows):
    inputs, targets = default_collate(rows)
    return inputs, targets - 100


def made(rank, ranks, task=None, sections=None, **settings):
    config, world = load(ds_config(4, sections=sections or {}, **settings)), World(rank, ranks, rank, ranks)
    batch = config.batch(ranks)
    return loaders(config, task or dsframe.Task(), (DATA, {"held": DATA}), batch, world, torch.device("cpu"))


def samples(loader):
    return [int(row) // 2 for inputs, _ in loader.micro_batches(0) for row in inputs[:, 0]]


def held_out(loader):
    return [int(row) // 2 for batch in loader if batch.counts for row in batch.batch[0][:, 0]]


@pytest.mark.parametrize(
    ("sections", "alike"),
    [({}, False), ({"tensor_parallel": {"autotp_size": 2}}, True), ({"pipeline": {"stages": 2}}, True)],
)
def test_ranks_that_share_a_model_read_the_same_samples(sections, alike):
    read = []
    for rank in range(2):
        loader, evaluation = made(rank, 2, sections=sections)
        read.append((samples(loader), held_out(evaluation["held"])))
    for first, second in zip(*read, strict=True):
        assert (first == second) == alike
        assert alike or set(first).isdisjoint(second)


def test_an_evaluation_collates_its_own_way():
    task = dsframe.Task()
    for of_evaluation, sign in ((None, 1), (eval_collate, -1)):
        task.collate, task.eval_collate = collate, of_evaluation
        loader, evaluation = made(0, 1, task)
        for inputs, targets in loader.micro_batches(0):
            assert torch.equal(targets, inputs + 100)
        for batch in evaluation["held"]:
            inputs, targets = batch.batch
            assert torch.equal(targets, inputs + 100 * sign)


def test_what_the_file_says_of_an_evaluation():
    _, evaluation = made(0, 1)
    assert (evaluation["held"].micro_batch_size, held_out(evaluation["held"])) == (4, list(range(11)))
    _, evaluation = made(0, 1, eval_micro_batch_size=3, eval_samples=7)
    assert (evaluation["held"].micro_batch_size, held_out(evaluation["held"])) == (3, list(range(7)))


@pytest.mark.parametrize(("drops", "steps"), [(False, Fraction(11, 4)), (True, 2)])
def test_an_epoch_may_leave_its_last_samples_out(drops, steps):
    loader, _ = made(0, 1, sections={"dataloader_drop_last": drops})
    assert loader.sampler.epoch_steps == steps


def test_an_order_of_the_file():
    loader, _ = made(0, 1, order="sequential")
    assert samples(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["a b", 3])
def test_a_set_is_named_as_files_may_be(name):
    with pytest.raises(TaskError, match="eval_data: a set is named"):
        sets(dsframe.Task(), {name: DATA})
