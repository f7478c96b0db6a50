"""torchmetrics objects in an evaluation: what they say of all samples, and what is refused."""

import re

import pytest
import torch
from torch import nn

import dsframe
from dsframe.data import TensorSource
from dsframe.errors import TaskError
from dsframe.model import metric_objects
from tests.files import ds_config
from tests.lines import Line
from tests.threads import Room

torchmetrics = pytest.importorskip("torchmetrics")

ROWS = torch.randn(19, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(19) % 3


class Fixed(Line):
    """Its weights stay, so that what it should say is known."""

    inputs, outputs = 4, 3

    def __init__(self, **objects):
        self.metric_objects = objects

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def train_data(self):
        return TensorSource(ROWS, LABELS)

    eval_data = train_data


def metrics(tmp_path, task=None, eval_micro_batch_size=4, **objects):
    settings = {
        "engine": "single",
        "steps": 2,
        "eval_every_steps": 1,
        "eval_micro_batch_size": eval_micro_batch_size,
        "run_dir": str(tmp_path),
    }
    file = ds_config(4, "SGD", 0.0, **settings)
    return dsframe.fit(task or Fixed(**objects), file).metrics


def test_they_see_each_sample_once(tmp_path):
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

    kinds = {"auroc": MulticlassAUROC, "accuracy": MulticlassAccuracy, "f1": MulticlassF1Score}
    collection = torchmetrics.MetricCollection({name: kind(num_classes=3) for name, kind in kinds.items()})
    found = metrics(tmp_path, all=collection, alone=MulticlassF1Score(num_classes=3))
    torch.manual_seed(0)
    outputs = nn.Linear(4, 3)(ROWS).detach()
    for name, kind in kinds.items():
        expected = kind(num_classes=3)
        expected.update(outputs, LABELS)
        assert found[f"all_{name}"] == pytest.approx(float(expected.compute()), abs=1e-6)
    assert found["alone"] == found["all_f1"]
    assert set(found) == {"loss", "all_auroc", "all_accuracy", "all_f1", "alone"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 3, "Fixed.metric_objects['wrong'] is int, not a torchmetrics object"),
        (
            lambda: torchmetrics.classification.MulticlassF1Score(num_classes=3, average=None),
            "Fixed.metric_objects['wrong'] gives shape [3], not a number; choose an average",
        ),
        (
            lambda: torchmetrics.classification.MulticlassROC(num_classes=3),
            "Fixed.metric_objects['wrong'] gives a tuple, not a number; choose another",
        ),
    ],
)
def test_what_is_refused_before_training(make, message, tmp_path):
    with pytest.raises(TaskError, match=re.escape(message)):
        metrics(tmp_path, wrong=make())


def test_a_list_for_each_batch_is_refused(tmp_path):
    class Lists(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("boxes", default=[], dist_reduce_fx=None)

        def update(self, outputs, targets):
            self.boxes.append(outputs)

        def compute(self):
            return torch.tensor(len(self.boxes))

    with pytest.raises(TaskError, match=r"keeps 'boxes' as a list for each batch, .*metrics_of_all\(\)"):
        metrics(tmp_path, wrong=Lists())


class Counts(torchmetrics.Metric):
    """Torchmetrics gathers and resets ``right`` alone."""

    def __init__(self, is_state):
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        if is_state:
            self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")
        else:
            self.rows = 0
        self.classes = None

    def update(self, outputs, targets):
        self.rows = self.rows + len(targets)
        self.right += (outputs.argmax(-1) == targets).sum()
        self.classes = self.classes or outputs.shape[-1]  # found in the first batch

    def compute(self):
        return self.right / self.rows


def test_what_a_metric_keeps_beside_its_states_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"keeps 'rows', which ranks cannot gather; .*self.add_state\('rows', ...\)"):
        metrics(tmp_path / "refused", rate=Counts(is_state=False))
    assert metrics(tmp_path / "right", rate=Counts(is_state=True))["rate"] == pytest.approx(2 / 19)


class PrivateCount(torchmetrics.MeanMetric):
    """Torchmetrics neither gathers nor resets ``_batches``; ``_begun`` is a switch."""

    def __init__(self):
        super().__init__()
        self._batches, self._begun = 0, False

    def update(self, outputs, targets):
        super().update(outputs)
        self._batches, self._begun = self._batches + 1, True


def test_private_counts_are_refused_and_switches_pass(tmp_path):
    """A window of the last batches, and what is divided by a number of batches, are others on more ranks."""
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
    with pytest.raises(TaskError, match="keeps '_batches', which ranks cannot gather"):
        metrics(tmp_path / "count", wrong=PrivateCount())
    with pytest.raises(TaskError, match="keeps '_num_vals_seen', which ranks cannot gather"):
        metrics(tmp_path / "window", wrong=torchmetrics.wrappers.Running(accuracy, window=2))


def test_a_metric_that_cannot_be_reset_is_refused(tmp_path):
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
    with pytest.raises(TaskError, match=r"metric_objects\['steps'\] cannot be reset: KeyError"):
        metrics(tmp_path, steps=torchmetrics.wrappers.MetricTracker(accuracy))


def test_ranks_join_what_a_metric_was_told_to_keep_apart():
    def value(ranks):
        alone = torchmetrics.MeanMetric(sync_on_compute=False)
        ranks.plan.task, ranks.plan.device = Fixed(mean=alone), torch.device("cpu")
        metric_objects.reset(ranks)
        alone.update(torch.tensor(float(ranks.plan.world.rank)))
        return metric_objects.compute(ranks)["mean"]

    assert Room(2).run(value) == [0.5, 0.5]


class Whole(Fixed):
    """Its metrics take the columns of numbers; ``sets`` are evaluated."""

    def update_metric(self, metric, outputs, targets):
        metric.update(outputs[:, 0], targets.float())

    def eval_data(self):
        return {"many": TensorSource(ROWS, LABELS), "two": TensorSource(ROWS[:2], LABELS[:2])}


def test_a_set_has_bounds_of_its_own(tmp_path):
    """Neither the other set, nor the trial before training, nor an earlier evaluation counts."""
    bounds = torchmetrics.wrappers.MinMaxMetric(torchmetrics.MeanSquaredError())
    found = metrics(tmp_path, Whole(bounds=bounds))
    for name in ("many", "two"):
        assert found[f"{name}/bounds_min"] == found[f"{name}/bounds_raw"] == found[f"{name}/bounds_max"]


def test_a_metric_that_raises_is_named(tmp_path):
    """Before training where the trial has all samples; the first batch of a longer set may have too few."""
    task = Whole(r2=torchmetrics.R2Score())
    assert metrics(tmp_path / "enough", task, eval_micro_batch_size=1)["many/r2"] < 1
    task.eval_data = lambda: TensorSource(ROWS[:1], LABELS[:1])
    message = "Whole.metric_objects['r2'] cannot be computed: ValueError: Needs at least two samples"
    with pytest.raises(TaskError, match=re.escape(message)):
        metrics(tmp_path / "one", task)
    assert not (tmp_path / "one" / "checkpoints" / "step-00000002").exists()
