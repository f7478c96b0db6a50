"""Image classification with a small built-in CNN or any torchvision model, on images in memory or in folders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses

from dsframe.data import vision as data
from dsframe.errors import TaskError
from dsframe.tasks.layers import Layer
from dsframe.tasks.task import Sum, Sums, Task, accuracy
from dsframe.text import Say

if TYPE_CHECKING:
    from dsframe.config.schema.settings import VisionTask as VisionSettings


class ImagesTask(Task):
    """A base class for tasks whose samples are images and their classes."""

    def __init__(self, settings: Any, seed: int) -> None:
        """``settings``: of a section with images."""
        self.settings, self.seed = settings, seed
        self.workers = settings.workers
        self.images = data.describe(settings)

    def example(self) -> tuple[Tensor, Tensor]:
        return self.images.example()

    @property
    def prepares(self) -> bool:
        return data.prepares(self.settings)

    def prepare(self, say: Say) -> None:
        data.prepare(self.settings, self.images, self.seed, say)

    def train_data(self) -> Any:
        return data.load(self.settings, self.images, train=True, seed=self.seed)

    def eval_data(self) -> Any:
        return data.load(self.settings, self.images, train=False, seed=self.seed)


class VisionTask(ImagesTask):
    """Computes cross entropy over classes. Reports loss and accuracy."""

    def __init__(self, settings: VisionSettings, seed: int) -> None:
        super().__init__(settings, seed)
        self.class_names = self.images.names
        if settings.model != "cnn":
            from dsframe.data import _torchvision  # here, because importing torchvision takes seconds

            model = _torchvision.empty(settings.model, self.images.classes)
            self.batch_dependent = self.images.tried(model, f'model "{settings.model}"')

    def layers(self) -> Sequence[Layer] | None:
        if self.settings.model != "cnn":
            return None
        return cnn(self.images.channels, self.images.size, self.images.classes)

    def model(self) -> nn.Module:
        if self.settings.model == "cnn":
            return super().model()
        from dsframe.data import _torchvision

        return _torchvision.classifier(self.settings.model, self.images.classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        total = F.cross_entropy(outputs.float(), targets, reduction="sum")
        return {"loss": Sum(total, len(targets)), "accuracy": accuracy(outputs, targets)}


def cnn(channels: int, size: int, classes: int) -> list[Layer]:
    """Returns a small convolutional network as layers: float ``[n, channels, size, size]`` to logits ``[n, classes]``.

    Four neighbouring pixels become channels of one, so that no convolution runs at full resolution. There is no
    BatchNorm, whose statistics would depend on the micro-batch, and so on the number of ranks. Raises TaskError if the
    size does not fit.
    """
    if size % 4 or size < 8:
        raise TaskError(
            f'model "cnn" takes images whose sides are multiples of 4, and 8 pixels at least; these have {size}'
        )
    side = min(size // 4, 8)
    pool = [nn.AdaptiveAvgPool2d(side)] if size // 4 > side else []  # keeps the dense layer small for large images
    return [
        lambda: nn.Sequential(
            nn.PixelUnshuffle(2), nn.Conv2d(4 * channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        ),
        lambda: nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        lambda: nn.Sequential(*pool, nn.Flatten(), nn.Linear(64 * side * side, 64), nn.ReLU()),
        partial(nn.Linear, 64, classes),
    ]
