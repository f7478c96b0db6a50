"""A GAN (Goodfellow et al. 2014, arXiv 1406.2661): two models, two optimizers, one task. It learns eight blobs on a circle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import TensorDataset

import dsframe


def net(inputs: int, outputs: int, width: int) -> nn.Module:
    """Returns a small network."""
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Blobs(dsframe.Task):
    """Inputs are noise, targets real points. The noise is data, so that it is the same on any number of processes."""

    def __init__(self, width: int = 64, samples: int = 8192) -> None:
        self.width, self.samples = width, samples

    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Returns what makes each model. The first is evaluated."""
        return {"generator": partial(net, 8, 2, self.width), "discriminator": partial(net, 2, 1, self.width)}

    def losses(self) -> Mapping[str, Any]:
        """Returns the losses of a step in their order, by the model that each trains."""
        return {"discriminator": self.tell, "generator": self.fool}

    def tell(self, models: Mapping[str, Any], noise: Tensor, real: Tensor) -> Any:
        """The discriminator's loss; beside it what is logged."""
        made, found = models["discriminator"](models["generator"](noise)), models["discriminator"](real)
        right = dsframe.Sum((made < 0).sum() + (found > 0).sum(), 2 * len(real))
        return bce(made, torch.zeros_like(made)) + bce(found, torch.ones_like(found)), {"told_right": right}

    def fool(self, models: Mapping[str, Any], noise: Tensor, real: Tensor) -> Tensor:
        """The generator's loss, through the discriminator, which stays as it is."""
        made = models["discriminator"](models["generator"](noise))
        return bce(made, torch.ones_like(made))

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, dsframe.Sum]:
        """How far the made points are from the nearest blob's centre, on average."""
        nearest = torch.cdist(outputs, centres().to(outputs)).amin(1)
        return {"distance": dsframe.Sum(nearest.sum(), len(outputs))}

    def train_data(self) -> TensorDataset:
        """Noise and points."""
        return data(self.samples, 0)

    def eval_data(self) -> TensorDataset:
        """Others of the same kind."""
        return data(1024, 1)


def centres() -> Tensor:
    """Returns the blobs' centres: float32 ``[8, 2]``."""
    angle = torch.arange(8) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1)


def data(samples: int, seed: int) -> TensorDataset:
    """Returns rows of noise ``[8]`` and a point ``[2]``, both float32."""
    draw = torch.Generator().manual_seed(seed)
    noise, which = torch.randn(samples, 8, generator=draw), torch.randint(8, (samples,), generator=draw)
    return TensorDataset(noise, centres()[which] + 0.05 * torch.randn(samples, 2, generator=draw))


if __name__ == "__main__":
    dsframe.main(Blobs())
