"""Image classification: a small CNN of our own or any torchvision model, on images in memory or in folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses

from dsframe.data import vision as data
from dsframe.tasks.task import Sum, Task, accuracy

if TYPE_CHECKING:
    from dsframe.config.settings import VisionTask as VisionSettings


class VisionTask(Task):
    """Cross entropy over classes; reports loss and accuracy."""

    def __init__(self, settings: VisionSettings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.workers = settings.workers
        self.images = data.describe(settings)
        if settings.model != "cnn":
            from dsframe.tasks import _torchvision  # here, because importing torchvision takes seconds

            images = self.images
            self.batch_dependent = _torchvision.probe(settings.model, images.channels, images.size, images.classes)

    def layers(self) -> Sequence[nn.Module] | None:
        if self.settings.model != "cnn":
            return None
        return cnn(self.images.channels, self.images.size, self.images.classes)

    def model(self) -> nn.Module:
        if self.settings.model == "cnn":
            return super().model()
        from dsframe.tasks import _torchvision

        return _torchvision.classifier(self.settings.model, self.images.classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Sum]:
        total = F.cross_entropy(outputs.float(), targets, reduction="sum")
        return {"loss": Sum(total, len(targets)), "accuracy": accuracy(outputs, targets)}

    def train_data(self) -> Any:
        return data.load(self.settings, self.images, train=True, seed=self.seed)

    def eval_data(self) -> Any:
        return data.load(self.settings, self.images, train=False, seed=self.seed)


def cnn(channels: int, size: int, classes: int) -> list[nn.Module]:
    """A small convolutional network as layers.

    No BatchNorm: its statistics would depend on the micro-batch, and so on the number of ranks.
    """
    width = (32, 64, 128)
    side = size // 2 // 2 // 2
    return [
        nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * channels, width[0], 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(width[0], width[1], 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(width[1], width[2], 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(width[2] * side * side, classes),
    ]
