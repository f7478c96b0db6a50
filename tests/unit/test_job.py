"""What is closed when a training ends by an error, and by whom."""

from unittest.mock import MagicMock

import pytest
import torch

import dsframe
from dsframe import job
from dsframe.errors import CheckpointError, DataError, StoppedError, TaskError, TrainingError


@pytest.mark.parametrize("kind", [StoppedError, TrainingError, CheckpointError, TaskError, DataError, ValueError])
def test_an_error_of_all_ranks_ends_the_engine_and_one_of_a_single_rank_waits_for_no_other(kind):
    """Collectives of a rank that alone has ended would wait forever."""
    given, engine, outputs = MagicMock(), MagicMock(), MagicMock()
    with pytest.raises(kind), job._ending(given, engine, outputs):
        raise kind("it ends")
    together = kind in (StoppedError, TrainingError, CheckpointError)
    assert [name for name, *_ in outputs.saver.method_calls] == ["close" if together else "wait_briefly"]
    assert [name for name, *_ in engine.method_calls] == ["close"] * together
    given.progress.close.assert_called_once_with()
    outputs.record.close.assert_called_once_with(finished=False)


def test_ranks_compare_the_order_of_samples_and_the_sizes_of_evaluations():
    given = MagicMock()
    given.work.loader.sampler.first.return_value = torch.arange(3)
    given.work.evaluation = {"held": MagicMock(source=range(4))}
    given.plan.config.shown.return_value = {}
    facts = job._facts(given)
    assert facts["order of samples"]
    assert facts["evaluation samples"] == "held 4"


def test_what_a_model_sets_too_late_is_refused():
    run = MagicMock(task=dsframe.Task(), hooks=())
    read = job._given_early(run.task)
    run.task.workers, run.task.hooks = 2, [dsframe.Hooks()]
    with pytest.raises(TaskError, match=r"Task\.model sets workers, hooks, which"):
        job._refuse_late(run, read)
