"""Every file in ds_configs/ trains, and is a file for plain DeepSpeed without its dsframe section."""

import copy
import math
import warnings

import pytest

from dsframe.config import find, load
from dsframe.model import schedules
from dsframe.run_dir.record import read_summary
from dsframe.tools.compare import losses
from tests import kept
from tests.processes import COMPILING_SECONDS, REPOSITORY, run_ranks, warm

FILES = sorted(path.name for path in (REPOSITORY / "ds_configs").glob("*.json") if ".schema." not in path.name)
STEPS = 3
SAMPLES = {"cifar10_resnet18.json": 50_000}
NOT_HERE = ("cifar10_resnet18.json", "mnist_cnn.json")
"""Their data come from the network: the test trains on synthetic images."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.timeout(COMPILING_SECONDS + 60) if "nvme" in name else ()) for name in FILES],
)
def test_it_trains(name, tmp_path):
    engine = "ddp" if name in NOT_HERE else load(name).settings.engine
    words = ["--config", name, "--run-dir", str(tmp_path)]
    changes = [f"steps={STEPS}", "task.samples=512", "eval_samples=64"]
    if name in NOT_HERE:
        changes += ["task.dataset=synthetic", "engine=ddp"]
    words += [word for change in changes for word in ("--set", f"dsframe.{change}")]
    ranks = 1 if engine == "single" else 2
    if "nvme" in name:  # whose op may be compiled first
        command = warm(ranks, ["-m", "dsframe.train", *words])
        finished = run_ranks(command, timeout_seconds=COMPILING_SECONDS).check()
    else:
        finished = kept.run(tmp_path, words, ranks).check()
    assert len(losses(tmp_path)) == STEPS
    summary = read_summary(tmp_path)
    assert math.isfinite(summary["loss"])
    assert "Warning" not in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize("name", FILES)
def test_its_schedule_ends_with_its_training(name):
    config = load(name)
    steps = config.settings.steps or math.ceil(
        (config.settings.epochs or 1) * SAMPLES.get(name, 60_000) / config.batch(2).train_batch_size
    )
    assert [*schedules.notes(config, schedules.constant(1.0), steps)] == []


@pytest.mark.parametrize("name", FILES)
def test_plain_deepspeed_takes_it(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime.config import DeepSpeedConfig
    document = copy.deepcopy(load(find(name)).written())
    document.pop("dsframe")
    DeepSpeedConfig(document)
