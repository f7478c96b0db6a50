"""Images per second of the data path: dsframe's whole-batch augmentation beside torchvision's per-image pipeline.

    python benchmarks/data_path.py [--pairs 7] [--json FILE]

Both do the same to each image: a random crop after zero padding, a mirror image half of the time, conversion to float
and normalisation. Both run in this process on one thread, alternating, on random pixels; the table gives medians.
torchvision is measured as people use it (``transforms.Compose`` over PIL images in a ``Dataset``, then the default
collation of the ``DataLoader``) and, as its fastest per-image form, with ``transforms.v2`` over uint8 tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dsframe.data import ImageSource, Loader
from dsframe.tasks._torchvision import torchvision

SHAPES = {"Fashion-MNIST": (1, 28, 3), "CIFAR-10": (3, 32, 4)}
"""Channels, size and padding."""
BATCH = 128


class PerImage(Dataset[Any]):
    """What torchvision's own data sets do: one image and one transform at a time."""

    def __init__(self, images: list[Any], labels: list[int], transform: Callable[[Any], Any]) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.labels[index]


def rate(batches: Any, limit: int) -> float:
    """Images per second over ``limit`` batches, after one that is not counted."""
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    for _ in range(limit):
        next(iterator)
    return limit * BATCH / (time.perf_counter() - start)


def measure(channels: int, size: int, padding: int, pairs: int) -> dict[str, list[float]]:
    """Images per second of each pipeline, ``pairs`` times, alternating."""
    torchvision()
    from torchvision import transforms
    from torchvision.transforms import v2
    from torchvision.transforms.functional import to_pil_image

    count = 4096
    images = torch.randint(256, (count, channels, size, size), dtype=torch.uint8)
    labels = torch.randint(10, (count,))
    mean, std = (0.5,) * channels, (0.25,) * channels
    pil = transforms.Compose(
        [
            transforms.RandomCrop(size, padding),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    tensors = v2.Compose(
        [
            v2.RandomCrop(size, padding),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean, std),
        ]
    )
    source = ImageSource(images, labels, classes=10, mean=mean, std=std, padding=padding, flip=True)
    per_image = {
        "torchvision, PIL images": PerImage([to_pil_image(image) for image in images], labels.tolist(), pil),
        "torchvision v2, tensors": PerImage(list(images), labels.tolist(), tensors),
    }
    rates: dict[str, list[float]] = {"dsframe": [], **{name: [] for name in per_image}}
    for _ in range(pairs):
        rates["dsframe"].append(rate(Loader(source, seed=0, micro_batch_size=BATCH).stream(), 300))
        for name, dataset in per_image.items():
            rates[name].append(rate(DataLoader(dataset, BATCH, shuffle=True), 10))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="how often each pipeline is measured")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(*shape, arguments.pairs) for name, shape in SHAPES.items()}
    print(f"{'data':14} {'pipeline':24} {'images/s':>10} {'lowest':>10} {'highest':>10} {'dsframe is':>11}")
    for name, rates in results.items():
        for pipeline, values in rates.items():
            # The ratio is the median over pairs measured next to each other, so that a busy moment hits both.
            ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["dsframe"], values, strict=True))
            print(
                f"{name:14} {pipeline:24} {statistics.median(values):10,.0f} {min(values):10,.0f} "
                f"{max(values):10,.0f} {ratio:9.1f} x"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
