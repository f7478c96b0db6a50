"""What tasks give to read: drawn from the file's seed, on every rank and at every start; and what is no data set."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dsframe
from dsframe.config import load
from dsframe.errors import DataError
from dsframe.host import generators
from dsframe.run import execute
from dsframe.tasks.data_sets import given
from tests.files import ds_config

CONSTANTS = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe


class Constant(dsframe.Task):
    def __init__(self):
        self.shift = [random.random(), np.random.random(), torch.rand(()).item()]

    def model(self):
        return Shifted(torch.rand(()).item(), sum(self.shift))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        return TensorDataset(torch.ones(4, 1), torch.ones(4, 1))


class Shifted(nn.Linear):
    def __init__(self, drawn, kept):
        super().__init__(1, 1)
        self.constants = drawn, kept
        print("CONSTANTS", drawn, kept)
"""


def test_a_loaded_model_has_the_constants_of_the_training(here, capsys):
    """Also those that the task's constructor drew."""
    (here / "constants.py").write_text(CONSTANTS)
    settings = {"task": {"name": "constants:Constant"}, "engine": "single", "steps": 1, "run_dir": "run"}
    cpu = torch.device("cpu")
    before = generators.capture(cpu)
    execute(load(ds_config(4, "SGD", 0.1, **settings)))
    assert generators.capture(cpu) == before
    dsframe.load_model(here / "run")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("CONSTANTS")]
    assert len(told) == 2
    assert told[0] == told[1]
    assert generators.capture(cpu) == before


class Gives(dsframe.Task):
    """Gives ``data``, or what it makes of the generators."""

    def __init__(self, data=None):
        self.data = data

    def train_data(self):
        return [torch.rand(()).item(), np.random.random(), random.random()] if self.data is None else self.data

    eval_data = train_data


def test_what_is_drawn_follows_from_the_seed_and_leaves_the_generators_alone():
    cpu, task = torch.device("cpu"), Gives()
    before = generators.capture(cpu)
    first, again, held_out, predicted = (given(task, f"{name}_data") for name in ("train", "train", "eval", "predict"))
    assert generators.capture(cpu) == before
    assert first == again
    assert held_out == predicted
    assert all(one != other for one, other in zip(first, held_out, strict=True))
    task.seed = 1
    assert all(one != other for one, other in zip(first, given(task, "train_data"), strict=True))


X, Y = torch.zeros(8, 2), torch.zeros(8)
WRONG = {
    r"a dict of several data sets \('train', 'test'\); return one of them, such as its split 'train'": {
        "train": TensorDataset(X, Y),
        "test": TensorDataset(X, Y),
    },
    r"a dict with 'x', 'y', and not samples by number; return TensorDataset": {"x": X, "y": Y},
    "a tuple of two Tensors, which is read as two samples; return TensorDataset": (X, Y),
    "a DataLoader; return its data set": DataLoader(TensorDataset(X, Y)),
    "a generator, which can be read once": (row for row in Y),
    "int, which is not a data set": 3,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_data_set_is_named(what):
    with pytest.raises(DataError, match=f"^Gives.train_data gives {what}"):
        given(Gives(WRONG[what]), "train_data")


class Stream(IterableDataset):
    """Its own iterator, which begins anew."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


def test_what_is_a_data_set_is_taken():
    for data in ([(X[0], 1), (X[1], 0)], {0: (X[0], 1), 1: (X[1], 0)}, TensorDataset(X, Y), X, []):
        assert given(Gives(data), "train_data") is data
    stream = Stream()
    assert given(Gives(stream), "train_data") is stream
    several = {"clean": TensorDataset(X, Y), "noisy": TensorDataset(X, Y)}
    assert given(Gives(several), "eval_data") is several
    with pytest.raises(DataError, match=r"^Gives\.eval_data gives a tuple of two Tensors"):
        given(Gives({"clean": (X, Y)}), "eval_data")


def test_a_method_without_return_is_named_where_it_must_give_data():
    class Nothing(dsframe.Task):
        def train_data(self): ...

        eval_data = train_data

    assert given(Nothing(), "eval_data") is None
    with pytest.raises(DataError, match=r"^Nothing\.train_data gives None; return a data set$"):
        given(Nothing(), "train_data")


def test_the_split_of_a_dataset_dict_is_named():
    datasets = pytest.importorskip("datasets")
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"x": 1.0}])})
    with pytest.raises(DataError, match=r"gives a DatasetDict of several data sets .*such as its split 'train'"):
        given(Gives(split), "train_data")
