"""The data path alone: images beside torchvision, text beside ``datasets`` with torch's DataLoader.

    python -m benchmarks.data_path [--parts images text] [--pairs 7] [--json FILE]

Images per second: dsframe's whole-batch augmentation beside torchvision's per-image pipeline.
Both do the same to each image: a random crop after zero padding, a mirror image half of the time, conversion to float
and normalisation. Both run in this process on one thread, alternating, on random pixels; the table gives medians.
torchvision is measured as people use it (``transforms.Compose`` over PIL images in a ``Dataset``, then the default
collation of the ``DataLoader``) and, as its fastest per-image form, with ``transforms.v2`` over uint8 tensors.

Tokens per second, of the same tokenised documents: ``datasets`` reads its own memory-mapped Arrow files, row by row and in whole
batches (``__getitems__``), shuffled. Documents are packed before, one after the other. No workers:
reading is in the training process on both sides.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from dsframe.data import ImageSource, Loader
from dsframe.data._torchvision import torchvision
from dsframe.data.packed import RowSource
from dsframe.data.text import TextSource
from dsframe.data.tokenised import Recipe, find_tokens, make

SHAPES = {"Fashion-MNIST": (1, 28, 3), "CIFAR-10": (3, 32, 4)}
"""Channels, size and padding."""
BATCH = 128
CONTEXT, ROWS = 512, 16


class PerImage(Dataset[Any]):
    """What torchvision's own data sets do: one image and one transform at a time."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def rate(batches, limit):
    """Images per second over ``limit`` batches, after one that is not counted."""
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    for _ in range(limit):
        next(iterator)
    return limit * BATCH / (time.perf_counter() - start)


def measure(channels, size, padding, pairs):
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
    rates = {"dsframe": [], **{name: [] for name in per_image}}
    for _ in range(pairs):
        rates["dsframe"].append(rate(Loader(source, seed=0, micro_batch_size=BATCH).stream(), 300))
        for name, dataset in per_image.items():
            rates[name].append(rate(DataLoader(dataset, BATCH, shuffle=True), 10))
    return rates


def documents(count):
    """Documents of 1 to 400 tokens, most of them short."""
    numbers = torch.Generator().manual_seed(0)
    lengths = (torch.rand(count, generator=numbers) ** 2 * 400).long().add(2).tolist()
    return [torch.randint(8000, (length,), generator=numbers).tolist() for length in lengths]


class Given:
    """An encoder of documents that are tokens already."""

    columns, whole = ("input_ids",), False

    def length(self, row):
        return 4 * len(row.value["input_ids"])

    def encode(self, rows):
        return (np.asarray(row.value["input_ids"], np.int32) for row in rows)


def tokens(pairs):
    """Tokens per second, ``pairs`` times, alternating, by packing and pipeline."""
    import datasets

    datasets.disable_progress_bars()
    results = {}
    with tempfile.TemporaryDirectory(prefix="dsframe-data-path-") as name:
        folder = Path(name)
        ids = documents(20_000)
        for packing in ("concatenate", "rows", "documents"):
            ours, rows = own(folder, ids, packing), theirs(ids, packing)
            datasets.Dataset.from_list(rows).save_to_disk(str(folder / f"saved-{packing}"))
            saved = datasets.load_from_disk(str(folder / f"saved-{packing}"))
            torched = saved.with_format("torch")
            loaders = {
                "dsframe": lambda ours=ours: Loader(ours, seed=0, micro_batch_size=ROWS).stream(),
                "datasets, torch format": lambda data=torched: DataLoader(data, ROWS, shuffle=True, collate_fn=padded),
                "datasets, lists": lambda data=saved: DataLoader(data, ROWS, shuffle=True, collate_fn=padded),
            }
            rates = {name: [] for name in loaders}
            for _ in range(pairs):
                for pipeline, make in loaders.items():
                    rates[pipeline].append(token_rate(make()))
            results[packing] = rates
    return results


def own(folder, ids, packing):
    """dsframe's source of the documents."""
    path = folder / "ids.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in ids))
    recipe = Recipe((path,), Given(), packing, CONTEXT, 8000, "given", str(folder), "benchmark")
    make(recipe, lambda line: None)
    found = find_tokens(recipe)
    assert found is not None
    if packing == "concatenate":
        return TextSource(torch.from_numpy(found.tokens), CONTEXT, shifted=True)
    return RowSource(found, CONTEXT, together=packing == "documents")


def theirs(ids, packing):
    """The same documents as rows of a data set: joined and cut, one by one, or packed one after the other."""
    if packing == "rows":
        return [{"input_ids": one[:CONTEXT]} for one in ids]
    if packing == "concatenate":
        joined = [token for one in ids for token in one]
        return [{"input_ids": joined[at : at + CONTEXT]} for at in range(0, len(joined) - CONTEXT, CONTEXT)]
    rows = [{"input_ids": [], "position_ids": []}]
    for one in ids:
        if len(rows[-1]["input_ids"]) + len(one) > CONTEXT:
            rows.append({"input_ids": [], "position_ids": []})
        rows[-1]["input_ids"] += one[:CONTEXT]
        rows[-1]["position_ids"] += range(min(len(one), CONTEXT))
    return rows


def padded(rows):
    """A batch, with labels and, where documents are not packed, a mask, as transformers' collators make it."""
    names = list(rows[0])
    found = {
        name: pad_sequence([torch.as_tensor(row[name]) for row in rows], batch_first=True, padding_value=-1)
        for name in names
    }
    mask = found["input_ids"] >= 0
    labels = found["input_ids"].masked_fill(~mask, -100)
    found = {name: tensor.clamp(min=0) for name, tensor in found.items()}
    return {**found, "labels": labels} | ({} if "position_ids" in found else {"attention_mask": mask.long()})


def token_rate(batches, limit=60):
    """Tokens that are no padding, per second, over ``limit`` batches after one that is not counted."""
    iterator, count = iter(batches), 0
    next(iterator)
    start = time.perf_counter()
    for _ in range(limit):
        batch = next(iterator)
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        count += labels.numel() - int((labels == -100).sum())
    return count / (time.perf_counter() - start)


def show(what, results):
    """Prints medians, extremes and ratios."""
    print(f"{'data':14} {'pipeline':24} {what:>10} {'lowest':>10} {'highest':>10} {'dsframe is':>11}")
    for name, rates in results.items():
        for pipeline, values in rates.items():
            # The ratio is the median over pairs measured next to each other, so that a busy moment hits both.
            ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["dsframe"], values, strict=True))
            print(
                f"{name:14} {pipeline:24} {statistics.median(values):10,.0f} {min(values):10,.0f} "
                f"{max(values):10,.0f} {ratio:9.1f} x"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("images", "text")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--pairs", type=int, default=7, help="how often each pipeline is measured")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    if "images" in arguments.parts:
        images = {name: measure(*shape, arguments.pairs) for name, shape in SHAPES.items()}
        show("images/s", images)
        results |= images
    if "text" in arguments.parts:
        text = tokens(arguments.pairs)
        show("tokens/s", text)
        results |= text
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
