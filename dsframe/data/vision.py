"""The image data sets that a file can name: their properties, locations and readers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from dsframe.data import folder
from dsframe.data._torchvision import torchvision
from dsframe.data.files import data_root
from dsframe.data.idx import read_idx
from dsframe.data.sampler import permutation
from dsframe.data.source import ImageSource
from dsframe.errors import DataError, TaskError
from dsframe.text import Say, one_line

if TYPE_CHECKING:
    from dsframe.config.schema.settings import ImageData


@dataclass(frozen=True)
class Images:
    """Properties of a data set that a model needs before data are read."""

    name: str
    channels: int
    size: int
    """Height and width in pixels."""
    classes: int
    mean: tuple[float, ...]
    """Mean of the training pixels, scaled to [0, 1], per channel."""
    std: tuple[float, ...]
    padding: int
    """Largest shift by augmentation, in pixels."""
    mirrored: bool
    """True if a mirror image still shows the same class: true for garments, not for digits."""
    names: tuple[str, ...] = ()
    """Class names by number, if the files have names."""
    floored: bool = False
    """True if the centre crop rounds its first pixel down, as transformers does; torchvision rounds to the nearest."""
    resized: int | tuple[int, int] | None = None
    """Pixels of an image whose centre is evaluated: of the shorter side, or height and width. Default: 8/7 of ``size``."""
    resample: int = 2
    """Pillow's number of the filter that evaluations resize with: 2 is bilinear, 3 bicubic."""

    def example(self) -> tuple[Tensor, Tensor]:
        """Returns meta tensors of one image, float ``[1, channels, size, size]``, and its class, int64 ``[1]``."""
        image = torch.empty(1, self.channels, self.size, self.size, device="meta")
        return image, torch.empty(1, dtype=torch.int64, device="meta")

    def tried(self, model: nn.Module, model_name: str) -> bool:
        """Runs a model on the meta device; returns True if it has BatchNorm. ``what``: the model, for messages.

        Raises TaskError if it does not accept the images or return one score per class.
        """
        with torch.device("meta"):
            try:
                outputs: Any = model.eval()(torch.empty(2, self.channels, self.size, self.size))
            except (RuntimeError, ValueError, AssertionError) as error:
                shape = f"{self.channels} x {self.size} x {self.size} (channels, height, width)"
                raise TaskError(f"{model_name} cannot take images of {shape}: {one_line(error)}") from error
        scores = getattr(outputs, "logits", outputs)
        if scores.shape != (2, self.classes):
            raise TaskError(
                f"{model_name} gives {list(scores.shape)}, not one score for each of {self.classes} classes"
            )
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


# Fashion-MNIST's garments are centred and fill the image: shift by one pixel only.
KNOWN = {
    "fashion-mnist": Images("fashion-mnist", 1, 28, 10, (0.2860,), (0.3530,), padding=1, mirrored=True),
    "mnist": Images("mnist", 1, 28, 10, (0.1307,), (0.3081,), padding=2, mirrored=False),
    "cifar10": Images(
        "cifar10", 3, 32, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), padding=4, mirrored=True
    ),
    "synthetic": Images("synthetic", 3, 32, 10, (0.5,) * 3, (0.25,) * 3, padding=2, mirrored=False),
    # Mean and deviation of ImageNet, as usual for photographs.
    "image-folder": Images(
        "image-folder", 3, 224, 0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), padding=0, mirrored=True
    ),
}


def describe(settings: ImageData) -> Images:
    """Returns the data set's properties; reads the class names of an image folder. Raises DataError."""
    images = KNOWN[settings.dataset]
    if settings.dataset == "synthetic":
        return replace(images, size=settings.image_size or images.size, classes=settings.classes or images.classes)
    if settings.dataset == "image-folder":
        names = tuple(folder.class_names(settings.data_dir))
        return replace(images, size=settings.image_size or images.size, classes=len(names), names=names)
    return images


def prepares(settings: ImageData) -> bool:
    """True if :func:`prepare` has work to do."""
    return settings.dataset == "image-folder"


def prepare(settings: ImageData, images: Images, seed: int, say: Say) -> None:
    """Opens the files of an image folder. Raises DataError that lists all damaged files."""
    folder.check(str(settings.data_dir), folder.class_names(settings.data_dir), say)


def load(settings: ImageData, images: Images, *, train: bool, seed: int) -> Any:
    """Returns the training or test data: a Source, or a map-style Dataset for image files. Raises DataError."""
    if settings.dataset == "image-folder":
        augment = train and settings.augment
        dataset: Any = folder.load(
            str(settings.data_dir),
            images,
            train=train,
            augment=augment,
            names=list(images.names),
            floored=images.floored,
        )
        if train and settings.samples is not None:
            # A folder is sorted by class, so choose at random; the same images for every seed, as with files.
            chosen = permutation(len(dataset), 0, 0)[: settings.samples].sort().values
            digest, dataset = dataset.digest_of_files, Subset(dataset, chosen.tolist())
            dataset.digest_of_files = digest
        return dataset
    if settings.dataset == "synthetic":
        pixels, labels = _synthetic(images, settings.samples or 10_000, train)
    elif settings.dataset == "cifar10":
        pixels, labels = read_cifar(settings.data_dir, train=train)
    else:
        pixels, labels = _read_mnist(settings.dataset, settings.data_dir, train)
    if train and settings.samples is not None:
        pixels, labels = pixels[: settings.samples], labels[: settings.samples]
    augment = train and settings.augment
    return ImageSource(
        pixels,
        labels,
        classes=images.classes,
        mean=images.mean,
        std=images.std,
        padding=images.padding if augment else 0,
        flip=augment and images.mirrored,
        seed=seed,
    )


MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TORCHVISION_FOLDER = {"fashion-mnist": "FashionMNIST/raw", "mnist": "MNIST/raw"}
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def find_mnist(name: str, data_dir: str | None) -> dict[str, Path]:
    """Returns the four files of ``mnist`` or ``fashion-mnist``, plain or ``.gz``, by their names without ``.gz``.

    Searches only ``data_dir`` if given. Raises DataError that lists the searched folders.
    """
    root = data_root(data_dir)
    folders = [root, root / TORCHVISION_FOLDER[name], root / name]
    if not data_dir:
        folders = folders[1:] + ([DEBIAN_FASHION_MNIST] if name == "fashion-mnist" else [])
    for candidate in folders:
        candidates = {file: [candidate / f"{file}.gz", candidate / file] for file in MNIST_FILES}
        paths = {file: path for file, spellings in candidates.items() for path in spellings if path.is_file()}
        if len(paths) == len(MNIST_FILES):
            return paths
    raise _not_found(name, data_dir, folders)


def read_cifar(data_dir: str | None, *, train: bool) -> tuple[Tensor, Tensor]:
    """Reads CIFAR-10 with torchvision, which checks MD5 sums: uint8 ``[N, 3, 32, 32]``, int64 ``[N]``."""
    root = data_root(data_dir)
    try:
        dataset = torchvision().datasets.CIFAR10(root, train=train)
    except RuntimeError:
        raise _not_found("cifar10", data_dir, [root / "cifar-10-batches-py"]) from None
    return torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(dataset.targets)


def _not_found(name: str, data_dir: str | None, folders: list[Path]) -> DataError:
    to = f" --to {data_root(data_dir)}" if data_dir else ""
    places = ", ".join(map(str, folders))
    return DataError(f'{name}: not complete in {places}; run "python -m dsframe.data.fetch {name}{to}"')


def _read_mnist(name: str, data_dir: str | None, train: bool) -> tuple[Tensor, Tensor]:
    paths = find_mnist(name, data_dir)
    image_path, label_path = (paths[file] for file in (MNIST_FILES[:2] if train else MNIST_FILES[2:]))
    pixels, labels = read_idx(image_path), read_idx(label_path)
    if pixels.ndim != 3 or pixels.shape[1:] != (28, 28):
        raise DataError(f"{image_path}: not 28 x 28 images: {list(pixels.shape)}")
    if labels.shape != pixels.shape[:1]:
        raise DataError(f"{image_path} holds {len(pixels):,} images, {label_path} {len(labels):,} labels")
    return pixels.unsqueeze(1), labels


def _synthetic(images: Images, samples: int, train: bool) -> tuple[Tensor, Tensor]:
    """Returns separable images: one fixed coarse pattern per class under noise. The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(images.classes, images.channels, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(patterns, size=(images.size, images.size), mode="nearest")
    generator.manual_seed(2 if train else 3)
    count = samples if train else max(samples // 10, 1)
    labels = torch.randint(images.classes, (count,), generator=generator)
    pixels = torch.empty(count, images.channels, images.size, images.size, dtype=torch.uint8)
    for start in range(0, count, 1024):  # in pieces, to keep the floating-point copy small
        part = patterns[labels[start : start + 1024]]
        noisy = 0.5 * part + 0.5 * torch.rand(part.shape, generator=generator)
        pixels[start : start + 1024] = (noisy * 255).to(torch.uint8)
    return pixels, labels
