"""The samples of every step are the same on any number of ranks and workers and after a restart, whatever the data are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dsframe
from dsframe.data import EvaluationLoader, Loader, Pad, as_source
from dsframe.data.sampler import sequential
from dsframe.errors import DataError
from tests.sources import SOURCES, Dicts, Pairs, Stream

STEPS = 200


def seen(data: Any, collate: Any, ranks: int, workers: int, first: int, last: int = STEPS) -> list[list[Any]]:
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


def rows(batch: Any) -> Iterator[Any]:
    inputs, targets = batch
    values = inputs["input_ids"].sum(1) if isinstance(inputs, dict) else inputs.double()
    return zip(targets.tolist(), values.tolist(), strict=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_steps_have_the_same_samples_on_any_ranks_and_workers_and_after_a_restart(kind: str, tmp_path: Path) -> None:
    make, collate = SOURCES[kind]

    def data() -> Any:
        return make(tmp_path)

    whole = seen(data, collate, 1, 0, 0)
    assert len(whole) == STEPS
    assert len({str(step) for step in whole}) > 100  # else they could be equal for another reason
    assert len({target for step in whole for target, _ in step}) >= 90
    assert seen(data, collate, 2, 0, 0) == seen(data, collate, 3, 0, 0) == whole
    assert seen(data, collate, 2, 2, 117) == whole[117:]  # a restart on other ranks, with workers
    assert seen(data, collate, 1, 2, 0) == whole
    assert seen(data, collate, 3, 0, 55) == whole[55:]


def test_an_epoch_of_shards_has_each_sample_once_in_another_order(tmp_path: Path) -> None:
    make, _ = SOURCES["tar"]
    steps = seen(lambda: make(tmp_path), None, 1, 0, 0, 15)  # 180 samples: two epochs
    numbers = [target for step in steps for target, _ in step]
    assert sorted(numbers[:90]) == sorted(numbers[90:]) == list(range(90))
    assert numbers[:90] != numbers[90:]
    drawn = {value for step in steps for _, (_, value) in step}
    assert len(drawn) == 180  # what is random belongs to the sample and the epoch


def test_a_stream_is_trained_on_and_gone_on_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[list[int]] = []

    def loss(outputs: Any, targets: Any) -> Any:
        if len(targets) == 12 and targets.tolist() not in told:  # the first step tries what kind of loss it is
            told.append(targets.tolist())
        return torch.nn.functional.mse_loss(outputs, targets[:, None] / 1000)

    def train(name: str, steps: int, resume: str) -> list[list[int]]:
        told.clear()
        task = dsframe.Task.from_module(lambda: torch.nn.Linear(2, 1), loss, Stream())
        section = {
            "engine": "single",
            "steps": steps,
            "run_dir": str(tmp_path / name),
            "checkpoints": {"every_steps": 4},
        }
        file = {"train_batch_size": 12, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "dsframe": section}
        dsframe.fit(task, file, resume=resume)
        return list(told)

    whole = train("whole", 10, "never")
    assert len({number for step in whole[:7] for number in step}) == 84
    line = "Stream is an IterableDataset: each rank reads all of its rows and takes 12 of every 12; a resumed run reads again"
    assert line in capfd.readouterr().err
    assert train("parts", 4, "never") + train("parts", 10, "auto") == whole


def test_a_stream_of_the_library_datasets() -> None:
    import datasets

    def data() -> Any:
        rows = datasets.Dataset.from_dict({"x": [float(number) for number in range(90)], "labels": list(range(90))})
        return rows.to_iterable_dataset(num_shards=3).shuffle(5, buffer_size=20)

    def told(ranks: int, first: int) -> list[list[int]]:
        streams = [
            Loader(data(), seed=3, micro_batch_size=6 // ranks, rank=rank, ranks=ranks).stream(first, 25)
            for rank in range(ranks)
        ]
        return [[number for stream in streams for number in next(stream)[1].tolist()] for _ in range(first, 25)]

    whole = told(1, 0)
    assert sorted(number for step in whole[:15] for number in step) == list(range(90))
    assert [number for step in whole[15:] for number in step] != [number for step in whole for number in step][:60]
    assert told(2, 7) == whole[7:]


def test_sequential_shards_and_mixtures(tmp_path: Path) -> None:
    for make, first in ((SOURCES["tar"][0], list(range(12))), (SOURCES["mixture"][0], None)):
        loader = Loader(as_source(make(tmp_path), 0), seed=0, micro_batch_size=12, order=sequential)
        numbers = [number for _, targets in loader.stream(0, 5) for number in targets.tolist()]
        assert first is None or numbers[:12] == first
        of_one = [number for number in numbers if number >= 1000]
        assert of_one == [1000 + number % 20 for number in range(len(of_one))]


def test_what_a_window_is(tmp_path: Path) -> None:
    from tests.sources import shards

    order = shards(tmp_path, window=16).order(0)
    ((_, indices),) = order.take(0, 0, 90)
    ends = torch.tensor([13, 45, 46, 90])
    groups = torch.searchsorted(ends, indices, right=True)
    for window in groups.split(16):  # of shards that follow each other
        assert len(window.unique()) <= 3
    one = shards(tmp_path, window=1).order(0).take(0, 0, 90)[0][1]
    assert (one.diff() == 1).sum() == 86  # shards are shuffled, but not what is in them


class Lengths(Dicts):
    """Says how long its rows are."""

    @property
    def lengths(self) -> list[int]:
        return [index % 7 + 1 for index in range(self.samples)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_all_batches_of_a_step_are_padded_to_the_longest_of_the_global_batch(workers: int, mixed: bool) -> None:
    def widths(ranks: int, micro: int) -> list[set[int]]:
        data = dsframe.Mixture({"a": Lengths(), "b": Lengths(30)}) if mixed else Lengths()
        streams = [
            Loader(
                as_source(data, 3, Pad(to="global-batch", multiple=2)),
                seed=3,
                micro_batch_size=micro,
                accumulation_steps=6 // ranks // micro,
                rank=rank,
                ranks=ranks,
                workers=workers,
            ).stream(0, 20)
            for rank in range(ranks)
        ]
        found = [[tuple(batch["input_ids"].shape) for batch, _ in stream] for stream in streams]
        each = 6 // ranks // micro
        return [{shape[1] for of in found for shape in of[step * each : step * each + each]} for step in range(20)]

    expected = widths(1, 6)
    assert len(set(map(str, expected))) > 1
    assert all(len(step) == 1 for step in expected)
    assert widths(1, 2) == widths(2, 3) == widths(3, 1) == expected


def test_evaluation_batches_are_padded_to_the_longest_of_all_ranks() -> None:
    source = as_source(Lengths(17), 0, Pad(to="global-batch"))
    shapes = [
        [
            tuple(inputs["input_ids"].shape)
            for (inputs, _), _, _ in EvaluationLoader(source, seed=0, micro_batch_size=2, rank=rank, ranks=3)
        ]
        for rank in range(3)
    ]
    assert shapes == [[(2, 6), (2, 7), (1, 7), (1, 3)]] * 3


def test_padding_to_the_global_batch_needs_the_lengths_of_rows() -> None:
    with pytest.raises(
        DataError, match=r'Pad\(to="global-batch"\): Dicts does not say how long each row is; give it "lengths"'
    ):
        as_source(Dicts(), 0, Pad(to="global-batch"))

    class Wrong(Dicts):
        lengths = [1] * 90

    with pytest.raises(DataError, match="input_ids has a row of 7, but the data set's lengths say 1 at most"):
        next(Loader(as_source(Wrong(), 0, Pad(to="global-batch")), seed=0, micro_batch_size=30).stream())


def test_the_rows_of_a_stream_are_counted_in_the_process_that_reads() -> None:
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
