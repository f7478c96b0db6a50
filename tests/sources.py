"""Data sets of every kind for tests, in which each sample tells its number: rows ``(number, number)``, or dicts with ``labels``."""

from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from dsframe.data import Pad

SAMPLES = 90


def _pair(number):
    return torch.tensor([float(number), float(torch.rand(()))]), number


class Pairs(Dataset[Any]):
    """``(number and a draw, number)``."""

    def __init__(self, samples=SAMPLES, first=0):
        self.samples, self.first = samples, first

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return _pair(index + self.first)


class Dicts(Pairs):
    def __getitem__(self, index):
        return {"input_ids": [index] * (index % 7 + 1), "labels": index}


class Stream(IterableDataset[Any]):
    """As long as it likes, shuffled by torch's generator."""

    def __init__(self, samples=SAMPLES):
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in torch.randperm(self.samples).tolist():
            yield _pair(index + self.samples * self.epoch)


SOURCES = {
    "pairs": (Pairs, None),
    "dict rows": (Dicts, Pad(multiple=8)),
    "iterable": (Stream, None),
}
"""What makes the data, and their collate."""
