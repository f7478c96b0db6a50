"""Gradients in flat buckets: the same gradients, sent as soon as the backward pass has them, whatever shape the graph has."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dsframe.engines.buckets import Buckets, usual_bytes
from dsframe.errors import EngineError


class Ring:
    """Stands for two ranks that have the same gradients: a sum doubles them, when it is waited for."""

    def __init__(self):
        self.started, self.waited = [], []
        self.sizes = []

    def start(self, name, flat):
        self.started.append(name)
        self.sizes.append(flat.numel())

        def wait():
            self.waited.append(name)
            flat.mul_(2)

        return wait


def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def gradients(net):
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("how", [{"bytes_each": 0}, {"bytes_each": 700}, {"bytes_each": 2**20}])
def test_the_same_gradients_in_buckets(how):
    images = torch.randn(3, 2, 8, 8)
    plain, net, ring = model(), model(), Ring()
    buckets = Buckets(list(net.parameters()), ring.start, **how)
    for step in range(3):
        for one in (plain, net):
            one.zero_grad()
        with buckets.held():
            net(images).square().sum().backward()
        assert len(ring.started) == step * len(buckets), "nothing is sent before the last micro-batch"
        net(2 * images).square().sum().backward()
        assert len(ring.started) == (step + 1) * len(buckets), "all is under way when the backward pass ends"
        buckets.finish()
        plain(images).square().sum().backward()
        plain(2 * images).square().sum().backward()
        for mine, theirs, parameter in zip(gradients(net), gradients(plain), net.parameters(), strict=True):
            assert torch.equal(mine, 2 * theirs)
            assert mine.stride() == parameter.stride()
    names = [f"gradients.{number}" for number in range(len(buckets))]
    assert sorted(ring.started) == sorted(names * 3), "by the same names at each step"
    assert ring.started[0] in names[:2], "last layers first"
    expected = {0: 6, 700: 4, 2**20: 1}[how["bytes_each"]]
    assert (len(buckets), sum(ring.sizes[:expected])) == (expected, sum(p.numel() for p in net.parameters()))


def test_what_takes_no_part_in_the_loss_is_sent_as_zeros():
    ring, used, unused = Ring(), nn.Linear(2, 2), nn.Linear(2, 2)
    buckets = Buckets([*used.parameters(), *unused.parameters()], ring.start, bytes_each=24)
    for _ in range(2):
        used(torch.ones(1, 2)).sum().backward()
        assert ring.started[-1:] == ["gradients.1"], "what is complete does not wait"
        buckets.finish()
        assert [float(p.grad.abs().sum()) for p in unused.parameters() if p.grad is not None] == [0, 0]
        assert gradients(used)[1].tolist() == [2, 2]
        for parameter in (*used.parameters(), *unused.parameters()):
            parameter.grad = None


def test_a_gradient_of_the_step_before_is_not_sent_again():
    """One bucket for two layers, of which the second takes no part in the second step."""
    ring, used, late = Ring(), nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = [*used.parameters(), *late.parameters()]
    buckets = Buckets(parameters, ring.start, bytes_each=2**20)
    for layers in ((used, late), (used,)):
        sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()
        buckets.finish()
        sent = [float(p.grad.abs().sum()) for p in late.parameters() if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
    assert sent == [0, 0]


def test_a_gradient_that_comes_in_parts_is_refused():
    layer = nn.Linear(2, 2)
    Buckets(list(layer.parameters()), Ring().start, bytes_each=1)
    point = torch.ones(1, 2, requires_grad=True)
    once = checkpoint(layer, point, use_reentrant=True)
    with pytest.raises(EngineError, match="use_reentrant=False"):
        checkpoint(layer, once, use_reentrant=True).sum().backward()


def test_hooks_are_taken_off_and_an_empty_parameter_is_in_a_bucket():
    layer, empty = nn.Linear(2, 2), nn.Parameter(torch.empty(0))
    earlier, later = Ring(), Ring()
    Buckets(list(layer.parameters()), earlier.start, bytes_each=1).remove()
    buckets = Buckets([*layer.parameters(), empty], later.start, bytes_each=2**20)  # the empty one comes first
    layer(torch.ones(1, 2)).sum().backward()
    buckets.finish()
    assert (earlier.started, later.sizes) == ([], [6])
    assert gradients(layer)[1].tolist() == [2, 2]


def test_a_step_that_was_given_up_leaves_nothing_to_the_next():
    layer, ring = nn.Linear(2, 2), Ring()
    buckets = Buckets(list(layer.parameters()), ring.start, bytes_each=1)
    for _ in range(3):
        buckets.begin()
        layer(torch.ones(1, 2)).sum().backward()  # and nobody finishes
    buckets.finish()
    assert gradients(layer)[1].tolist() == [2, 2]
    assert len(ring.started) == 6
    assert sorted(ring.waited) == sorted(ring.started), "memory that is being sent is not written to"


def test_a_weight_whose_memory_has_gaps_gets_a_gradient_without():
    weight = nn.Parameter(torch.zeros(4, 4)[:, :2])
    buckets = Buckets([weight], Ring().start, bytes_each=1)
    (weight * torch.arange(8.0).view(4, 2)).sum().backward()
    buckets.finish()
    assert weight.grad.flatten().tolist() == [2.0 * number for number in range(8)]


def test_a_bucket_is_a_quarter_of_the_gradients_within_limits():
    assert [usual_bytes(size) for size in (1, 2**24, 2**40)] == [2**20, 2**22, 2**26]
