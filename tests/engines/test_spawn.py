"""``dsframe.fit(task, file, processes=2)`` from a program that is one process, as a notebook is."""

import json

from tests.processes import python, run_ranks

PROGRAM = """
import json
import torch
from torch import nn

import dsframe
from dsframe.errors import DataError

FILE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "dsframe": {"engine": "ddp", "steps": 6, "run_dir": "run"}}


class Points(dsframe.Task):
    def __init__(self, fails=False):
        self.fails = fails

    def model(self):
        if self.fails:
            raise DataError("no model today")
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        points = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))

    eval_data = train_data


def weights(run):
    return dsframe.load_model(run, Points()).state_dict()


if __name__ == "__main__":
    alone = dsframe.fit(Points(), FILE, overrides=["dsframe.engine=single", "dsframe.run_dir=alone"])
    two = dsframe.fit(Points(), FILE, processes=2)
    near = max(float((a - b).abs().max()) for a, b in zip(weights("alone").values(), weights("run").values()))
    again = dsframe.fit(Points(), FILE, processes=2, resume="auto", overrides=["dsframe.steps=7"])
    try:
        dsframe.fit(Points(fails=True), FILE, processes=2, overrides=["dsframe.run_dir=failed"])
    except dsframe.DsframeError as error:
        failed = [type(error).__name__, str(error)]
    try:
        dsframe.fit(Points(fails=(one for one in ())), FILE, processes=2)
    except dsframe.DsframeError as error:
        unsent = str(error)
    print(json.dumps({"alone": alone.metrics, "two": two.metrics, "near": near,
                      "steps": [two.steps, again.steps],
                      "ranks": len(two.peak_memory_bytes), "failed": failed, "unsent": unsent}))
"""


def test_from_one_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    finished = run_ranks(python([str(tmp_path / "program.py")]), cwd=tmp_path, timeout_seconds=240).check()
    found = json.loads(finished.stdout.splitlines()[-1])
    assert abs(found["alone"]["loss"] - found["two"]["loss"]) < 1e-6
    assert found["steps"] == [6, 7]
    assert found["near"] < 1e-6
    assert found["ranks"] == 2
    assert "evaluation after step 6" in finished.stderr, "what the processes print is printed here"
    assert "no model today" in finished.stderr
    assert found["failed"] == ["DataError", "the run on 2 processes ended with exit code 6; see above"]
    assert "cannot be sent to other processes" in found["unsent"]
