"""Orders of samples: from the file, and from the task; none depends on ranks, and each can go on."""

import pytest
import torch
from torch import nn

import dsframe
from dsframe.data import ImageSource, Loader, Sampler
from dsframe.data.source import TensorSource
from dsframe.errors import CheckpointError, DataError, TaskError
from tests.files import ds_config

WRONG = {
    "shape \\[3\\]": torch.arange(3),
    "torch.float32 on cpu": torch.ones(6),
    "list": [0, 1, 2, 3, 4, 5],
    "indices from -1 to 4": torch.arange(-1, 5),
    "indices from 1 to 6": torch.arange(1, 7),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_order_that_is_none(what):
    with pytest.raises(DataError, match=f"the order of epoch 0 has {what}; give 6 indices from 0 to 5"):
        Sampler(6, 4, 0, order=lambda epoch, samples: WRONG[what]).global_batch(0)


class Counting(dsframe.Task):
    """Whose loss is the number of the sample."""

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, outputs, targets):
        return outputs.mean() * 0 + targets.mean()

    def train_data(self):
        return TensorSource(torch.ones(12, 1), torch.arange(12.0)[:, None])


class Backwards(Counting):
    def order(self, epoch, samples):
        return torch.arange(samples - 1, -1, -1)


def losses(task, steps=3, resume="never", **settings):
    file = ds_config(2, "SGD", 0.0, engine="single", steps=steps, run_dir="runs/x", **settings)
    return dsframe.fit(task, file, resume=resume).loss


def test_the_file_and_the_task_say_the_order(here):
    assert losses(Backwards()) == 6.5
    assert losses(Backwards(), 5, "auto") == 2.5
    assert losses(Counting(), order="sequential") == 4.5
    assert losses(Counting(), 5, "auto", order="sequential") == 8.5
    with pytest.raises(CheckpointError, match="order"):
        losses(Counting(), 6, "auto")
    with pytest.raises(
        TaskError, match=r'Backwards\.order gives the order of the samples, and the file has "order" too'
    ):
        losses(Backwards(), order="sequential")


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, rows):
        return self.layer(rows + torch.randn_like(rows))


class Drawing(Counting):
    def model(self):
        return Noise()


def test_draws_in_forward_are_announced_after_the_first_step(here, capsys):
    losses(Drawing())
    said = "draws random numbers in training, different ones on each rank, so the training depends on the number of processes"
    assert capsys.readouterr().err.count(said) == 1
    losses(Drawing(), per_sample_randomness=True)
    losses(Counting())
    assert said not in capsys.readouterr().err


class Drawn(torch.utils.data.Dataset):
    """Rows with a draw."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(3), index


def _images():
    pixels = torch.randint(256, (12, 1, 8, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    return ImageSource(pixels, torch.arange(12), classes=12, mean=(0.5,), std=(0.5,), padding=3, flip=True)


@pytest.mark.parametrize("make", [Drawn, _images])
def test_copies_of_a_sample_have_draws_of_their_own(make):
    """A sample that comes several times in an epoch was the same picture each time."""

    def seen(ranks):
        loaders = [
            Loader(make(), seed=0, micro_batch_size=12 // ranks, rank=rank, ranks=ranks, order=lambda _, n: torch.arange(n) % 3)
            for rank in range(ranks)
        ]  # fmt: skip
        batches = [batch for step in range(2) for loader in loaders for batch in loader.micro_batches(step)]
        return [
            (int(label), row.flatten().tolist())
            for rows, labels in batches
            for row, label in zip(rows, labels, strict=True)
        ]

    found = seen(1)
    assert {label for label, _ in found} == {0, 1, 2}
    assert len({str(row) for row in found}) > 0.9 * len(found)
    assert seen(2) == seen(3) == found
