"""The order of samples: the same global batches for every number of ranks, exact epochs, exact evaluation."""

import itertools

import pytest
import torch

from dsframe.data import Sampler, draws, permutation
from dsframe.data.source import draw

# Global batch, then every way that is tried to cut it: (micro-batch size, accumulation, ranks).
CUTS = [(12, 1, 1), (6, 2, 1), (6, 1, 2), (2, 3, 2), (1, 2, 6), (1, 12, 1), (1, 1, 12), (3, 1, 4)]


def rows(parts):
    return [(epoch, index) for epoch, indices in parts for index in indices.tolist()]


def test_ranks_compare_the_second_epoch_of_an_order_of_the_tasks():
    same, other = (Sampler(6, 2, 0, order=lambda epoch, n, by=by: (torch.arange(n) + epoch * by) % n) for by in (1, 2))
    assert torch.equal(same.global_batch(0)[0][1], other.global_batch(0)[0][1])
    assert not torch.equal(same.first(), other.first())
    assert torch.equal(Sampler(6, 2, 0).first(), Sampler(6, 2, 0).global_batch(0)[0][1])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [12, 13, 50, 96])
def test_every_cut_of_a_global_batch_has_the_same_samples_in_the_same_place(samples, drop_last):
    reference = Sampler(samples, 12, seed=3, drop_last=drop_last)
    for (size, accumulation, ranks), step in itertools.product(CUTS, range(12)):
        sampler = Sampler(samples, size * accumulation * ranks, seed=3, drop_last=drop_last)
        cut = [
            row
            for micro in range(accumulation)
            for rank in range(ranks)
            for row in rows(sampler.micro_batch(step, micro, rank, ranks, size))
        ]
        assert cut == rows(reference.global_batch(step))
        assert len(cut) == 12


@pytest.mark.parametrize(("samples", "size"), [(10, 4), (10, 10), (7, 3), (64, 16), (5, 1)])
def test_the_stream_is_one_permutation_per_epoch_after_another(samples, size):
    sampler = Sampler(samples, size, seed=1)
    steps = sampler.total_steps(3)
    stream = [row for step in range(steps) for row in rows(sampler.global_batch(step))]
    expected = [(epoch, index) for epoch in range(4) for index in permutation(samples, 1, epoch).tolist()]
    assert stream == expected[: steps * size]
    for epoch, end in enumerate(sampler.total_steps(epochs) for epochs in (1, 2, 3)):
        assert [row for row in stream[: end * size] if row[0] == epoch] == expected[epoch * samples :][:samples]
        assert end * size - (epoch + 1) * samples < size  # complete, and not a step later than needed
        assert sampler.epoch(end) == pytest.approx(end * size / samples)


def test_drop_last_takes_whole_batches_of_each_epoch():
    sampler = Sampler(10, 4, seed=1, drop_last=True)
    assert [sampler.total_steps(epochs) for epochs in (1, 2, 3)] == [2, 4, 6]
    assert sampler.epoch(5) == 2.5
    for step in range(6):
        assert rows(sampler.global_batch(step)) == [
            (step // 2, index) for index in permutation(10, 1, step // 2)[step % 2 * 4 :][:4].tolist()
        ]


def test_permutations_are_pinned():
    """These values may never change: a run that is resumed with another version must see the same samples."""
    assert permutation(8, seed=0, epoch=0).tolist() == [2, 6, 0, 1, 4, 7, 3, 5]
    assert permutation(8, seed=0, epoch=1).tolist() == [6, 7, 2, 0, 5, 3, 4, 1]
    assert permutation(8, seed=1, epoch=0).tolist() == [6, 4, 2, 3, 0, 7, 5, 1]
    assert draws(5, 2, torch.tensor([0, 1, 2**40]), 7).tolist() == [
        8331227149734719063,
        7743182229752870188,
        -5770233344365094323,
    ]


def test_one_draw_is_that_of_many():
    for index, bits in enumerate(draws(5, 2, torch.arange(50), 7).tolist()):
        assert draw(5, 2, index, 7) == bits % 2**64
