"""An exception of the user's code is told with their frames and the call of dsframe that led to them, and ends with code 5."""

import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dsframe
from dsframe import train
from dsframe.cluster.world import World
from dsframe.guard import user_code
from dsframe.model.micro_batch import Arguments
from dsframe.tasks.task import accuracy
from tests.files import ds_config

FILE = ds_config(4, "Adam", engine="single", steps=4)


class Rows(Dataset):
    def __init__(self, bad=-1):
        self.bad = bad

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == self.bad:
            raise KeyError("no such picture")
        return torch.ones(2), torch.ones(1)


class Broken(dsframe.Task):
    """Raises where ``where`` says."""

    def __init__(self, where):
        self.where = where

    def model(self):
        if self.where == "model":
            raise ZeroDivisionError("no layers")
        return {"pair": _Pair(2, 1), "shapes": nn.Linear(3, 1)}.get(self.where) or nn.Linear(2, 1)

    def loss(self, outputs, targets):
        if self.where == "loss":
            return torch.cat([outputs, torch.ones(3, 7)]).mean()
        if self.where == "helper":
            return accuracy(outputs, None).total
        if self.where == "deep":
            return self.loss(outputs, targets)
        return (outputs - targets).square().mean()

    def train_data(self):
        if self.where == "disk":
            raise OSError(5, "Input/output error")
        return Rows(3 if self.where == "row" else -1)


class _Pair(nn.Linear):
    def forward(self, first, second):
        return super().forward(first) + second


class TwoModels(Broken):
    """The model that is evaluated takes other rows than the task evaluates it with."""

    model = dsframe.Task.model

    def models(self):
        return {"one": lambda: nn.Linear(3, 1)}

    def losses(self):
        return {"one": lambda models, inputs, targets: models["one"](torch.ones(len(inputs), 3)).mean()}

    def eval_data(self):
        return Rows()


class Detector(Broken):
    """Gives losses in training mode, and what it has found in evaluation mode."""

    def model(self):
        layer = nn.Linear(2, 1)
        layer.register_forward_hook(
            lambda module, _, outputs: {"loss": outputs.mean()} if module.training else [outputs]
        )
        return layer

    def loss(self, outputs, targets):
        return sum(outputs.values())

    def eval_data(self):
        return Rows()


class Table(nn.Linear):
    """Adds a table, a buffer, as positional encodings are."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("table", torch.ones(2))

    def forward(self, inputs):
        return super().forward(inputs + self.table)


CASES = {
    "model": ("the task's code raised ZeroDivisionError: no layers", "in model", "in _build_on_cpu: "),
    "loss": ("the task's code raised RuntimeError: Sizes of tensors must match", "in loss\n", "_loss: "),
    "row": ("the task's code raised KeyError: 'no such picture'", "in __getitem__", "The sample is number 3 of its data set"),
    "pair": ("missing 1 required positional argument: 'second'", "in call: ", "here they are one Tensor of shape [4, 2]"),
    "shapes": ("the task's model raised RuntimeError: mat1 and mat2", "in call: ", "model(*inputs) where they are a tuple"),
    "evaluated": ("the task's model raised RuntimeError: mat1 and mat2", "in call: ", "they are one Tensor of shape [4, 2]"),
    "detector": ("object has no attribute 'values'", "in loss\n", "define metrics(outputs, targets)"),
    "helper": ("the task's code raised", "in loss\n", "_loss: "),
    "deep": ("the task's code raised RecursionError", "in loss\n", "more times]"),
    "disk": ("the task's code raised OSError: [Errno 5] Input/output error", "in train_data", "called by dsframe/"),
}  # fmt: skip


@pytest.mark.parametrize("where", CASES)
def test_who_raised_is_told(where, here, monkeypatch):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each case its own, untouched
        dsframe.fit({"evaluated": TwoModels, "detector": Detector}.get(where, Broken)(where), FILE)
    told = user_code.user_traceback(raised.value)
    assert told
    for words in CASES[where]:
        assert words in told
    assert "in test_who_raised_is_told" not in told
    assert "torch/nn/modules" not in told
    assert told.count("\n") < 20
    monkeypatch.setattr(train, "leave_at_once", sys.exit)
    with pytest.raises(SystemExit, match="^1$" if where == "disk" else "^5$"):
        train.crash(raised.value, World(), verbose=False)


def test_what_stands_in_the_place_of_a_forward_is_not_who_raised(here, monkeypatch):
    monkeypatch.setattr(Broken, "model", lambda _: nn.Sequential(nn.Linear(3, 1)))
    settings = {**FILE["dsframe"], "model": {"activation_checkpointing": ["Linear"]}}
    with pytest.raises(RuntimeError) as raised:
        dsframe.fit(Broken(""), {**FILE, "dsframe": settings})
    assert str(user_code.user_traceback(raised.value)).startswith("the task's model raised RuntimeError: mat1 and mat2")


def test_what_16_bits_do_to_buffers_is_told(here, monkeypatch):
    monkeypatch.setattr(Broken, "model", lambda _: Table())
    with pytest.raises(RuntimeError) as raised:
        dsframe.fit(Broken(""), {**FILE, "bf16": {"enabled": True}})
    told = user_code.user_traceback(raised.value)
    assert told
    assert "buffers stay float32: cast them where they are used" in told
    assert "A batch's inputs reach" not in told


class Tokens(dsframe.Task):
    """Sample 40 of 64 has a token or a class that there is not; so has sample 3 of the evaluation."""

    def __init__(self, token=0, label=0, where="training"):
        self.token, self.label, self.where = token, label, where

    def model(self):
        return nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(8, 3))

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def rows(self, bad):
        tokens, labels = torch.zeros(64, 2, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
        labels[::7] = -100
        tokens[bad, 0], labels[bad] = self.token, self.label
        return torch.utils.data.TensorDataset(tokens, labels)

    def train_data(self):
        return self.rows(40) if self.where == "training" else Tokens().rows(0)

    def eval_data(self):
        return self.rows(3) if self.where == "evaluation" else None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"token": 8}, "The token 8, in row %d counted from 0, is not in the 8 that there are, 0 to 7 (sample 40 of the training"),
        ({"token": -1}, "The token -1, in row %d counted from 0, is not in the 8 that there are, 0 to 7 (sample 40 "),
        ({"label": 3}, "The label 3, in row %d counted from 0, is not in the 3 that there are, 0 to 2 (sample 40 of the training"),
        ({"label": 3, "where": "evaluation"}, "0 to 2 (sample 3 of the evaluation)"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named(wrong, said, monkeypatch, tmp_path):
    monkeypatch.setattr("dsframe.host.source_files.is_users", lambda file: Path(file) == Path(__file__))
    settings = {**FILE["dsframe"], "steps": 16, "run_dir": str(tmp_path)}
    with pytest.raises(IndexError) as caught:
        dsframe.fit(Tokens(**wrong), {**FILE, "dsframe": settings})
    assert re.search(re.escape(said).replace("%d", r"\d"), str(user_code.user_traceback(caught.value)))


def test_classes_are_the_second_dimension_and_names_of_inputs_are_told():
    with pytest.raises(IndexError) as caught:
        nn.functional.cross_entropy(torch.zeros(2, 3, 5), torch.full((2, 5), 4))
    calls = [user_code._Call(frame, line) for frame, line in traceback.walk_tb(caught.tb)]
    assert "The label 4, in row 0 counted from 0, is not in the 3 that" in user_code._out_of_range(calls)[0]
    assert user_code._describe_inputs(Arguments((), {"a": 1})) == "a dict with the keys a"


def test_an_error_of_dsframe_or_of_communication_is_not_the_users(monkeypatch):
    def raised(work):
        try:
            work()
        except Exception as error:
            return error
        raise AssertionError

    errors = (OSError(), MemoryError(), torch.OutOfMemoryError(), RuntimeError())
    assert [user_code.is_transient(error) for error in errors] == [True, True, True, False]
    assert user_code.user_traceback(raised(lambda: 1 / 0)) is None
    assert user_code.user_traceback(raised(lambda: dsframe.data.sampler.Sampler(0, 1, 0))) is None
    layer = nn.Linear(2, 1)
    layer.register_forward_pre_hook(lambda *_: torch.distributed.all_reduce(torch.ones(1)))
    assert user_code.user_traceback(raised(lambda: dsframe.model.forward.call(layer, torch.ones(2)))) is None
