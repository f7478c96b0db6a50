"""Images in folders, one folder per class: ``<data_dir>/train/<class>/*.jpg`` and ``<data_dir>/val/<class>/*.jpg``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsframe.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})
_TEST_FOLDERS = ("val", "test", "eval")


class Normalisation(Protocol):
    """The part of :class:`dsframe.data.vision.Images` that is needed here."""

    @property
    def size(self) -> int: ...
    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...


def class_names(data_dir: str | None) -> list[str]:
    """The classes: the names of the folders in ``<data_dir>/train``, sorted. Raises DataError."""
    if not data_dir:
        raise DataError('dataset "image-folder" needs data_dir: the folder that holds train/<class>/ and val/<class>/')
    folder = Path(data_dir).expanduser() / "train"
    if not folder.is_dir():
        raise DataError(f"image-folder: {folder} does not exist; images belong in {folder}/<class>/")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(f"image-folder: {folder} holds no folder; images belong in {folder}/<class>/")
    return names


def test_folder(data_dir: str, dataset: str) -> Path:
    """``val``, ``test`` or ``eval`` beside ``train``, whichever comes first. Raises DataError where there is none."""
    root = Path(data_dir).expanduser()
    for name in _TEST_FOLDERS:
        if (root / name).is_dir():
            return root / name
    raise DataError(f"{dataset}: {root} has none of {', '.join(_TEST_FOLDERS)} to evaluate on")


class Look:
    """Makes float32 ``[3, size, size]``, normalised, of an RGB image of Pillow's.

    With ``augment``: a random part of the image (8 % to 100 % of its area, aspect ratio 3:4 to 4:3), resized, and
    mirrored half of the time: the usual augmentation for ImageNet. Else: the shorter side resized to 8/7 of ``size``,
    then the centre.
    """

    def __init__(self, images: Normalisation, *, augment: bool) -> None:
        self._size, self._augment = images.size, augment
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (images.mean, images.std))

    def __call__(self, image: Any) -> Tensor:
        """The image as the model sees it. Draws random numbers where it augments."""
        from PIL import Image

        box = _random_box(*image.size) if self._augment else _centre_box(*image.size)
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self._augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return (pixels / 255 - self._mean) / self._std


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Decoded as they are asked for: what :class:`Look` makes of an image, and the class's number."""

    def __init__(self, folder: Path, classes: list[str], look: Look) -> None:
        self._look = look
        unknown = sorted({entry.name for entry in folder.iterdir() if entry.is_dir()} - set(classes))
        if unknown:
            raise DataError(f"image-folder: {folder} has classes that train/ has not: {', '.join(unknown)}")
        self.samples = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            raise DataError(f"image-folder: no images ({', '.join(sorted(SUFFIXES))}) in {folder}/<class>/")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, (path, label) = pillow(), self.samples[index]
        try:
            with images.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, images.DecompressionBombError) as error:
            raise DataError(f"{path}: cannot be read as an image ({error})") from error
        return self._look(image), label


def pillow() -> Any:
    """Pillow's ``Image``. Raises DataError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError('reading image files needs Pillow; pip install "dsframe[vision]"') from error
    return Image


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(0.08, 1))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = float(torch.rand(())) * (width - w), float(torch.rand(())) * (height - h)
            return left, top, left + w, top + h
    return _centre_box(width, height)


def _centre_box(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def load(data_dir: str, images: Any, *, train: bool, augment: bool) -> ImageFolder:
    """The training or the evaluation images under ``data_dir``. Raises DataError."""
    folder = Path(data_dir).expanduser() / "train" if train else test_folder(data_dir, "image-folder")
    return ImageFolder(folder, class_names(data_dir), Look(images, augment=augment))
