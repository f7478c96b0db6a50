"""What is trained in ``benchmarks.compare``: three models, their data as people read it, and the same as tasks of dsframe's.

``cnn``: the network of PyTorch's own MNIST example (1.2 M parameters; without dropout, whose draws differ between programs) on
Fashion-MNIST; ``resnet18``: torchvision's, on random images of CIFAR-10's size; ``gpt``: dsframe's GPT, 4.9 M parameters, on bytes.
All with AdamW at a constant rate, weight decay 0 (where it is not, programs disagree on what decays) and gradients clipped to 1.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gate import CHECKED_STEPS
from dsframe.config.schema.settings import LanguageTask as LanguageSettings
from dsframe.config.schema.settings import VisionTask as VisionSettings
from dsframe.data import vision
from dsframe.data._torchvision import torchvision
from dsframe.data.sampler import Sampler
from dsframe.data.source import ImageSource, draws
from dsframe.data.text import TextSource
from dsframe.host import generators
from dsframe.tasks.language import LanguageTask
from dsframe.tasks.vision import VisionTask

LEARNING_RATE = 1e-3
CLIP = 1.0
GLOBAL_BATCH = {"cnn": 128, "resnet18": 128, "gpt": 16}
CONTEXT = 128
ADAMW = {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def cnn():
    """The network of PyTorch's MNIST example: float ``[n, 1, 28, 28]`` to scores ``[n, 10]``."""
    return [
        lambda: nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda: nn.Sequential(nn.Linear(9216, 128), nn.ReLU()),
        partial(nn.Linear, 128, 10),
    ]


class PlainFirst(ImageSource):
    """Images of which those of the first steps are not augmented in the first epoch, whoever reads them, and how often."""

    plain: Tensor
    """bool ``[N]``."""

    def pixels(self, indices, epoch):
        if epoch or not self.plain[indices].all():
            return super().pixels(indices, epoch)
        padding, flip = self._padding, self._flip
        self._padding, self._flip = 0, False
        try:
            return super().pixels(indices, epoch)
        finally:
            self._padding, self._flip = padding, flip


class Images(VisionTask):
    """The task as dsframe trains it, with the gate in its loss."""

    def __init__(self, name, gate, checked=CHECKED_STEPS):
        dataset = "fashion-mnist" if name == "cnn" else "synthetic"
        super().__init__(VisionSettings(model="cnn" if name == "cnn" else name, dataset=dataset, samples=None), 0)
        if dataset == "synthetic":  # with CIFAR-10's own augmentation
            self.images = vision.KNOWN["cifar10"]
        self._name, self._gate, self._checked = name, gate, checked

    def layers(self):
        return cnn() if self.settings.model == "cnn" else None

    def loss(self, outputs, targets):
        return self._gate.loss(outputs, targets) if self._gate else super().loss(outputs, targets)

    def pixels(self, *, train):
        """All images, uint8 ``[N, channels, size, size]``, and their classes."""
        source = vision.load(self.settings.model_copy(update={"augment": False}), self.images, train=train, seed=0)
        return source._images, source._labels

    def train_data(self):
        i = self.images
        source = PlainFirst(
            *self.pixels(train=True), classes=i.classes, mean=i.mean, std=i.std, padding=i.padding, flip=i.mirrored
        )
        source.plain = torch.zeros(len(source), dtype=torch.bool)
        size = GLOBAL_BATCH[self._name]
        sampler = Sampler(len(source), size, 0)
        for step in range(self._checked):
            for _, rows in sampler.micro_batch(step, 0, 0, 1, size):
                source.plain[rows] = True
        return source

    def eval_data(self):
        return None if self._gate else super().eval_data()


class Text(LanguageTask):
    """The task as dsframe trains it, with the gate in its loss."""

    def __init__(self, gate, *, tiny=False):
        if tiny:
            settings = LanguageSettings(name="language", layers=2, heads=2, width=32, context=16, corpus="synthetic")
        else:
            settings = LanguageSettings(
                name="language", layers=6, heads=4, width=256, context=CONTEXT, corpus="stdlib", tie_embeddings=False
            )
        super().__init__(settings, 0)
        self._gate = gate

    def loss(self, outputs, targets):
        return self._gate.loss(outputs, targets) if self._gate else super().loss(outputs, targets)

    def eval_data(self):
        return None if self._gate else super().eval_data()


def task(name, gate, *, checked=CHECKED_STEPS):
    """The workload ``name`` as a task of dsframe's; "tiny" is for ``benchmarks.soak``. ``checked``: batches of a rank, from the
    first, without augmentation."""
    made = Text(gate, tiny=name == "tiny") if name in ("gpt", "tiny") else Images(name, gate, checked)
    made.seed = 0
    return made


def model(name):
    """The workload's model with the weights that every contestant starts from."""
    generators.seed(0)
    return task(name, None).model()


class PerImage(Dataset[Any]):
    """As torchvision's data sets: an array in memory, and one image at a time through ``transforms``.

    ``fast``: torchvision's ``v2`` transforms on uint8 tensors, as its documentation advises, instead of PIL images. A negative
    index ``-1 - i`` is image ``i`` as the checked steps see it: without augmentation, and with the bits that dsframe's formula
    gives. torchvision's differ from them by at most 3e-7, of which ResNet-18 makes 8e-4 in a loss within ten steps.
    """

    def __init__(self, name, *, fast):
        torchvision()  # imports it, where its compiled part belongs to another build of torch as well
        from torchvision import transforms
        from torchvision.transforms import v2

        own = Images(name, None)
        i = own.images
        self.source = own.train_data()
        pixels, labels = self.source._images, self.source._labels  # loaded once: a rank's peak memory is compared, too
        self.labels = labels.tolist()
        self.fast = fast
        mirrored = []
        if fast:
            self.pixels = pixels
            last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(i.mean, i.std)]
            mirrored = [v2.RandomHorizontalFlip()] if i.mirrored else []
            first = [v2.RandomCrop(i.size, i.padding), *mirrored]
            self.transform = v2.Compose([*first, *last])
        else:
            self.pixels = pixels[:, 0] if i.channels == 1 else pixels.permute(0, 2, 3, 1).contiguous()
            last = [transforms.ToTensor(), transforms.Normalize(i.mean, i.std)]
            mirrored = [transforms.RandomHorizontalFlip()] if i.mirrored else []
            first = [transforms.RandomCrop(i.size, i.padding), *mirrored]
            self.transform = transforms.Compose([*first, *last])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        from PIL import Image

        if index < 0:
            images, labels = self.source.batch(torch.tensor([-1 - index]), 0)
            return images[0], int(labels)
        image = self.pixels[index] if self.fast else Image.fromarray(self.pixels[index].numpy())
        return self.transform(image), self.labels[index]


class Windows(Dataset[Any]):
    """Text as people read it: one window of bytes at a time."""

    def __init__(self):
        source = Text(None).train_data()
        assert isinstance(source, TextSource)
        self._tokens, self._length = source._tokens, len(source)
        self._shift = (int(draws(0, 0, torch.tensor(0))) & 0x7FFF_FFFF) % CONTEXT  # where dsframe's first epoch begins

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        index = -1 - index if index < 0 else index
        start = index * CONTEXT + self._shift
        window = self._tokens[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


class Order:
    """dsframe's order of the samples as a torch ``Sampler``: of one rank of ``ranks``, or of all (rank None)."""

    def __init__(self, samples, name, rank, ranks, micro=1, checked=True):
        self._sampler = Sampler(samples, GLOBAL_BATCH[name], 0)
        self._rank, self._ranks, self._micro = rank, ranks, micro
        self._name, self._checked = name, CHECKED_STEPS if checked else 0

    def __len__(self):
        return 1 << 40  # steps without end

    def __iter__(self):
        share = GLOBAL_BATCH[self._name] // self._micro
        for step in itertools.count():
            for micro in range(self._micro):
                if self._rank is None:
                    parts = self._sampler.micro_batch(step, micro, 0, 1, share)
                else:
                    parts = self._sampler.micro_batch(step, micro, self._rank, self._ranks, share // self._ranks)
                for _, rows in parts:
                    indices = rows.tolist()
                    yield from ([-1 - index for index in indices] if step < self._checked else indices)


def dataset(name, *, fast):
    """The workload's data as people read it. ``fast``: the quicker of torchvision's two ways."""
    return Windows() if name == "gpt" else PerImage(name, fast=fast)


def loader(
    name,
    rank,
    ranks,
    *,
    fast=False,
    micro=1,
    workers=0,
    checked=True,
):
    """torch's loader of a rank's share; with rank None of global batches, which the program shares out itself."""
    data = dataset(name, fast=fast)
    order = Order(len(data), name, rank, ranks, micro, checked)
    return DataLoader(data, GLOBAL_BATCH[name] // ranks // micro, sampler=order, num_workers=workers)
