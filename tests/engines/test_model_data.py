"""A data set that a hook renews from the running model is the same on every engine, and over a resume."""

import pytest
import torch

import dsframe
from dsframe.tools.compare import losses
from tests import kept
from tests.engines.model_data import REFRESH_STEPS, SelfLabelled, file
from tests.engines.test_foreign import SETUPS


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone")
    task = SelfLabelled()
    dsframe.fit(task, file(str(run), "single"))
    assert not torch.equal(task.points.current, task.points.targets), "the data were renewed"
    return [loss for _, loss in sorted(losses(run).items())]


@pytest.mark.parametrize("setup", ["ddp", "fsdp", "zero3"])
def test_two_ranks_renew_the_same_data(setup, alone, tmp_path):
    """The first steps on two ranks, the others on one process."""
    document = file(str(tmp_path / "run"), "auto", 2 * REFRESH_STEPS)
    changes = dict(SETUPS[setup][1])
    document["dsframe"] |= changes.pop("dsframe", {})
    kept.train(tmp_path, document | changes, 2).check()
    dsframe.fit(SelfLabelled(), file(str(tmp_path / "run"), "single"), resume="auto")
    found = [loss for _, loss in sorted(losses(tmp_path / "run").items())]
    assert found == pytest.approx(alone, abs=1e-6)
