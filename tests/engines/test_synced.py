"""BatchNorm over the global batch: two and three ranks of every engine train as one process does, statistics included."""

import pytest

import dsframe
from dsframe.config import load
from dsframe.errors import ConfigError, TaskError
from tests.engines.synced import Picture, file
from tests.processes import reported

BOUND = 1e-5
TORCHS = ["ddp", "fsdp", "deepspeed:0", "deepspeed:1", "deepspeed:2", "deepspeed:3"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found = reported("synced", tmp_path_factory.mktemp("alone"), 1, ["single"])
    assert found["single"]["losses"] == found["own"]["losses"]  # torch's own layer, where there are no other ranks
    return found["single"]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, TORCHS), (3, ["ddp", "deepspeed:3"]), (2, ["horovod"])],
    ids=["2", "3", "horovod"],
)
def test_statistics_are_of_the_global_batch(processes, cases, alone, tmp_path):
    found = reported("synced", tmp_path, processes, cases)
    own = found.pop("own")
    assert max(abs(a - b) for a, b in zip(own["losses"], alone["losses"], strict=True)) > 100 * BOUND
    assert any("BatchNorm sees one micro-batch" in line for line in own["depends"])
    for case, one in found.items():
        assert one["losses"] == pytest.approx(alone["losses"], rel=0, abs=BOUND), case
        assert one["state"].keys() == alone["state"].keys()
        for name, values in one["state"].items():
            assert values == pytest.approx(alone["state"][name], rel=0, abs=BOUND), (case, name)
        assert not one["depends"]


def test_refusals(tmp_path):
    given = file("single", True)
    with pytest.raises(ConfigError, match="sync_batch_norm: not possible with several micro-batches in a step"):
        load({**given, "gradient_accumulation_steps": 2})
    with pytest.raises(TaskError, match="sees one micro-batch of each rank, and a step has 3"):
        dsframe.fit(
            Picture(), {**given, "train_micro_batch_size_per_gpu": 4}, overrides=[f"dsframe.run_dir={tmp_path}"]
        )
    with pytest.raises(ConfigError, match=r"not possible with dsframe\.model\.compile"):
        load({**given, "dsframe": {**given["dsframe"], "model": {"sync_batch_norm": True, "compile": True}}})
