"""torchmetrics objects in an evaluation: what they say of all samples, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsframe
from dsframe.data import TensorSource
from dsframe.errors import TaskError

torchmetrics = pytest.importorskip("torchmetrics")

ROWS = torch.randn(19, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(19) % 3


class Fixed(dsframe.Task):
    """Its weights stay, so that what it should say is known."""

    def __init__(self, **objects: Any) -> None:
        self.metric_objects = objects

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def train_data(self) -> Any:
        return TensorSource(ROWS, LABELS)

    eval_data = train_data


def metrics(tmp_path: Path, **objects: Any) -> Any:
    settings = {
        "engine": "single",
        "steps": 2,
        "eval_every_steps": 1,
        "eval_micro_batch_size": 4,
        "run_dir": str(tmp_path),
    }
    file = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "dsframe": settings}
    return dsframe.fit(Fixed(**objects), file).metrics


def test_they_see_each_sample_once(tmp_path: Path) -> None:
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
    ],
)
def test_what_is_refused_before_training(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        metrics(tmp_path, wrong=make())


def test_a_list_for_each_batch_is_refused(tmp_path: Path) -> None:
    class Lists(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("boxes", default=[], dist_reduce_fx=None)

        def update(self, outputs: Any, targets: Any) -> None:
            self.boxes.append(outputs)

        def compute(self) -> Tensor:
            return torch.tensor(len(self.boxes))

    with pytest.raises(TaskError, match="keeps 'boxes' as a list for each batch"):
        metrics(tmp_path, wrong=Lists())
