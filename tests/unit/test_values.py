"""What is compared and copied of a user's values."""

import itertools
import logging
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from dsframe.values import copied, filled, same


class Held:
    def __init__(self, value):
        self.value = value


class Slotted(Held):
    """Has an attribute in a slot, and one of its class's."""

    __slots__ = ("other",)

    def __init__(self, value):
        super().__init__(0)
        self.other = value


PAIRS = [
    (None, torch.zeros(2)),
    (None, np.zeros(2)),
    (torch.zeros(2), torch.zeros(3)),
    (np.zeros(2), np.zeros(2, dtype=np.float32)),
    (np.float64(1.0), np.float64(2.0)),
    ([1, [2]], [1, [3]]),
    ({"a": {1}}, {"a": {2}}),
    (Held([1]), Held([2])),
    (Held(None), Held(torch.ones(1))),
    (Counter("ab"), Counter("abb")),
    (Slotted(1), Slotted(2)),
    (itertools.count(3), itertools.count(4)),
    (iter([1, 2]), iter([1])),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_differs(one, other):
    assert not same(one, other)
    assert not same(other, one)
    assert same(one, copied(one))
    assert same(other, copied(other))


def test_a_copy_is_of_the_same_class_and_apart():
    counts = defaultdict(list, {"a": [1]})
    twin = copied(counts)
    twin["a"].append(2)
    twin["b"].append(3)
    assert counts == {"a": [1]}
    array = np.zeros(2)
    copied(array)[0] = 1
    assert array[0] == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_are_compared():
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for form in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        assert same(form(dense), form(dense.clone()))
        assert not same(form(dense), form(2 * dense))
        assert not same(form(dense), form(torch.eye(2)))
        assert not same(form(dense), form(dense.flip(1))), "the same numbers elsewhere"


class Private:
    """Has an attribute in a private slot, and may be referred to weakly."""

    __slots__ = ("__count", "__weakref__")

    def __init__(self):
        self.__count = [0]

    def move(self):
        self.__count.append(1)


def test_private_slots_are_copied():
    value = Private()
    twin = copied(value)
    assert same(value, twin)
    twin.move()
    assert not same(value, twin)


def test_counters_and_slots_are_copied_and_loggers_are_not_touched():
    for value, move in ((itertools.count(3), next), (iter([3, 4]), next), (Slotted(3), vars)):
        twin = copied(value)
        move(twin)
        if isinstance(twin, Slotted):
            twin.other += 1
        assert not same(value, twin)
    logger = logging.getLogger(__name__)
    handlers = logger.handlers
    assert copied(logger) is logger
    assert logger.handlers is handlers


class Settings(dict):
    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Scales(list):
    def __init__(self, count):
        super().__init__(range(count))


def test_classes_of_containers_stay_what_they_are():
    settings, scales, weight = Settings(gain=[1.0]), Scales(3), torch.ones(2)
    twin = copied(settings)
    twin.gain.append(2.0)
    assert (type(twin), settings.gain) == (Settings, [1.0])
    assert (type(copied(scales)), copied(scales)) == (Scales, [0, 1, 2])
    assert weight in copied({weight})
    long = [0.0] * 2000
    twin = copied(long)
    twin[7] = 1.0
    assert not same(long, twin)
    assert same(long, copied(long))


def test_containers_get_the_contents_of_their_copies():
    inner, named = [3], {}
    given, copy = ([1], named), ([10], {})
    named["a"], copy[1]["a"] = (2, inner), (20, [30])
    found = filled(given, copy)
    assert found == copy
    assert (found[0] is given[0], found[1] is named, found[1]["a"][1] is inner) == (True,) * 3
