"""Mixtures: exact shares, what follows when a set is exhausted, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from dsframe.data import Loader, Mixture, TensorSource
from dsframe.errors import DataError
from tests.sources import Pairs, Stream


def loader(sets: dict[str, int], weights: dict[str, float] | None, batch: int = 10, **options: Any) -> Loader:
    data = {name: Pairs(size, 1000 * number) for number, (name, size) in enumerate(sets.items())}
    return Loader(Mixture(data, weights, **options), seed=2, micro_batch_size=batch)


def read(one: Loader, steps: int) -> list[int]:
    return [target for _, targets in one.stream(0, steps) for target in targets.tolist()]


def test_shares_are_exact_and_counted() -> None:
    one = loader({"a": 50, "b": 400, "c": 700}, {"a": 6, "b": 3, "c": 1}, batch=65)
    found = Counter(target // 1000 for target in read(one, 40))  # 2,600 samples: ten blocks
    assert found == {0: 1560, 1: 780, 2: 260}
    assert one.sampler.shares(40) == {"a": 1560, "b": 780, "c": 260}
    halfway = Counter(target // 1000 for target in read(one, 17))
    assert one.sampler.shares(17) == {"a": halfway[0], "b": halfway[1], "c": halfway[2]}
    assert one.lines(40) == [
        "mixture: a: 60.0% of the samples, 1,560 of its 50",
        "mixture: b: 30.0% of the samples, 780 of its 400",
        "mixture: c: 10.0% of the samples, 260 of its 700",
    ]


def test_a_set_that_repeats_has_each_sample_once_a_pass() -> None:
    numbers = [target for target in read(loader({"a": 30, "b": 500}, {"a": 1, "b": 2}), 45) if target < 1000]
    for begin in range(0, len(numbers) - 30, 30):
        assert sorted(numbers[begin : begin + 30]) == list(range(30))
    assert numbers[:30] != numbers[30:60]


def test_each_block_has_an_order_of_its_own() -> None:
    one = loader({"a": 500, "b": 500}, {"a": 1, "b": 1}, batch=10)
    block = one.sampler.order._size  # type: ignore[attr-defined]
    which = [target // 1000 for target in read(one, 2 * block // 10)]
    assert sum(which[:block]) == sum(which[block:]) == block // 2
    assert which[:block] != which[block:]


def test_an_exhausted_set_that_is_an_error_is_refused_before_training() -> None:
    one = loader({"a": 100, "b": 300}, {"a": 1, "b": 1}, exhausted={"a": "error"})
    assert len(one.lines(19)) == 2
    with pytest.raises(
        DataError, match=r"mixture: a has 100 samples, and the training takes \d{3} of it; train less, lower"
    ):
        one.lines(40)


def test_weights_that_no_small_block_has_are_rounded() -> None:
    one = loader({"a": 10, "b": 10}, {"a": 0.123456789, "b": 1})
    count = one.sampler.order.shares(1_000_000)["a"]
    assert count == pytest.approx(1_000_000 * 0.123456789 / 1.123456789, rel=1e-3)


def test_sources_are_put_together_in_order() -> None:
    data = {name: TensorSource(*[torch.arange(40) + first] * 2) for name, first in (("a", 0), ("b", 100))}
    one = Loader(Mixture(data, {"a": 3, "b": 1}), seed=0, micro_batch_size=16)
    for step, (inputs, targets) in enumerate(one.stream(0, 20)):
        assert torch.equal(inputs, targets)
        wanted = [
            index if index < 40 else index + 60 for _, rows in one.sampler.global_batch(step) for index in rows.tolist()
        ]
        assert targets.tolist() == wanted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture({"a": Pairs()}, {"b": 1}), r"mixture: weights of \['b'\], but data sets \['a'\]"),
        (lambda: Mixture({"a": Pairs()}, {"a": 0}), "mixture: the weight of a is 0; give a number above 0"),
        (
            lambda: Mixture({"a": Pairs()}, exhausted="ends"),
            'mixture: exhausted is "ends" for a; choose from repeats',
        ),
        (lambda: Mixture({"a": Pairs(), "b": Pairs(0)}), "mixture: b is empty"),
        (lambda: Mixture({}), "mixture: weights of"),
        (
            lambda: Loader(
                Mixture({"a": Pairs(), "b": Pairs()}, {"a": 1, "b": 1e-6}), seed=0, micro_batch_size=1
            ).lines(1),
            "mixture: b has less than a part in 10,000",
        ),
        (
            lambda: Loader(
                Mixture({"a": Pairs(), "b": TensorSource(torch.ones(2), torch.ones(2))}), seed=0, micro_batch_size=1
            ),
            "mixture: b makes its own batches, so every other part must do so too",
        ),
        (
            lambda: Loader(Mixture({"a": Pairs()}), seed=0, micro_batch_size=1, order=lambda epoch, samples: None),
            "Mixture gives the order of its samples itself; remove Task.order",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_mixtures_of_mixtures_and_what_a_checkpoint_keeps_of_them() -> None:
    inner = Mixture({"a": Pairs(30), "b": Pairs(60, 1000)}, {"a": 1, "b": 1})
    one = Loader(Mixture({"inner": inner, "c": Pairs(50, 2000)}, {"inner": 2, "c": 1}), seed=0, micro_batch_size=10)
    found = Counter(target // 1000 for target in read(one, 76))
    assert found[2] == pytest.approx(760 / 3, abs=30)
    assert abs(found[0] - found[1]) < 30
    assert one.sampler.order.about() == {
        "inner": {
            "weight": "2",
            "exhausted": "repeats",
            "samples": 90,
            "a": {"weight": "1", "exhausted": "repeats", "samples": 30},
            "b": {"weight": "1", "exhausted": "repeats", "samples": 60},
        },
        "c": {"weight": "1", "exhausted": "repeats", "samples": 50},
    }
    whole = Mixture({"a": TensorSource(torch.ones(2), torch.ones(2))})
    with pytest.raises(DataError, match="mixture: b is a mixture of what makes its own batches; name its parts"):
        Loader(Mixture({"b": whole}), seed=0, micro_batch_size=1)


def test_a_stream_cannot_be_mixed() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return 90

    with pytest.raises(DataError, match="it can be trained on, but not evaluated or mixed"):
        Loader(Mixture({"a": Sized()}), seed=0, micro_batch_size=1)
