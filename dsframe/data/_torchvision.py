"""The only import of torchvision, with a workaround if it does not match the installed torch.

PyPI's torchvision is compiled against torch with CUDA. With a CPU torch its extension ``_C`` cannot be loaded, its
operators stay undefined, and ``import torchvision`` fails with "operator torchvision::nms does not exist", because it
registers shape functions for two of them unconditionally (torchvision 0.28, ``_meta_registrations.py``). Defining these
two schemas first is enough for models, transforms and data sets, which are Python code. Functions that need the
extension (``ops.nms``, ``io.decode_image``) still raise when called.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.user_class import close_match

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@cache
def torchvision() -> Any:
    """Returns the torchvision package. Raises TaskError if it is not installed or does not fit the installed torch."""
    if importlib.util.find_spec("torchvision") is None:
        raise TaskError('torchvision is not installed; pip install "dsframe[vision]", or use model "cnn"')
    try:
        define_operators()
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise TaskError(
            f"cannot import torchvision with torch {torch.__version__}: {error}; install the release made for it"
        ) from error


def define_operators() -> None:
    """Makes torchvision importable with this torch, if necessary. Call before its import."""
    spec = importlib.util.find_spec("torchvision")
    if spec and spec.origin and not _has_operators(Path(spec.origin).parent):
        _define_schemas()


def _has_operators(folder: Path) -> bool:
    for extension in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))  # type: ignore[no-untyped-call]
        except OSError:  # needs CUDA libraries that this torch lacks
            continue
    return all(hasattr(torch.ops.torchvision, name) for name in _SCHEMAS)


@cache
def _define_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)  # type: ignore[no-untyped-call]
    return library  # cached, because the definitions live as long as this object


class Classifier(nn.Module):
    """A torchvision network that also takes images of one channel, repeated three times."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.expand(-1, 3, -1, -1))  # type: ignore[no-any-return]


def classifier(name: str, classes: int) -> nn.Module:
    """Returns the untrained classification model ``name``: float ``[n, 1 or 3, size, size]`` to logits ``[n,
    classes]``.

    Raises TaskError for an unknown name.
    """
    models = torchvision().models
    names = models.list_models(module=models)
    if name not in names:
        hint = close_match(name, names) or f"; there are {', '.join(names)}"
        raise TaskError(f'model "{name}": neither "cnn" nor a classification model of torchvision{hint}')
    # These two have extra outputs in training, and warn unless their initialisation is chosen.
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return Classifier(models.get_model(name, weights=None, num_classes=classes, **extra))


def empty(name: str, classes: int) -> nn.Module:
    """Returns the same model on the meta device. Raises TaskError for an unknown name."""
    try:
        with torch.device("meta"):
            return classifier(name, classes)
    except NotImplementedError:  # RegNet computes its sizes with tensors
        return classifier(name, classes).to("meta")
