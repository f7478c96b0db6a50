"""A task of a plain model, a loss and data, in one call."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe.errors import TaskError
from tests.files import ds_config

FILE = ds_config(8, "AdamW", 0.01)


class Net(nn.Sequential):
    def __init__(self, hidden=8):
        super().__init__(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def test_three_lines_are_a_training(tmp_path):
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, generator=numbers), torch.randint(2, (64,), generator=numbers))
    file = {**FILE, "dsframe": {"engine": "single", "epochs": 4, "run_dir": str(tmp_path)}}
    task = dsframe.Task.from_module(Net, nn.CrossEntropyLoss(), data, data)
    first, again = dsframe.fit(task, file), dsframe.fit(task, file)
    assert first.metrics["loss"] < 0.7
    assert first.metrics == again.metrics  # made anew from the seed


class Centred(Net):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs - outputs.mean(0)


def test_its_rows_are_examined_like_those_of_a_task(tmp_path, capsys):
    data = TensorDataset(torch.arange(192.0).view(64, 3), torch.arange(64) % 2)
    file = {**FILE, "dsframe": {"engine": "single", "steps": 1, "run_dir": str(tmp_path)}}
    dsframe.fit(dsframe.Task.from_module(Centred, nn.CrossEntropyLoss(), data), file)
    assert "gives a row different outputs in different batches" in capsys.readouterr().err


def test_a_module_that_is_made_already_is_refused():
    with pytest.raises(TaskError, match=r"Net is made already, .* give what makes it: Net, or lambda: Net\(...\)"):
        dsframe.Task.from_module(Net(), nn.CrossEntropyLoss(), None)
