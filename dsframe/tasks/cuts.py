"""Torchvision's classifiers as lists of layers, each of which takes what the one before gives.

The layers are the network's own modules, in the order of its ``forward`` (torchvision 0.20 to 0.28), and where that does more than
call modules, a small module that does it. Modules that are plain ``nn.Sequential`` are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dsframe.data._torchvision import three_channels


class Step(nn.Module):
    """A function between modules. ``shares``: parameters of the network that it needs, under its names for them."""

    def __init__(self, function: Callable[..., Tensor], **shares: nn.Parameter | nn.Module) -> None:
        super().__init__()
        self._function, self._shares = function, tuple(shares)
        for name, shared in shares.items():
            setattr(self, name, shared)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs, **{name: getattr(self, name) for name in self._shares})


def _patches(images: Tensor, conv_proj: nn.Module, class_token: Tensor) -> Tensor:
    """A vision transformer's start: [n, 3, h, w] to [n, 1 + patches, width]."""
    patches = conv_proj(images).flatten(2).transpose(1, 2)
    return torch.cat([class_token.expand(len(patches), -1, -1), patches], dim=1)


def _positions(tokens: Tensor, pos_embedding: Tensor, dropout: nn.Module) -> Tensor:
    return dropout(tokens + pos_embedding)  # type: ignore[no-any-return]


def _first(tokens: Tensor) -> Tensor:
    return tokens[:, 0]


def _vision_transformer(net: Any) -> Sequence[nn.Module]:
    encoder = net.encoder
    return [
        Step(_patches, conv_proj=net.conv_proj, class_token=net.class_token),
        Step(_positions, pos_embedding=encoder.pos_embedding, dropout=encoder.dropout),
        *encoder.layers,
        encoder.ln,
        Step(_first),
        net.heads,
    ]


def _mean(images: Tensor) -> Tensor:
    return images.mean([2, 3])


_Part = str | Callable[[], nn.Module]
_FLAT: _Part = nn.Flatten
_AVERAGE: _Part = partial(nn.AdaptiveAvgPool2d, 1)
_MEAN: _Part = partial(Step, _mean)
_RELU: _Part = nn.ReLU

_ORDER: Mapping[str, Sequence[_Part]] = {
    "AlexNet": ("features", "avgpool", _FLAT, "classifier"),
    "VGG": ("features", "avgpool", _FLAT, "classifier"),
    "ResNet": (*("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"), _FLAT, "fc"),
    "DenseNet": ("features", _RELU, _AVERAGE, _FLAT, "classifier"),
    "SqueezeNet": ("features", "classifier", _FLAT),
    "MobileNetV2": ("features", _AVERAGE, _FLAT, "classifier"),
    "MobileNetV3": ("features", "avgpool", _FLAT, "classifier"),
    "MNASNet": ("layers", _MEAN, "classifier"),
    "ShuffleNetV2": ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5", _MEAN, "fc"),
    "EfficientNet": ("features", "avgpool", _FLAT, "classifier"),
    "RegNet": ("stem", "trunk_output", "avgpool", _FLAT, "fc"),
    "ConvNeXt": ("features", "avgpool", "classifier"),
    "SwinTransformer": ("features", "norm", "permute", "avgpool", "flatten", "head"),
    "MaxVit": ("stem", "blocks", "classifier"),
}
"""Class of network -> its attributes in order, and the functions that ``forward`` calls between them."""


def classifier(model: nn.Module) -> list[nn.Module] | None:
    """The layers of a ``_torchvision.Classifier``; None as for :func:`cut`."""
    layers = cut(model.get_submodule("network"))
    return layers and [Step(three_channels), *layers]


def cut(network: nn.Module) -> list[nn.Module] | None:
    """The layers of one of torchvision's classifiers; None for the few that are not a chain (GoogLeNet, Inception)."""
    class_name = type(network).__name__
    if class_name == "VisionTransformer":
        parts = _vision_transformer(network)
    elif class_name in _ORDER:
        parts = [getattr(network, part) if isinstance(part, str) else part() for part in _ORDER[class_name]]
    else:
        return None
    return [layer for part in parts for layer in _apart(part)]


def _apart(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) in (nn.Sequential, nn.ModuleList):
        for child in cast(nn.Sequential, module):  # not children(): one may be there twice
            yield from _apart(child)
    else:
        yield module
