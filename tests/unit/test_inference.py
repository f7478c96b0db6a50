"""dsframe evaluate, dsframe predict and load_model, on one process. On several: tests/engines/test_inference.py."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe import inference
from dsframe.checkpoint import store
from dsframe.cluster.world import World
from dsframe.data import Pad, TensorSource
from dsframe.data.datasets import DatasetSource
from dsframe.errors import CheckpointError, DsframeError, TaskError
from dsframe.host import generators
from dsframe.inference import load_model
from dsframe.run import execute, prepared
from dsframe.tools import evaluate
from dsframe.training.predictions import Untargeted, padded, rows_of, take_inputs_alone
from tests.files import ds_config, read_rows, write_json
from tests.lines import Line

SAMPLES = 37


class Plane(Line):
    """A network with BatchNorm and a buffer, on a ragged set."""

    inputs, outputs = 3, 2

    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def eval_data(self):
        numbers = torch.Generator().manual_seed(1)
        return TensorSource(torch.randn(SAMPLES, 3, generator=numbers), torch.randn(SAMPLES, 2, generator=numbers))

    def predictions(self, outputs, targets):
        return {
            "output": outputs,
            "wrong": (outputs - targets).abs().sum(1),
            "sign": [f"{x:+.0f}" for x in outputs[:, 0].sign()],
        }


class Aged(Plane):
    """Its loss depends on the step."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / self.context.step


def file(run, **more):
    settings = {"engine": "single", "steps": 6, "run_dir": str(run), "task": {"name": f"{__name__}:Plane"}, **more}
    return ds_config(8, "AdamW", 0.05, **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("inference") / "run"
    return run, execute(dsframe.load(file(run, ema={"decay": 0.8})))


def expected(run, *, averages=None):
    model = load_model(run, averages=averages)
    assert not model.training
    with torch.no_grad():
        return model(Plane().eval_data().batch(torch.arange(SAMPLES), 0)[0])


def test_predict_writes_each_sample_once_in_order(trained, tmp_path):
    out = tmp_path / "rows.jsonl"
    (tmp_path / f".{out.name}.00003.partial").touch()  # of a run that was killed
    write(trained[0], out)
    wanted = expected(trained[0])
    rows = read_rows(out)
    assert len(rows) == SAMPLES
    torch.testing.assert_close(outputs_in(out), wanted, rtol=1e-6, atol=1e-6)
    assert {row["sign"] for row in rows} <= {"+1", "-1"}
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "nothing else is left"


@contextmanager
def prepared_again(run, task=None):
    """The run as the commands prepare it, and its newest checkpoint."""
    path = store.complete(run)
    with prepared(dsframe.load(store.config_of(path)), task, World()) as made:
        read = cache(lambda: (made.task.train_data(), made.task.predict_data()))
        yield dataclasses.replace(made, data=read), path


def write(run, out, *, averages=None, task=None):
    with prepared_again(run, task) as (made, path):
        return inference.predict(made, World(), path, out, averages=averages)


def command(name, *words):
    evaluate._run(name, evaluate._options(name, words), World())


def outputs_in(out):
    return torch.tensor([row["output"] for row in read_rows(out)])


def test_averages_are_predicted_on_request(trained, tmp_path):
    write(trained[0], tmp_path / "a.jsonl", averages=True)
    rows = outputs_in(tmp_path / "a.jsonl")
    torch.testing.assert_close(rows, expected(trained[0], averages=True), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(rows, expected(trained[0]))


def test_what_the_run_evaluated_is_loaded_evaluated_and_predicted(tmp_path):
    """The averages with "ema": {"evaluate": true}; the weights, too, on request. At the step of the checkpoint."""
    run = tmp_path / "run"
    task = {"name": f"{__name__}:Aged"}
    summary = execute(dsframe.load(file(run, ema={"decay": 0.8, "evaluate": True}, task=task)))
    with prepared_again(run) as (made, path):
        assert inference.evaluate(made, World(), path) == dict(summary.metrics)
        assert inference.evaluate(made, World(), path, averages=False) != dict(summary.metrics)
    assert torch.equal(expected(run), expected(run, averages=True))
    assert not torch.equal(expected(run), expected(run, averages=False))
    write(run, tmp_path / "a.jsonl")
    torch.testing.assert_close(outputs_in(tmp_path / "a.jsonl"), expected(run), rtol=1e-6, atol=1e-6)


def test_predictions_are_of_all_samples_whatever_an_evaluation_counts(tmp_path):
    execute(dsframe.load(file(tmp_path / "run", eval_samples=5)))
    assert write(tmp_path / "run", tmp_path / "a.jsonl") == SAMPLES
    assert len(outputs_in(tmp_path / "a.jsonl")) == SAMPLES
    with pytest.raises(CheckpointError, match="has no averages"):
        load_model(tmp_path / "run", averages=True)


class InputsAlone(Plane):
    predictions = dsframe.Task.predictions

    def __init__(self, data):
        self.predict_data = lambda: data


INPUTS = torch.arange(15.0).view(5, 3) / 10


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(INPUTS),
        list(INPUTS),
        [{"input": row.tolist()} for row in INPUTS],
    ],
)
def test_predictions_need_no_targets(trained, tmp_path, data):
    assert write(trained[0], tmp_path / "a.jsonl", task=InputsAlone(data)) == len(INPUTS)
    with torch.no_grad():
        wanted = load_model(trained[0])(INPUTS)
    torch.testing.assert_close(outputs_in(tmp_path / "a.jsonl"), wanted, rtol=1e-6, atol=1e-6)


def test_a_collate_need_not_give_targets_for_predictions():
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    source = DatasetSource(rows, 0, Pad())
    take_inputs_alone(source)
    inputs, targets = source.batch(torch.arange(2), 0)
    assert inputs["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert targets.tolist() == [0, 0]
    for row in ({**rows[0], "labels": 1}, [[1, 2], 1]):
        labelled = DatasetSource([row], 0, Pad())
        take_inputs_alone(labelled)
        assert isinstance(labelled.collate, Pad)
    for batch in ((1, 2), {"input": 1, "labels": 2}):
        assert Untargeted(lambda rows, batch=batch: batch)(rows) == batch


class Ragged(dsframe.Task):
    """A class for each position of rows of several lengths."""

    collate = Pad()

    def model(self):
        return Positions()

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def loss_weight(self, targets):
        return (targets != -100).sum()

    def train_data(self):
        return [
            {"input_ids": torch.arange(size), "labels": torch.zeros(size, dtype=torch.int64)}
            for size in (2, 5) * 4 + (5,) * 8  # the last batch has no padding
        ]

    eval_data = train_data


class Cut(Ragged):
    def predictions(self, outputs, targets):
        return {"output": [row[kept] for row, kept in zip(outputs, targets != -100, strict=True)]}


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, input_ids, attention_mask):
        return self.table(input_ids)


def test_padding_is_what_a_mask_leaves_out():
    mask = {"attention_mask": torch.tensor([[1, 1], [1, 0]])}
    assert padded(dsframe.Task(), mask, torch.zeros(2, 2), torch.zeros(2))
    assert not padded(dsframe.Task(), None, torch.zeros(2), torch.tensor([0, -100])), "a sample that does not count"


@pytest.mark.parametrize("task", [Ragged, Cut])
def test_padding_in_predicted_rows_is_said_once(task, tmp_path, capsys):
    execute(dsframe.load(file(tmp_path / "run", task={"name": f"{__name__}:{task.__name__}"})))
    capsys.readouterr()
    write(tmp_path / "run", tmp_path / "a.jsonl")
    assert capsys.readouterr().err.count("predicted rows include padding") == (task is Ragged)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "RUN", "--out", "OUT/x.txt"], "predictions are written as .jsonl"),
        (["predict", "RUN", "--out", "OUT/none/x.jsonl"], "there is no folder"),
        (["predict", "RUN", "--out", "OUT/there.jsonl"], "exists already"),
        (["evaluate", "OUT"], "is neither a checkpoint nor a folder that holds one"),
        (["evaluate", "RUN", "--config", "none.json"], "none.json"),
    ],
)
def test_what_is_wrong_is_one_line(trained, tmp_path, words, message):
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(DsframeError, match=message):
        command(*(word.replace("RUN", str(trained[0])).replace("OUT", str(tmp_path)) for word in words))


@dataclasses.dataclass
class Found:
    boxes: Tensor
    step: int = 3


jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
BOXES = [{"boxes": torch.ones(2, 4), "name": "cat"}, {"boxes": torch.zeros(0, 4), "name": ""}]


@pytest.mark.parametrize(
    ("outputs", "rows"),
    [
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [{"output": [1.0, 2.0]}, {"output": [3.0, 4.0]}]),
        (BOXES, [{"output": {"boxes": [[1.0] * 4] * 2, "name": "cat"}}, {"output": {"boxes": [], "name": ""}}]),
        (Found(torch.tensor([5, 6])), [{"output": {"boxes": 5, "step": 3}}, {"output": {"boxes": 6, "step": 3}}]),
        ((torch.tensor([1, 2]), torch.tensor([3, 4])), [{"output": [1, 3]}, {"output": [2, 4]}]),
        ([torch.ones(2), torch.ones(2), torch.zeros(2)], [{"output": [1.0, 1.0, 0.0]}] * 2),
        (torch.tensor([1 + 2j, 3]), [{"output": [1.0, 2.0]}, {"output": [3.0, 0.0]}]),
        ({"logits": torch.ones(2), "loss": None}, [{"logits": 1.0, "loss": None}] * 2),
        (np.array([1 + 2j, 3]), [{"output": [1.0, 2.0]}, {"output": [3.0, 0.0]}]),
        (np.array(["a", None], object), [{"output": "a"}, {"output": None}]),
        (torch.eye(2).to_sparse(), [{"output": [1.0, 0.0]}, {"output": [0.0, 1.0]}]),
        (jagged([torch.ones(1), torch.zeros(2)]), [{"output": [1.0]}, {"output": [0.0, 0.0]}]),
        ({"past_key_values": torch.ones(2)}, [{"past_key_values": 1.0}] * 2),
        ([torch.ones(1)], [{"output": [1.0]}]),
    ],
)
def test_a_prediction_has_a_row_for_each_sample(outputs, rows):
    assert rows_of(dsframe.Task(), outputs, None, len(rows)) == rows


class Odd(Plane):
    def predictions(self, outputs, targets):
        return outputs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "returned int"),
        ({"a": 3}, "'a': int for a batch of 2 samples"),
        ({"a": {"b": 3.0}}, "'a', b: float for a batch of 2 samples"),
        ({"a": torch.tensor(3.0)}, r"'a': shape \[\] for a batch of 2 samples"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, r"'b': shape \[3\] for a batch of 2 samples; return a row for each"),
        ({"a": ["x", "y", "z"]}, "'a': a list of 3 for a batch of 2 samples"),
        ({"a": [torch.ones(2), torch.ones(2)]}, "its entries or its rows may be the samples"),
        ({"a": [object(), object()]}, "'a': object is nothing that can be written"),
        ({"a": [Path("a"), Path("b")]}, "'a': PosixPath is nothing that can be written"),
        (
            {"a": np.array(["2026-11-30"] * 2, "datetime64[ns]")},
            r"'a': datetime64\[ns\] is nothing that can be written",
        ),
        ({}, "returned nothing to write"),
        ({"1": torch.ones(2), 1: torch.ones(2)}, "JSON has texts as names, and two of these are '1'"),
        ({"a": [{"1": 2, 1: 3}] * 2}, "JSON has texts as names, and two of these are '1'"),
        ({"a": np.array([b"x", b"y"])}, "'a': bytes is nothing that can be written"),
        ({"a": jagged([torch.ones(1)])}, "'a': 1 rows for a batch of 2 samples"),
    ],
)
def test_predictions_without_a_row_for_each_sample_are_refused(given, message):
    with pytest.raises(TaskError, match=message):
        rows_of(Odd(), given, None, 2)


def test_an_engine_is_short_for_its_key():
    assert evaluate._options("evaluate", ["run", "--engine", "ddp"]).overrides == ["dsframe.engine=ddp"]


def test_an_evaluation_runs_no_hooks_and_takes_what_the_processes_divide(tmp_path):
    write_json(tmp_path / "x.json", file(tmp_path, hooks=["nowhere:Hooks"]))
    config = evaluate._fitting(tmp_path / "x.json", [], World(size=3, local_size=3))
    assert not config.settings.hooks
    assert config.batch(3, replicas=True).train_batch_size == 24


def test_what_no_file_names_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"run": {"script_task": "__main__:Mine"}}\n')
    with pytest.raises(TaskError, match=r"--set dsframe\.task\.name=SCRIPT:Mine"):
        evaluate._refuse_script(tmp_path)
    with pytest.raises(TaskError, match="InputsAlone has several sets"):
        evaluate._to_predict(InputsAlone({"a": [], "b": []}))


class Short(Plane):
    """Has too few predictions for the last batch."""

    def predictions(self, outputs, targets):
        return {"sign": outputs.sign() if len(outputs) == 8 else outputs[:0]}


class Masked(Plane):
    """Masks the scores of the last batch."""

    def predictions(self, outputs, targets):
        return {"score": outputs if len(outputs) == 8 else outputs - math.inf, "x": ["NaN"] * len(outputs)}

    def metrics(self, outputs, targets):
        return {"none": dsframe.Sum(torch.zeros(()), 0)}


def test_what_json_does_not_have_is_null_and_said(trained, tmp_path, capsys):
    write(trained[0], tmp_path / "a.jsonl", task=Masked())
    text = (tmp_path / "a.jsonl").read_text()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [row["score"] == [None, None] for row in rows].index(True) == 32
    assert rows[0]["x"] == "NaN"
    said = f"note: {SAMPLES - 32} rows have NaN or infinity, the first is row 32; JSON has neither, so null is written"
    assert capsys.readouterr().err.count(said) == 1
    command("evaluate", str(trained[0]), "--set", f"dsframe.task.name={__name__}:Masked")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["metrics"]["none"] is None


def test_predictions_that_fail_leave_no_file(trained, tmp_path):
    """Not those of the batches before either, on any rank."""
    words = ["--out", str(tmp_path / "a.jsonl"), "--set", f"dsframe.task.name={__name__}:Short"]
    with pytest.raises(TaskError, match=r"'sign': shape \[0, 2\] for a batch of 5 samples"):
        command("predict", str(trained[0]), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [nn.Linear(3, 2), Plane().model()[:2]])
def test_load_model_names_another_model(model, trained, monkeypatch):
    task = Plane()
    monkeypatch.setattr(task, "model", lambda: model)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_model(trained[0], task)


def test_a_checkpoint_alone_and_its_task_are_enough(trained, tmp_path):
    """The file of the run is not asked for."""
    (path,) = sorted((trained[0] / "checkpoints").glob("step-*"))[-1:]
    shutil.copytree(path, tmp_path / path.name)
    assert load_model(tmp_path / path.name, Plane())


class Waves(nn.Module):
    """Has a constant that no checkpoint keeps."""

    def __init__(self):
        super().__init__()
        self.constant = torch.randn(3, 8)
        self.register_buffer("other", torch.randn(8), persistent=False)

    def forward(self, inputs):
        return torch.cos(inputs @ self.constant + self.get_buffer("other"))


class Whole(Plane):
    def model(self):
        return nn.Sequential(Waves(), nn.Linear(8, 2))


class Layers(Plane):
    model = dsframe.Task.model

    def layers(self):
        return [Waves, partial(nn.Linear, 8, 2)]


class Several(Plane):
    model = dsframe.Task.model

    def models(self):
        return {"one": Whole().model}

    def losses(self):
        return {"one": lambda models, inputs, targets: self.loss(models["one"](inputs), targets)}


@pytest.mark.parametrize("task", [Whole, Layers, Several])
def test_load_model_draws_what_the_training_drew(task, tmp_path):
    """And leaves the caller's random generators, and its task, as they were."""
    run = tmp_path / "run"
    settings = file(run, seed=3)
    del settings["dsframe"]["task"]
    summary, given = dsframe.fit(task(), settings), task()
    before = generators.capture(torch.device("cpu"))
    model = load_model(run, given)
    assert generators.capture(torch.device("cpu")) == before
    assert given.seed == 0
    inputs, targets = given.eval_data().batch(torch.arange(SAMPLES), 0)
    with torch.no_grad():
        outputs = (model["one"] if task is Several else model)(inputs)
    assert given.loss(outputs, targets).item() == pytest.approx(summary.metrics["loss"], rel=1e-5)
