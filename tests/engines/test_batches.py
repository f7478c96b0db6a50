"""Batches that are no tensors: the loop by hand on every engine, and nothing said of them that is not so."""

import pytest

from dsframe.tools.compare import losses
from tests import kept
from tests.engines import batch_tasks
from tests.engines.test_foreign import SETUPS, by_hand, file


def train(name, setup, folder):
    document = file((name, {}), setup)
    document["dsframe"]["task"]["name"] = f"tests.engines.batch_tasks:{name}"
    return kept.train(folder, document, SETUPS[setup][0]).check()


@pytest.mark.parametrize("name", ["Packed", "Nested", "OfGraphs", "OfNodes"])
@pytest.mark.parametrize(
    "setup", ["zero3", *(pytest.param(setup, marks=pytest.mark.long) for setup in ("single", "ddp", "horovod", "fsdp"))]
)
def test_batches_that_are_no_tensors(name, setup, tmp_path):
    finished = train(name, setup, tmp_path)
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand((name, {}), batch_tasks), rel=1e-6)
    for claim in ("draws random numbers", "give another sample", "was not examined", "depends on"):
        assert claim not in finished.stderr


def test_a_mean_over_nodes_is_said(tmp_path):
    assert "loss is neither a mean nor a sum over rows" in train("OfNodesUnsaid", "ddp", tmp_path).stderr
