"""What is compared and copied of a user's values."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from dsframe.values import copied, same


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


PAIRS: list[tuple[Any, Any]] = [
    (None, torch.zeros(2)),
    (None, np.zeros(2)),
    (None, 0),
    (torch.zeros(2), torch.zeros(3)),
    (np.zeros(2), np.zeros(2, dtype=np.float32)),
    (np.float64(1.0), np.float64(2.0)),
    (1j, 2j),
    ([1, [2]], [1, [3]]),
    ({"a": {1}}, {"a": {2}}),
    (Held([1]), Held([2])),
    (Held(None), Held(torch.ones(1))),
    (Counter("ab"), Counter("abb")),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_differs(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)
    assert same(one, copied(one))
    assert same(other, copied(other))


def test_a_copy_is_of_the_same_class_and_apart() -> None:
    counts = defaultdict(list, {"a": [1]})
    twin = copied(counts)
    twin["a"].append(2)
    twin["b"].append(3)
    assert counts == {"a": [1]}
    array = np.zeros(2)
    copied(array)[0] = 1
    assert array[0] == 0
