"""The samples of every step are the same on any number of ranks and workers and after a restart, whatever the data are."""

import pytest
import torch

import dsframe
from dsframe.data import Loader, as_source
from tests.files import ds_config
from tests.sources import SOURCES, Pairs, Stream

STEPS = 120


def seen(data, collate, ranks, workers, first, last=STEPS):
    """The targets, and a digest of the inputs, of each step's global batch, in order."""
    streams = [
        Loader(
            as_source(data(), 3, collate, streams=True),
            seed=3,
            micro_batch_size=6 // ranks,
            accumulation_steps=2,
            rank=rank,
            ranks=ranks,
            workers=workers,
        ).stream(first, last)
        for rank in range(ranks)
    ]
    return [[told for _ in range(2) for stream in streams for told in rows(next(stream))] for _ in range(first, last)]


def rows(batch):
    inputs, targets = batch
    values = inputs["input_ids"].sum(1) if isinstance(inputs, dict) else inputs.double()
    learned = targets if targets.dim() == 1 else targets.clamp(min=0).sum(1)  # however far it is padded
    return zip(learned.tolist(), values.tolist(), strict=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_steps_have_the_same_samples_on_any_ranks_and_workers_and_after_a_restart(kind):
    data, collate = SOURCES[kind]

    whole = seen(data, collate, 1, 0, 0)
    assert len(whole) == STEPS
    assert len({str(step) for step in whole}) > 60  # else they could be equal for another reason
    assert len({target for step in whole for target, _ in step}) >= 90
    assert seen(data, collate, 2, 0, 0) == seen(data, collate, 3, 0, 0) == whole
    assert seen(data, collate, 2, 2, 87) == whole[87:]  # a restart on other ranks, with workers
    assert seen(data, collate, 1, 2, 0) == whole


def test_a_stream_is_trained_on_and_gone_on_with(tmp_path, capfd):
    told = []

    def loss(outputs, targets):
        if len(targets) == 12 and targets.tolist() not in told:  # the first step tries what kind of loss it is
            told.append(targets.tolist())
        return torch.nn.functional.mse_loss(outputs, targets[:, None] / 1000)

    def train(name, steps, resume):
        told.clear()
        task = dsframe.Task.from_module(lambda: torch.nn.Linear(2, 1), loss, Stream())
        section = {
            "engine": "single",
            "steps": steps,
            "run_dir": str(tmp_path / name),
            "checkpoints": {"every_steps": 4},
        }
        file = ds_config(12, "SGD", 0.01, **section)
        dsframe.fit(task, file, resume=resume)
        return list(told)

    whole = train("whole", 10, "never")
    assert len({number for step in whole[:7] for number in step}) == 84
    line = "Stream is an IterableDataset: each rank reads all of its rows and takes 12 of every 12; a resumed run reads again"
    assert line in capfd.readouterr().err
    assert train("parts", 4, "never") + train("parts", 10, "auto") == whole


def test_the_rows_of_a_stream_are_counted_in_the_process_that_reads():
    loader = Loader(Stream(10), seed=0, micro_batch_size=3)
    assert loader.rows_read() == [0, 0, 0]
    stream = loader.stream()
    for _ in range(8):
        next(stream)
    read, passes, rows = loader.rows_read()
    assert 24 <= read <= 24 + 3 * 3  # the worker is at most two batches ahead
    assert rows == 10 * passes
    assert passes in (2, 3)
    assert Loader(Pairs(), seed=0, micro_batch_size=3).rows_read() == []


@pytest.mark.parametrize(("length", "says"), [(10, ""), (12, "Misled.__len__ says 12, and ")])
def test_a_stream_of_another_length_than_it_says(length, says):
    class Misled(Stream):
        def __len__(self):
            return length

    loader = Loader(Misled(10), seed=0, micro_batch_size=3)
    stream = loader.stream()
    assert loader.wrong_length() == ""
    for _ in range(8):
        next(stream)
    assert loader.wrong_length().startswith(says)
    assert bool(loader.wrong_length()) == bool(says)
