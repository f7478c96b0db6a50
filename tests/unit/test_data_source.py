"""Images and text in memory: what a sample looks like depends on the seed, the epoch and the sample alone."""

import pytest
import torch
from torch import nn

from dsframe.data import ImageSource, TensorSource, as_source
from dsframe.data.source import own_rows
from dsframe.data.text import TextSource, sources
from dsframe.errors import DataError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def source(count=40, size=12, padding=2, flip=True, seed=7):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 10
    return ImageSource(images, labels, classes=10, mean=MEAN, std=STD, padding=padding, flip=flip, seed=seed)


def test_a_sample_looks_the_same_in_any_batch_and_different_in_another_epoch():
    images = source()
    whole = images.batch(torch.arange(40), epoch=1)[0]
    for order in (torch.arange(40).flip(0), torch.arange(3, 4), torch.tensor([8, 8, 1])):
        assert torch.equal(images.batch(order, epoch=1)[0], whole[order])
    assert not torch.equal(images.batch(torch.arange(40), epoch=2)[0], whole)
    assert not torch.equal(source(seed=8).batch(torch.arange(40), epoch=1)[0], whole)


def test_images_are_normalised_on_their_device():
    pixels = torch.empty(1, 3, 4, 4, dtype=torch.uint8, device="meta")
    assert source().normalised((pixels, None))[0].is_meta


def test_crops_and_mirror_images_are_equally_often():
    """As torchvision's RandomCrop and RandomHorizontalFlip."""
    count = 9_000
    chart = torch.arange(1, 17, dtype=torch.uint8).view(4, 4)
    ours = ImageSource(
        chart.expand(count, 1, 4, 4), torch.zeros(count), classes=1, mean=(0,), std=(1 / 255,), padding=1, flip=True
    )
    crops = nn.functional.pad(chart, (1,) * 4).unfold(0, 4, 1).unfold(1, 4, 1).reshape(9, 4, 4)
    found, counts = ours.batch(torch.arange(count), 0)[0].round().flatten(1).unique(dim=0, return_counts=True)
    assert torch.equal(found, torch.cat([crops, crops.flip(-1)]).float().flatten(1).unique(dim=0))
    assert ((counts - count / 18) ** 2 / (count / 18)).sum() < 40.8  # chi-square with 17 degrees of freedom, 99.9 %


def test_wrong_images_are_refused():
    pixels, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)

    def make(labels=labels, mean=(0.5,)):
        return ImageSource(pixels, labels, classes=3, mean=mean, std=(1.0,))

    make()
    with pytest.raises(DataError, match=r"labels run from 0 to 3, but there are 3 classes \(0 to 2\)"):
        make(labels=torch.arange(4))
    with pytest.raises(DataError, match="1 channels, but 2 means"):
        make(mean=(0.5, 0.5))


def test_tensors_may_be_nested():
    data = TensorSource({"a": torch.arange(6), "b": torch.arange(12).view(6, 2)}, torch.arange(6) * 10)
    inputs, targets = data.batch(torch.tensor([4, 1]), 0)
    assert inputs["a"].tolist() == [4, 1]
    assert inputs["b"].tolist() == [[8, 9], [2, 3]]
    assert targets.tolist() == [40, 10]
    with pytest.raises(DataError, match=r"same number of rows; they have \[5, 6\]"):
        TensorSource(torch.arange(6), torch.arange(5))


def test_windows_tile_the_text_and_targets_are_the_next_byte():
    text = TextSource(torch.arange(101, dtype=torch.uint8), context=10)
    assert len(text) == 10
    inputs, targets = text.batch(torch.arange(10), 0)
    assert inputs.flatten().tolist() == list(range(100))
    assert targets.flatten().tolist() == list(range(1, 101))
    assert inputs.dtype == targets.dtype == torch.int64
    assert len(TextSource(torch.arange(100, dtype=torch.uint8), context=10)) == 9  # the last byte has no successor


def test_training_windows_start_elsewhere_each_epoch():
    text = TextSource(torch.arange(101, dtype=torch.uint8), context=10, seed=1, shifted=True)
    starts = {int(text.batch(torch.tensor([0]), epoch)[0][0, 0]) for epoch in range(200)}
    assert starts == set(range(10))
    for epoch in range(20):
        inputs, targets = text.batch(torch.arange(len(text)), epoch)
        first = int(inputs[0, 0])
        assert inputs.flatten().tolist() == list(range(first, first + 10 * len(text)))
        assert torch.equal(targets, inputs + 1)


class Odd(ImageSource):
    """Reads its rows in a way of its own, which knows no second copy of a row within an epoch."""

    def batch(self, indices, epoch):
        assert int(indices.max()) < len(self)
        return super().batch(indices, epoch)


class OddPixels(ImageSource):
    def pixels(self, indices, epoch):
        return super().pixels(indices, epoch)


def test_only_our_own_images_get_numbers_beyond_the_last_row():
    """An order that repeats rows asks for row 1 again as row 9 of 8, which gets draws of its own."""
    images, labels = torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
    rows, facts = torch.tensor([1, 9]), {"classes": 10, "mean": (0.5,), "std": (0.5,)}
    for kind, asked in ((ImageSource, [1, 9]), (OddPixels, [1, 9]), (Odd, [1, 1])):
        assert own_rows(kind(images, labels, **facts), rows).tolist() == asked
    assert own_rows(TensorSource(labels, labels), rows).tolist() == [1, 1]


def test_at_most_65_536_tokens_of_a_corpus_are_held_out(tmp_path):
    for length, held_out in ((40 << 15, 1 << 16), (21 << 16, 1 << 16), (20_000, 1_000)):
        (tmp_path / "a.txt").write_bytes(b"x" * length)
        trained, evaluated = sources(str(tmp_path / "a.txt"), 1, None, 0)
        assert len(evaluated) == held_out - 1
        assert len(trained) == length - held_out - 1


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"train": [1], "test": [2]}, "dict of train, test"),
        ({"x": torch.ones(4, 2), "labels": torch.ones(4)}, "dict of x, labels"),
        ((torch.ones(4, 2), torch.ones(4)), "tuple of tensors"),
    ],
)
def test_what_has_no_rows_is_refused_by_name(data, named):
    """Their length was taken for the number of rows: "the training data set has only 2"."""
    with pytest.raises(DataError, match=rf"^a {named} has no rows; return one of its data sets, or .*TensorDataset"):
        as_source(data, 0)


def test_rows_by_number_and_tensors_for_a_collate_are_taken():
    assert as_source({0: (1.0, 2.0), 1: (3.0, 4.0)}, 0).batch(torch.tensor([1]), 0)[1].tolist() == [4.0]
    rows = as_source((torch.ones(2), torch.zeros(2)), 0, lambda rows: (torch.stack(rows), torch.ones(len(rows))))
    assert rows.batch(torch.tensor([1]), 0)[0].tolist() == [[0.0, 0.0]]
