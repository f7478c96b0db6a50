"""Muon for matrices beside Adam for the rest, as DeepSpeed has it: the same training at every stage that takes it, and checkpoints
that go from one to another.

Nothing else trains with it, so one process at stage 0 is the reference. Clipping is off, which hides factors.
"""

import pytest
import torch

import dsframe
from dsframe.tools.compare import losses
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

STEPS, HALF = 10, 5
BOUND = 1e-5
_CPU = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "zero0": {"stage": 0},
    "zero1 cpu": {"stage": 1, **_CPU},
    "zero2 cpu": {"stage": 2, **_CPU},
    "zero3": {"stage": 3, "reduce_scatter": False},
}


class Eager(dsframe.Hooks):
    """DeepSpeed compiles Muon's orthogonalization, which takes longer than these trainings."""

    def on_start(self, run):
        torch.compiler.set_stance("force_eager")


def train(folder, ranks, zero, *words):
    folder.mkdir()
    params = {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.01}
    task = {"name": "language", "layers": 1, "heads": 2, "width": 32, "context": 32, "samples": 200}
    file = ds_config(
        8,
        {"type": "Muon", "params": params},
        sections={"gradient_clipping": 0, "zero_optimization": zero},
        task=task,
        engine="deepspeed",
        steps=STEPS,
        log_every_steps=1,
        eval_every_steps=STEPS,
        eval_samples=64,
        hooks=["tests.engines.test_muon:Eager"],
        threads_per_rank=1,
        checkpoints={"every_steps": HALF},
    )
    path = folder / "file.json"
    write_json(path, file)
    arguments = ["-m", "dsframe.train", "--config", str(path), "--run-dir", str(folder / "run"), *words]
    run_ranks(warm(ranks, arguments), timeout_seconds=300).check()
    return folder / "run"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("muon") / "alone", 1, CASES["zero0"])


@pytest.mark.parametrize(
    "case", ["zero3", *(pytest.param(one, marks=pytest.mark.long) for one in ("zero0", "zero1 cpu", "zero2 cpu"))]
)
def test_two_ranks_are_one_process_and_go_on_from_it(case, alone, tmp_path):
    expected = losses(alone)
    assert expected[STEPS] < expected[1] - 0.5, "it has learned something"
    found = losses(train(tmp_path / "two", 2, CASES[case]))
    assert found == pytest.approx(expected, abs=BOUND)
    on = train(tmp_path / "on", 2, CASES[case], "--resume", str(alone / "checkpoints" / f"step-{HALF:08}"))
    assert losses(on) == pytest.approx({step: expected[step] for step in range(HALF + 1, STEPS + 1)}, abs=BOUND)
