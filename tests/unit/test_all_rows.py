"""A loss over the rows of all ranks: the gradients of one process, and where it is refused. (Engines: test_foreign.py.)"""

from types import SimpleNamespace

import pytest
import torch

from dsframe import Task
from dsframe.errors import TaskError
from dsframe.tasks.global_batch import all_rows
from tests.threads import Room

WHOLE = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss(rows):
    return torch.cdist(rows, rows + 1.0).logsumexp(1).mean()


def engine(ranks, readers=3, accumulation=1):
    ranks.plan.batch = SimpleNamespace(data_parallel_size=readers, accumulation_steps=accumulation)
    return ranks


def test_the_mean_of_the_ranks_gradients_is_that_of_one_process():
    alone = WHOLE.clone().requires_grad_()
    loss(alone).backward()

    def one(ranks):
        own = WHOLE[2 * ranks.plan.world.rank :][:2].clone().requires_grad_()
        found = loss(all_rows(engine(ranks), own))
        found.backward()
        return float(found.detach()), own.grad

    found = Room(3).run(one)
    assert [value for value, _ in found] == pytest.approx([float(loss(WHOLE))] * 3, rel=1e-12)
    assert torch.cat([gradient for _, gradient in found]) / 3 == pytest.approx(alone.grad, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16])
def test_dtypes_stay(dtype):
    rows = torch.tensor([[0, 1], [1, 1], [0, 0]]).to(dtype)
    for found in Room(3).run(lambda ranks: all_rows(engine(ranks), rows[ranks.plan.world.rank][None])):
        assert found.dtype == dtype
        assert torch.equal(found, rows)


def test_where_it_cannot_be():
    ranks = SimpleNamespace(plan=SimpleNamespace(world=SimpleNamespace(size=3, rank=0)))
    with pytest.raises(TaskError, match=r"a step has 2; write \"gradient_accumulation_steps\": 1"):
        all_rows(engine(ranks, accumulation=2), WHOLE)
    with pytest.raises(TaskError, match="not possible with a pipeline"):
        all_rows(engine(ranks, readers=1), WHOLE)


def test_an_evaluation_sees_its_own_rows():
    task = Task()
    with torch.no_grad():
        assert task.all_rows(WHOLE) is WHOLE


def test_a_sum_over_all_rows_is_no_sum_over_a_ranks_rows():
    """Which would count each row once for every rank."""

    class Summed(Task):
        loss_is = "sum"

    with pytest.raises(TaskError, match='leave out loss_is = "sum"'):
        Summed().all_rows(WHOLE)
