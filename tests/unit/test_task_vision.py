"""Image classification: the small network, torchvision's models, the loss and what is reported."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from dsframe.config.schema.settings import VisionTask as Settings
from dsframe.data import _torchvision, vision
from dsframe.errors import TaskError
from dsframe.tasks import build
from dsframe.tasks.layers import assemble
from dsframe.tasks.vision import cnn


def task(**fields):
    section = {"dataset": "synthetic", "samples": 64, "image_size": 32, **fields}
    return build(Settings.model_validate(section), seed=1)


def test_the_cnn_is_small_and_does_not_mix_samples():
    large, model = (assemble(cnn(1, size, 10), seed=0) for size in (224, 28))
    for network in (large, model):
        assert 100_000 < sum(parameter.numel() for parameter in network.parameters()) < 350_000
    images = torch.randn(6, 1, 28, 28)
    torch.testing.assert_close(model(images)[2:4], model(images[2:4]), atol=1e-5, rtol=1e-5)
    assert not any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())


@pytest.mark.parametrize("size", [30, 4])
def test_sizes_that_the_cnn_cannot_take_are_refused(size):
    with pytest.raises(
        TaskError, match=f'model "cnn" takes images whose sides are multiples of 4, .*; these have {size}'
    ):
        task(image_size=size).model()


def test_loss_and_metrics():
    logits, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1, 1])
    vision = task()
    metrics = vision.metrics(logits, targets)
    assert metrics["loss"].mean == pytest.approx(float(vision.loss(logits, targets)))
    assert metrics["loss"].count == metrics["accuracy"].count == 3
    assert float(metrics["accuracy"].total) == 2


@pytest.mark.parametrize(("name", "batch_dependent"), [("resnet18", True), ("squeezenet1_1", False)])
def test_torchvisions_models_by_name(name, batch_dependent):
    vision = task(model=name, dataset="fashion-mnist", image_size=None)
    assert vision.batch_dependent == batch_dependent
    assert vision.layers() is None
    assert vision.model()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)  # one channel, shown three times


def test_unknown_models_and_too_small_images_are_refused():
    with pytest.raises(TaskError, match=r'model "resnet19": neither "cnn" nor .*; did you mean "resnet'):
        task(model="resnet19")
    with pytest.raises(TaskError, match=r'model "zzz": .*; there are alexnet, '):
        task(model="zzz")
    with pytest.raises(TaskError, match=r'model "alexnet" cannot take images of . x 16 x 16'):
        task(model="alexnet", image_size=16)


def test_a_model_of_other_classes_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 7))
    with pytest.raises(TaskError, match=r"own gives \[2, 7\], not one score for each of 10 classes"):
        vision.KNOWN["mnist"].tried(model, "own")


def test_torchvision_is_imported_only_where_it_is_needed_and_then_without_a_warning():
    script = """
import sys
from dsframe.config.schema.settings import VisionTask
from dsframe.tasks import build
build(VisionTask(dataset="synthetic"), 0)
assert "torchvision" not in sys.modules
from dsframe.data._torchvision import torchvision
assert torchvision() is torchvision()
from torchvision import datasets, models, transforms
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)


def test_without_torchvision_its_models_are_refused(monkeypatch):

    monkeypatch.setattr(_torchvision.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_torchvision, "torchvision", _torchvision.torchvision.__wrapped__)
    with pytest.raises(
        TaskError, match=r'torchvision is not installed; pip install "dsframe\[vision\]", or use model "cnn"'
    ):
        task(model="resnet18")


def test_what_is_no_chain_has_no_layers():
    assert task().cut(nn.Linear(2, 2)) is None
