"""What Horovod is asked to do with a bucket, and what comes of it. A stand-in for its library; no process is started."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dsframe.config import load

NAME = "dsframe.engines.horovod.engine"


class Ring(ModuleType):
    """Two ranks that have the same numbers; a reduction is done when it is waited for."""

    Sum, Average = "sum", "average"

    def __init__(self):
        super().__init__("horovod.torch")
        self.asked = []

    def allreduce_async_(self, tensor, *, name, op, prescale_factor, postscale_factor):
        self.asked.append((name, tensor.dtype))
        factors = (prescale_factor, 2.0, 0.5 if op == self.Average else 1.0, postscale_factor)
        return lambda: [tensor.mul_(factor) for factor in factors]

    def poll(self, handle):
        return True

    def synchronize(self, handle):
        handle()


@pytest.fixture
def engine(monkeypatch):
    ring = Ring()
    package = ModuleType("horovod")
    package.torch = ring
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", ring)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME)


@pytest.mark.parametrize(
    ("section", "horovod", "largest", "factor"),
    [
        ({}, {}, 3.0, 1.0),
        ({"gradient_predivide_factor": 8.0}, {"compression": "fp16"}, 4e4, 1.0),  # whose sum fp16 does not have
        ({"gradient_allreduce_op": "sum"}, {}, 3.0, 2.0),
        ({"gradient_allreduce_op": "sum"}, {"compression": "fp16"}, 3.0, 2.0),
    ],
)
def test_a_bucket_has_the_mean_or_the_sum_in_its_own_dtype(engine, section, horovod, largest, factor):
    config = load({"train_batch_size": 2, **section, "dsframe": {"engine": "horovod", "horovod": horovod}})
    for part, name in (("", "dsframe.gradients.0"), ("teacher", "dsframe.teacher.gradients.0")):
        flat = torch.tensor([1.0, -largest])
        given = SimpleNamespace(
            plan=SimpleNamespace(config=config, part=part), _op=config.deepspeed.gradient_allreduce_op
        )
        engine.HorovodEngine._reduce(given, "gradients.0", flat)()
        assert flat.tolist() == [factor, -largest * factor]
        assert engine.hvd.asked[-1] == (name, torch.float16 if horovod else torch.float32)


def test_only_what_horovod_can_send_is_sent(engine):
    tensors = {
        "weight": torch.ones(2),
        "count": torch.ones(1, dtype=torch.int64),
        "complex": torch.ones(2, dtype=torch.complex64),
        "short": torch.ones(1, dtype=torch.bfloat16),
        "mask": torch.ones(1, dtype=torch.bool),
        "extra": {"a": 1},
    }
    sent = engine._broadcastable(tensors)
    assert list(sent) == ["weight", "count", "complex"]
    assert (sent["complex"].dtype, sent["complex"].shape) == (torch.float32, (2, 2))
    sent["complex"].fill_(3.0)
    assert tensors["complex"].tolist() == [3 + 3j, 3 + 3j]


def test_a_tensor_with_gaps_gets_what_rank_0_has(engine, monkeypatch):
    received = torch.arange(6.0).view(2, 3)
    monkeypatch.setattr(
        engine.hvd,
        "broadcast_parameters",
        lambda pieces, root_rank: [piece.copy_(received) for piece in pieces.values()],
        raising=False,
    )
    plain, turned = torch.zeros(2, 3), torch.zeros(3, 2).t()
    engine._broadcast({"plain": plain, "turned": turned})
    assert torch.equal(plain, received)
    assert torch.equal(turned, received)
