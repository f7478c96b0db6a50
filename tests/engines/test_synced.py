"""BatchNorm over the global batch: two and three ranks of every engine train as one process does, statistics included."""

import pytest
import torch

import dsframe
from dsframe.checkpoint import store
from dsframe.config import load
from dsframe.errors import ConfigError, TaskError
from dsframe.tools import export
from dsframe.tools.compare import losses
from tests import kept
from tests.engines.synced import Picture, file

BOUND = 1e-5
TORCHS = ["ddp", "fsdp", "deepspeed:0", "deepspeed:1", "deepspeed:2", "deepspeed:3"]


def trained(folder, case, ranks, *, synced=True):
    """Losses; weights and statistics; what was said."""
    run = folder / f"{case}-{ranks}-{synced}"
    said = kept.train(folder, file(case, str(run), synced=synced), ranks).check().stderr
    return list(losses(run).values()), export.read(store.locate(run)[0]), said


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    found = trained(folder, "single", 1)
    assert (
        found[0] == trained(folder, "single", 1, synced=False)[0]
    )  # torch's own layer, where there are no other ranks
    return found


@pytest.mark.parametrize(
    ("ranks", "case"), [*((2, case) for case in (*TORCHS, "horovod")), *((3, case) for case in ("ddp", "deepspeed:3"))]
)
def test_statistics_are_of_the_global_batch(ranks, case, alone, tmp_path):
    found, tensors, said = trained(tmp_path, case, ranks)
    assert found == pytest.approx(alone[0], rel=0, abs=BOUND)
    assert tensors.keys() == alone[1].keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, alone[1][name], rtol=0, atol=BOUND)
    assert "BatchNorm sees one micro-batch" not in said


@pytest.mark.parametrize("case", ["ddp", "horovod"])
def test_without_the_switch_they_are_of_a_rank(case, alone, tmp_path):
    found, _, said = trained(tmp_path, case, 2, synced=False)
    assert max(abs(a - b) for a, b in zip(found, alone[0], strict=True)) > 100 * BOUND
    assert "BatchNorm sees one micro-batch" in said


def test_refusals(tmp_path):
    given = file("single")
    with pytest.raises(ConfigError, match="sync_batch_norm: not possible with several micro-batches in a step"):
        load({**given, "gradient_accumulation_steps": 2})
    with pytest.raises(TaskError, match="sees one micro-batch of each rank, and a step has 3"):
        dsframe.fit(
            Picture(), {**given, "train_micro_batch_size_per_gpu": 4}, overrides=[f"dsframe.run_dir={tmp_path}"]
        )
    with pytest.raises(ConfigError, match=r"not possible with dsframe\.model\.compile"):
        load({**given, "dsframe": {**given["dsframe"], "model": {"sync_batch_norm": True, "compile": True}}})
