"""Loaders: the same batches for every number of ranks and workers, from any step."""

import multiprocessing
import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from dsframe.data import EvaluationLoader, ImageSource, Loader, Pad, TensorSource, as_source
from dsframe.data.datasets import DatasetSource
from dsframe.data.prefetch import Ahead, _dense
from dsframe.data.reading import in_one_line
from dsframe.errors import DataError


class Noisy(Dataset):
    """Random transforms from every generator that people use."""

    def __init__(self, samples=13):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([index, *noise]), index


def images():
    pixels = torch.arange(13 * 64, dtype=torch.int64).remainder(256).to(torch.uint8).view(13, 1, 8, 8)
    return ImageSource(pixels, torch.arange(13), classes=13, mean=(0.5,), std=(0.5,), padding=2, flip=True, seed=4)


def test_a_batch_over_the_end_of_an_epoch_has_rows_of_both():
    source = images()
    loader = Loader(source, seed=4, micro_batch_size=6)
    parts = loader.sampler.global_batch(2)
    assert [epoch for epoch, _ in parts] == [0, 1]
    (batch,) = loader.micro_batches(2)
    for tensor, *of_parts in zip(batch, *(source.batch(rows, epoch) for epoch, rows in parts), strict=True):
        assert torch.equal(tensor, torch.cat(of_parts))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_does_not_disturb_the_generators_of_training(workers):
    def states():
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    before = states()
    next(Loader(Noisy(), seed=0, micro_batch_size=4, workers=workers).stream())
    assert states() == before


def test_what_kind_of_data_is_taken():
    source = images()
    assert as_source(source, 0) is source
    tensors = TensorDataset(torch.zeros(3, 2), torch.zeros(3))
    assert isinstance(as_source(tensors, 0), TensorSource)
    assert isinstance(as_source(tensors, 0, list), DatasetSource), "which calls the task's collate"
    assert isinstance(as_source(Noisy(), 0), DatasetSource)
    assert isinstance(as_source([(1.0, 2), (3.0, 4)], 0), DatasetSource)
    with pytest.raises(DataError, match="int is neither a map-style torch Dataset nor"):
        as_source(3, 0)


class Named(Noisy):
    """Samples with more than tensors."""

    def __getitem__(self, index):
        return {"noise": super().__getitem__(index)[0], "name": f"sample {index}"}, index


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_tensor_is_put_together_across_an_epochs_end(workers):
    batches = list(Loader(Named(), seed=4, micro_batch_size=6, workers=workers).stream(0, 3))
    plain = list(
        Loader(Noisy(), seed=4, micro_batch_size=6).stream(0, 3)
    )  # of 13 samples: the third reaches over the end
    for (inputs, targets), (noise, same_targets) in zip(batches, plain, strict=True):
        assert torch.equal(inputs["noise"], noise)
        assert torch.equal(targets, same_targets)
        assert inputs["name"] == [f"sample {index}" for index in targets.tolist()]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_an_iterable_data_set_is_trained_on_and_what_it_cannot_promise_is_said():
    with pytest.raises(DataError, match=r"Stream is an IterableDataset: .* its samples cannot be read by index"):
        as_source(Stream(), 0)
    loader = Loader(Stream(), seed=0, micro_batch_size=2)
    with pytest.raises(DataError, match='Stream does not say how many rows it has; write "steps"'):
        loader.lines(loader.sampler.total_steps(1))
    (line,) = Loader(Stream(), seed=0, micro_batch_size=2, accumulation_steps=2, ranks=2).lines(1)
    assert "takes 4 of every 8" in line
    with pytest.raises(DataError, match=r"StreamSource gives the order of its samples itself; remove Task\.order"):
        Loader(Stream(), seed=0, micro_batch_size=2, order=lambda epoch, samples: torch.arange(samples))


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


def test_an_iterable_data_set_that_gives_nothing_is_named():
    with pytest.raises(DataError, match=r"^Nothing gives no row$"):
        next(Loader(Nothing(), seed=0, micro_batch_size=1).stream())


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_not_pairs_are_refused(workers):
    with pytest.raises(
        DataError, match=r"^a data set must give \(input, target\) pairs, or dicts with labels; got Tensor for row \d"
    ):
        next(Loader(list(torch.zeros(4, 2)), seed=0, micro_batch_size=2, workers=workers).stream())


class Odd:
    def __len__(self):
        return 4

    def batch(self, indices, epoch):
        return indices


class OddLeaf(Odd):
    def batch(self, indices, epoch):
        return {"rows": indices, "names": [str(index) for index in indices.tolist()]}, indices


def test_a_source_that_gives_more_than_tensors_is_refused_in_the_first_batch():
    with pytest.raises(
        DataError, match=r"OddLeaf\.batch must return tensors, in any nesting; got str; .* a map-style Dataset"
    ):
        next(Loader(OddLeaf(), seed=0, micro_batch_size=2).stream())


def test_an_evaluation_of_more_samples_than_there_are_has_all():
    loader = EvaluationLoader(Noisy(), seed=0, micro_batch_size=4)
    loader.limit(99)
    assert [sample for batch in loader for sample in batch.samples] == list(range(13))
    loader.limit(5)
    assert loader.samples == 5


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trial_of_an_evaluation_has_a_batch_of_each_size(rank):
    """A model that fails for one of them would end the training at its first evaluation."""
    loader = EvaluationLoader(Noisy(17), seed=0, micro_batch_size=3, rank=rank, ranks=2)
    sizes = [len(batch.samples) for batch in loader]
    assert sizes == [3, 3, 2, 1]
    assert [len(batch.samples) for batch in loader.trial()] == [3, 2, 1]
    assert [batch.counts for batch in loader.trial()] == [True, True, rank == 0]


def test_padding_mixes_no_samples_but_a_row_looks_different_in_another_batch():
    made = [as_source(Noisy(), 0, collate) for collate in (None, Pad(length=9), Pad(), default_collate)]
    loaders = [Loader(source, seed=0, micro_batch_size=2) for source in made]
    assert [loader.collates for loader in loaders] == [False, False, False, True]
    assert [loader.regroups for loader in loaders] == [False, False, True, True]


def test_the_samples_of_a_step_have_their_numbers_though_an_order_repeats_them():
    """A sample that comes again is another one to its transforms, but not to who reads what is wrong with it."""
    given = {"seed": 0, "accumulation_steps": 2, "order": lambda *_: torch.tensor([2, 2, 0, 2])}
    loader = Loader(Noisy(4), micro_batch_size=2, **given)
    assert [loader.samples_at(1, row) for row in range(2)] == [[2, 0], [2, 2]]
    assert Loader(Noisy(4), micro_batch_size=1, rank=1, ranks=2, **given).samples_at(1, 0) == [2, 2]


def test_too_little_data_is_refused_before_training():
    with pytest.raises(DataError, match="takes 16 samples, but the training data set has only 13"):
        Loader(images(), seed=0, micro_batch_size=2, accumulation_steps=2, ranks=4)
    empty = TensorSource(torch.zeros(0, 2), torch.zeros(0))
    with pytest.raises(DataError, match="the training data set is empty"):
        Loader(empty, seed=0, micro_batch_size=1)
    with pytest.raises(DataError, match="the evaluation data set is empty"):
        EvaluationLoader(empty, seed=0, micro_batch_size=1)


def test_a_data_set_whose_length_changes_in_training_is_refused():
    """A replay buffer that a hook fills: rows that came later were never read."""
    data = Noisy()
    stream = Loader(data, seed=4, micro_batch_size=2).stream()
    next(stream)
    data.samples = 14
    with pytest.raises(
        DataError, match=r"the data set has 14 rows before step [1-4], and had 13 at the start; give it its last"
    ):
        list(islice(stream, 4))


def test_the_next_batch_is_on_its_way_before_one_is_given():
    taken = []

    def batches(count):
        for number in range(count):
            taken.append(number)
            yield torch.full((2,), number), torch.zeros(2)

    ahead = Ahead(torch.device("meta"))
    items = ahead(batches(4))
    assert taken == []
    assert next(items)[0].device.type == "meta"
    assert taken == [0, 1]
    assert len(list(items)) == 3
    assert len(list(ahead(batches(1)))) == 1


class Movable:
    """A batch of a library's own class, as graphs have."""

    def __init__(self, values):
        self.values = values

    def to(self, device):
        return Movable(self.values.to(device))


def test_what_moves_itself_is_moved():
    packed, module, finished = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)]), nn.Linear(1, 1), []

    def finish(batch):
        finished.append(batch)
        return batch

    batches = iter([((Movable(torch.zeros(2)), packed, module), torch.zeros(2))])
    ((inputs, targets),) = Ahead(torch.device("meta"), finish)(batches)
    assert inputs[0].values.device.type == targets.device.type == inputs[1].data.device.type == "meta"
    assert inputs[1].batch_sizes.device.type == "cpu", "torch wants them on the host"
    assert module.weight.device.type == "cpu", "it is the user's"
    assert len(finished) == 1


def test_a_batch_with_holes_is_made_dense_before_it_is_pinned():
    windows = torch.arange(10).reshape(2, 5)[:, :-1]
    assert not windows.is_contiguous()
    assert _dense(windows).is_contiguous()
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert _dense(images) is images


def test_a_row_is_another_in_each_epoch():
    first, again, other = (as_source(Noisy(), 4).batch(torch.tensor([3]), epoch)[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Epochs(IterableDataset):
    def set_epoch(self, number):
        self.number = number

    def __iter__(self):
        return iter([(torch.zeros(1), self.number)] * 2)


def test_a_stream_is_told_its_epoch():
    assert as_source(Epochs(), 0, streams=True).batch(torch.arange(4), 0)[1].tolist() == [0, 0, 1, 1]


class Shuffling(IterableDataset):
    def __iter__(self):
        buffer = []
        for number in range(64):
            buffer.append(number)
            if len(buffer) == 16:
                yield buffer.pop(random.randrange(16))
        yield from buffer


def test_a_stream_goes_back_to_its_start_and_draws_anew_in_each_pass():
    source = as_source(Shuffling(), 1, streams=True)
    first, second = ([source.item(0, row) for row in range(start, start + 64)] for start in (0, 64))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    assert [source.item(0, row) for row in (70, 3)] == [second[6], first[3]]


def test_what_collate_draws_follows_from_the_first_row_of_a_stream():
    """Whatever was read before. A collate that draws gave each batch of a stream that does not draw the same numbers."""

    def batch(*rows):
        source = as_source(Stream(), 0, lambda rows: (torch.tensor(rows), random.random()), streams=True)
        return [source.batch(torch.tensor([row]), 0)[1] for row in rows]

    assert len(set(batch(0, 1, 2))) == 3
    assert batch(1, 2) == batch(0, 1, 2)[1:]


def test_what_collate_draws_does_not_change_which_rows_a_stream_gives():
    """It gave two ranks 47 of 64 rows, some of them twice, and other ones after a resume."""

    def collate(rows):
        return torch.tensor(rows), torch.full((len(rows),), random.random())

    def rows(ranks, first=0):
        source = as_source(Shuffling(), 1, collate, streams=True)
        streams = [
            Loader(source, seed=1, micro_batch_size=8 // ranks, rank=rank, ranks=ranks).stream(first, 8)
            for rank in range(ranks)
        ]
        return [row for batches in zip(*streams, strict=True) for batch in batches for row in batch[0].tolist()]

    assert sorted(rows(1)) == list(range(64))
    assert rows(2) == rows(1)
    assert rows(1, first=4) == rows(1)[32:]


class Curriculum(Dataset):
    """A set that is read by index and told its epoch, as fairseq's; ``batch`` is a number of its own."""

    def __init__(self):
        self.epoch, self.batch = 0, 4

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(1), self.epoch


class Searching(Curriculum):
    def __getitem__(self, index):
        return next((torch.zeros(1), number) for number in range(3) if number == index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_search_that_finds_nothing_is_not_the_end_of_the_data(workers):
    """An evaluation ended there without a word."""
    held_out = EvaluationLoader(Searching(), seed=0, micro_batch_size=1, workers=workers)
    with pytest.raises(DataError, match=r"Searching raised StopIteration for row 3: .*test_data_loader.py:\d+\)"):
        list(held_out)


class Ending:
    def __len__(self):
        return 4

    def batch(self, indices, epoch):
        return next(iter(()))


def test_nor_is_that_of_a_source():
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(EvaluationLoader(Ending(), seed=0, micro_batch_size=1))


class Batched(Curriculum):
    def __init__(self, given):
        self.given = given

    def __getitems__(self, indices):
        return self.given


@pytest.mark.parametrize("given", [{"x": torch.zeros(1), "labels": torch.zeros(1)}, [(torch.zeros(1), 0)] * 2])
def test_a_data_set_that_gives_a_batch_where_rows_are_asked_for_is_named(given):
    said = f"Batched.__getitems__ returned {type(given).__name__}, and not a list with a row for each index"
    with pytest.raises(DataError, match=said):
        as_source(Batched(given), 0).batch(torch.tensor([0]), 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("inside", ["", "subset", "concatenated"])
def test_a_data_set_is_told_its_epoch(inside, workers):
    """Also inside of a ``Subset`` and of a ``ConcatDataset``, and when it is evaluated on, too."""
    data = Curriculum()
    chosen = Subset(data, range(4)) if inside else data
    if inside == "concatenated":
        chosen = ConcatDataset([Subset(data, range(2)), Subset(Curriculum(), range(2))])
    stream = Loader(chosen, seed=0, micro_batch_size=2, workers=workers).stream(0, 8)
    held_out = EvaluationLoader(data, seed=0, micro_batch_size=4)
    epochs = []
    for _, told in stream:
        epochs += told.tolist()
        assert [batch.batch[1].tolist() for batch in held_out] == [[0] * 4]
    assert epochs == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_a_worker_that_is_killed_while_it_hands_over_a_batch_is_no_traceback():
    def batches():
        here, there = multiprocessing.Pipe()
        there.close()
        yield here.recv()

    with pytest.raises(DataError, match="has ended while it handed over a batch"):
        next(in_one_line(batches()))

    def mistaken():
        yield 1
        raise EOFError("of the data set's own")

    found = in_one_line(mistaken())
    assert next(found) == 1
    with pytest.raises(EOFError, match="of the data set's own"):
        next(found)
