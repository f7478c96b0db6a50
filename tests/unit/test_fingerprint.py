"""A few training samples as digests: which are read, what they notice, and what they cost."""

import copy
import shutil
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import dsframe
from dsframe.data import Loader, TensorSource, fingerprint, folder
from dsframe.data.datasets import as_source
from dsframe.data.fingerprint import assert_same_samples, digest
from dsframe.data.source import ImageSource
from dsframe.data.text import TextSource
from dsframe.data.vision import Images
from dsframe.errors import DataError
from dsframe.tools.compare import losses
from tests.files import ds_config
from tests.lines import Line
from tests.threads import Room


def loader(data, **options):
    return Loader(data, seed=0, micro_batch_size=2, **options)


class Words(Dataset):
    """Samples with text in them; says what is read, and takes its time."""

    def __init__(self, words, seconds=0.0):
        self.words, self.seconds, self.read = words, seconds, []

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        self.read.append(index)
        time.sleep(self.seconds)
        return {"word": self.words[index], "length": len(self.words[index])}, index


class Flipped(Dataset):
    """Each sample comes as it is or negated, by a generator that dsframe does not seed."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.tensor(index + 1.0) * self.random.choice([-1.0, 1.0]), 0


class Replay(Words):
    """Each reading moves it on."""

    def __getitem__(self, index):
        self.words[index] += "."
        return super().__getitem__(index)


def of_ranks(*loaders):
    """What each rank gets, or its error."""

    def one(ranks):
        try:
            return assert_same_samples(ranks, loaders[ranks.plan.world.rank])
        except DataError as error:
            return str(error)

    return Room(len(loaders)).run(one)


@pytest.mark.parametrize(("data", "digests"), [(Replay(["a", "b"]), set()), (Words(["a", "b"]), {"0", "1"})])
def test_data_with_a_state_have_no_digest(data, digests):
    told = of_ranks(loader(data), loader(copy.deepcopy(data)))
    assert told[0].keys() == told[1].keys() == digests


def test_five_samples_are_read():
    data = [Words([f"word {index}" for index in range(100)]) for _ in range(2)]
    told = of_ranks(*map(loader, data))
    first, second = loader(data[0]).sampler.global_batch(0)[0][1].tolist()
    assert data[0].read == data[1].read == [0, 0, 49, 99, first, second]
    assert told[0] == told[1]
    assert list(told[0]) == [str(index) for index in data[0].read[1:]]


class ByRank(IterableDataset):
    """Splits itself by ranks, as many such data sets do."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return ((float(index), index) for index in range(self.rank, 100, 2))


def test_a_stream_that_splits_itself_is_refused(monkeypatch):
    monkeypatch.setattr(fingerprint, "BUDGET_SECONDS", 60.0)  # on a busy machine the worker takes longer to start
    for said in of_ranks(*(loader(ByRank(rank)) for rank in range(2))):
        assert said.startswith(
            "the training data differ between ranks: sample 0, counted from 0, is another one on rank 1 than"
        )
    same = of_ranks(*(loader(ByRank(0)) for _ in range(2)))
    assert same[0] == same[1]
    assert list(same[0]) == ["0", "1"]


def test_tensors_in_memory_are_compared_between_ranks_in_every_row():
    """Of 100 rows one differs, which is none of those that are read."""
    rows = [torch.arange(200.0).view(100, 2) for _ in range(2)]
    assert 7 not in fingerprint._chosen(loader(TensorDataset(*rows)))
    rows[1][7] += 1
    for said in of_ranks(*(loader(TensorDataset(these, these)) for these in rows)):
        assert said.startswith(
            "the training data differ between ranks: a sample is another one on rank 1 than on rank 0"
        )


def test_what_is_drawn_anew_at_each_reading_has_no_digest():
    """Of 20 pairs of ranks none is refused, although a sample is the same in half of all second readings."""
    pairs = [of_ranks(loader(Flipped(2 * seed)), loader(Flipped(2 * seed + 1))) for seed in range(20)]
    assert [told for pair in pairs for told in pair if isinstance(told, str)] == []
    assert sum(told == {} for pair in pairs for told in pair) > 30


def test_reading_ends_after_a_second(monkeypatch):
    """The ranks need not be equally fast: what all have read is compared."""
    monkeypatch.setattr(fingerprint, "BUDGET_SECONDS", 0.05)
    words = [f"word {index}" for index in range(100)]
    quick, slow, slower = Words(words), Words(words, 0.03), Words(words, 0.2)
    told = of_ranks(loader(quick), loader(slow), loader(slower))
    assert slower.read == [0]
    assert slow.read == [0, 0, 49][: len(slow.read)]  # on a busy machine fewer
    assert 1 <= len(slow.read) <= len(quick.read) <= 6
    assert told == [{"0": told[0]["0"]}] * 3


class Graph:
    """Prints its sizes alone, as those of torch_geometric do."""

    def __init__(self, nodes):
        self.store = {"nodes": nodes}

    def __repr__(self):
        return f"Graph(nodes={list(self.store['nodes'].shape)})"


def test_a_digest_is_of_names_types_shapes_and_values():
    rows = [
        (torch.zeros(1, 4), torch.zeros(1)),
        (torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1)),
        (torch.zeros(1, 2, 2), torch.zeros(1)),
        (torch.ones(1, 4), torch.zeros(1)),
        *(({name: torch.zeros(1, 4)}, torch.zeros(1)) for name in "ab"),
        *(([text], torch.zeros(1)) for text in ("text", "other")),
        *((np.concatenate([np.zeros(1000), [middle], np.zeros(1000)]), 0) for middle in (0.0, 1.0)),
        *((Graph(torch.full((2000,), value)), 0) for value in (0.0, 1.0)),
    ]
    assert len({digest(row) for row in rows}) == len(rows)
    assert digest((object(), 1)) == digest((object(), 1)), "an address in memory is no value"
    assert digest((torch.arange(8.0).view(2, 4).T, 0)) == digest((torch.arange(8.0).view(2, 4).T.contiguous(), 0))


def test_the_same_samples_have_the_same_digest_tomorrow():
    """Checkpoints keep them."""
    (told,) = of_ranks(loader(TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))))
    assert told.pop("(which one is unknown)")
    assert told == {"0": "b454b1cfde2d9ae3", "1": "66a90fcbdb72e09e", "2": "fb81c4c9284a257e"}


def in_memory(kind, row, directory):
    """Nine samples, of which one is another one with another ``row``, beside those that are read in any case."""
    rows = torch.arange(36.0).view(9, 4)
    rows[row] += 1
    if kind == "images":
        return ImageSource(rows.view(9, 1, 2, 2).byte(), torch.zeros(9), classes=1, mean=(0.0,), std=(1.0,))
    if kind == "text":
        return TextSource(rows.flatten(), 3)
    if kind == "names":
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        shutil.rmtree(directory / "train", ignore_errors=True)
        (directory / "train" / "a").mkdir(parents=True)
        for number in range(9):
            path = directory / "train" / "a" / f"{number}{'b' * (number == row)}.png"
            image.new("RGB", (8, 8)).save(path)
        facts = Images("pictures", 3, 8, 1, (0.0,) * 3, (1.0,) * 3, 0, False)
        return folder.load(str(directory), facts, train=True, augment=False)
    return TensorDataset(rows, rows)


@pytest.mark.parametrize("kind", ["tensors", "collated", "images", "text", "names"])
def test_of_what_is_in_memory_each_sample_is_seen(kind, tmp_path):
    """And of a folder of images each name."""

    def told(row):
        data = in_memory(kind, row, tmp_path)
        mine = loader(as_source(data, 0, default_collate if kind == "collated" else None))
        (found,) = of_ranks(mine)
        return found

    read = {int(name) for name in told(0) if name.isdigit()}
    unread = next(row for row in range(9) if row not in read)
    before, after = told(-1), told(unread)
    assert before["(which one is unknown)"] != after["(which one is unknown)"]
    assert told(unread) == after


class Dropping(Line):
    def model(self):
        return nn.Sequential(super().model(), nn.Dropout(0.5))


def test_reading_leaves_the_random_numbers_of_training_alone(tmp_path, monkeypatch):
    """Or dropout would draw other masks."""
    batch = TensorSource.batch

    def drawing(source, indices, epoch):
        torch.rand(3 * (len(indices) == 1))  # what is read before training
        return batch(source, indices, epoch)

    for name in ("plain", "drawing"):
        settings = {"engine": "single", "steps": 5, "log_every_steps": 1, "run_dir": str(tmp_path / name)}
        dsframe.fit(Dropping(), ds_config(8, "AdamW", 0.1, **settings))
        monkeypatch.setattr(TensorSource, "batch", drawing)
    assert losses(tmp_path / "drawing") == losses(tmp_path / "plain")
