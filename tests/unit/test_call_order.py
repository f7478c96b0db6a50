"""Calls that ranks have to make together: which differences are seen, and when ranks meet. Ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsframe import Task
from dsframe.engines import call_order
from dsframe.engines.call_order import CallOrder
from dsframe.errors import TaskError
from tests.threads import Room

HERE = threading.local()


def largest(values, *_, **__):
    """``dist.all_reduce`` with MAX."""
    world = HERE.ranks.plan.world
    table = torch.zeros(world.size, len(values), dtype=torch.float64)
    table[world.rank] = values
    values.copy_(HERE.ranks.sum_over_ranks(table.flatten()).view(table.shape).amax(0))
    return SimpleNamespace(wait=lambda: None)


class Meeting:
    """The store of all ranks, which counts how often each of them comes."""

    def __init__(self):
        self.values, self.lock, self.visits = {}, threading.Lock(), 0

    def add(self, key, number):
        with self.lock:
            self.visits += 1
            self.values[key] = self.values.get(key, 0) + number
            return self.values[key]

    def set(self, key, text):
        self.values[key] = text

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


class Parts(nn.ModuleDict):
    """Two layers, called in the order of their names in ``calls``."""

    def __init__(self):
        super().__init__({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})

    def forward(self, calls):
        return sum(self[name](torch.ones(1)) for name in calls)


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch):
    monkeypatch.setattr(call_order.dist, "all_reduce", largest)
    monkeypatch.setattr(call_order, "_LOOK_SECONDS", 0.05)


def on_ranks(act, store=None):
    """Calls ``act(rank, order, model)`` on two ranks; returns their errors' texts, or what ``act`` returns."""

    def one(ranks):
        ranks.plan.task, ranks.description, HERE.ranks = Task(), "This engine", ranks
        model = Parts()
        order = CallOrder(ranks, model, dict(model.items()), dict(model.named_parameters()))
        if store is not None:
            order.connect(store)
        try:
            return act(ranks.plan.world.rank, order, model)
        except TaskError as error:
            return str(error)

    return Room(2).run(one)


def step(order, model, *passes):
    """A step: forward and backward passes over the layers of each name. Returns nothing if ranks did the same."""
    for calls in passes:
        loss = model(calls)
        order.backward(loss)
        loss.backward()
    order.compare()
    order.check()


@pytest.mark.parametrize(
    ("steps", "first"),
    [
        ([(("ab",), ("ba",))], "a on rank 0; b on rank 1"),
        ([(("ab",), ("ab",)), (("ab", "a"), ("ab", "b"))], "a on rank 0; b on rank 1"),
        ([(("ab",), ("ab",)), (("ab",), ("a",))], "b on rank 0; a backward pass on rank 1"),
    ],
)
def test_the_first_call_that_differs_is_named(steps, first):
    def act(rank, order, model):
        for of_ranks in steps:
            step(order, model, *of_ranks[rank])

    for text in on_ranks(act):
        assert f"The first difference: {first}. This engine gathers" in text


def test_a_call_from_a_thread_of_the_models_own_is_refused():
    def act(rank, order, model):
        step(order, model, "ab")
        with ThreadPoolExecutor(1) as threads:
            threads.submit(step, order, model, "ab").result()

    assert all("is called in a thread of its own" in text for text in on_ranks(act))


def arriving(order, rank, *of_ranks):
    """A step after the first with the same calls, in which gradients arrive in this order; a tuple for each pass."""
    for numbers in of_ranks[rank]:
        order.backward(torch.zeros(1))
        for number in numbers:
            order._reduced(number)
    order.compare()
    order.check()


@pytest.mark.parametrize(
    ("of_ranks", "differ"),
    [
        ((((0, 1),), ((1, 0),)), False),  # autograd's threads have no order
        ((((0, 1),), ((0, 2),)), True),
        ((((0,), (1,)), ((1,), (0,))), True),  # in other micro-batches, where each is reduced
    ],
)
def test_gradients_are_the_same_in_each_pass_in_any_order(of_ranks, differ):
    def act(rank, order, model):
        step(order, model, "ab")
        arriving(order, rank, *of_ranks)

    for text in on_ranks(act):
        assert "a gradient of" in text if differ else text is None


def test_in_the_first_step_gradients_are_compared_before_any_is_reduced():
    def act(rank, order, model):
        outputs = model("ab"), model["ab"[rank]].weight.sum()
        order.backward(outputs[1])

    assert all("a gradient of a.weight on rank 0; a gradient of b.weight on rank 1" in text for text in on_ranks(act))


def test_calls_that_gather_nothing_may_differ():
    def act(rank, order, model):
        order.watches = False
        model("ab"[rank])
        order.watches = True
        step(order, model, "ab")

    assert on_ranks(act) == [None, None]


def test_ranks_meet_where_calls_are_not_those_of_the_step_before():
    """In training and in evaluations, each by itself; the model, its two layers, and the backward pass in training."""
    store, visits = Meeting(), [[], []]

    def act(rank, order, model):
        for calls in ("ab", "ab", None, None, "ab", "ba"):
            model.train(calls is not None)
            if calls is None:
                model("ab")
                order.compare()
                order.check()
            else:
                step(order, model, calls)
            visits[rank].append(order._meetings)

    assert on_ranks(act, store) == [None, None]
    assert visits == [[4, 4, 7, 7, 7, 9]] * 2
    assert store.visits == 2 * 9


def test_ranks_that_do_not_meet_are_told_before_anything_is_gathered():
    ran = []

    def act(rank, order, model):
        for name, layer in model.items():
            layer.register_forward_hook(lambda *_, name=name: ran.append(name))
        model("ab"[rank])

    assert all("a on rank 0; b on rank 1" in text for text in on_ranks(act, Meeting()))
    assert not ran


def test_a_comparison_may_wait_two_steps():
    """So that no rank waits for its device; the steps in between have the same calls."""
    behind = [0, 0]

    def act(rank, order, model):
        for number in range(4):
            order.backward(model("ab" if number else "ab"[rank]).detach())
            order.compare()
            behind[rank] = number
            order.check(waits=False)

    assert all("a on rank 0; b on rank 1" in text for text in on_ranks(act))
    assert behind == [2, 2]


def test_a_model_that_is_given_back_has_no_hooks():
    def act(rank, order, model):
        order.close()
        model("ab"[rank]).backward()
        order.compare()
        order.check()

    assert on_ranks(act) == [None, None]
