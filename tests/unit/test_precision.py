"""Loss scaling and clipping beside DeepSpeed's and torch's own."""

import logging
import random
import warnings
from types import SimpleNamespace

import pytest
import torch

from dsframe.config import load
from dsframe.config.schema.precision import Fp16
from dsframe.engines import precision
from dsframe.engines.loss_scale import LossScale
from dsframe.engines.masters import MasterWeights, _windows
from dsframe.errors import EngineError, TrainingError
from reference_engines.averaging import ParameterAveragingEngine


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_loss_scale_moves_as_deepspeeds_does(consecutive, hysteresis, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime.fp16 import loss_scaler
    monkeypatch.setattr(loss_scaler.logger, "level", logging.ERROR)
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)
    theirs = loss_scaler.DynamicLossScaler(2.0**100, 5, 1.0, hysteresis, consecutive, dtype=torch.half)
    wanted = Fp16(
        initial_scale_power=100, loss_scale_window=5, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    ours = LossScale(wanted)
    draw = random.Random(0)
    for step in range(400):
        overflow = draw.random() < 0.2
        theirs.update_scale(overflow)
        ours.update(overflow)
        assert ours.scale == theirs.cur_scale, step


def test_a_static_scale_stays():
    scale = LossScale(Fp16(loss_scale=128.0))
    scale.update(overflow=True)
    assert scale.scale == 128.0


def test_overflow_at_the_lowest_scale_ends_the_training():
    scale = LossScale(Fp16(initial_scale_power=0, hysteresis=1))
    with pytest.raises(TrainingError, match="lowest loss scale, 1"):
        scale.update(overflow=True)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_torchs(max_norm):
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(7))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    ours = [8.0 * parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = precision.clip(ours, max_norm, scale=8.0)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(ours, precision.gradients_of(parameters))


def test_float16_is_refused_before_the_processes_meet():
    config = load({"train_batch_size": 2, "torch_autocast": {"enabled": True}})
    plan = SimpleNamespace(config=config, device=torch.device("cuda"))
    assert precision.scales_losses(plan.config, plan.device), "torch's own choice on a GPU"
    with pytest.raises(EngineError, match="cannot leave out an update on all ranks"):
        ParameterAveragingEngine(plan)


def test_fp16_scales_losses_and_bf16_does_not():
    for section, scales in (("fp16", True), ("bf16", False)):
        config = load({"train_batch_size": 2, section: {"enabled": True}})
        assert precision.scales_losses(config, torch.device("cuda")) == scales


def test_without_clipping_no_norm_is_computed():
    scaled = [torch.ones(2)]
    assert precision.clip(scaled, 0.0, scale=4.0) is None
    assert scaled[0].tolist() == [0.25, 0.25]


def test_an_infinite_norm_is_an_overflow_as_nan_is():
    norms = [None, torch.tensor(1.0), torch.tensor(torch.inf), torch.tensor(torch.nan)]
    assert [precision.finite(norm) for norm in norms] == [True, True, False, False]


def test_gradients_become_wide_in_windows_that_have_each_once():
    sizes = [1 << 25, 1 << 23, 1 << 23, 1, 7]
    assert [range(5)[window] for window in _windows(sizes)] == [range(1), range(1, 3), range(3, 5)]


def test_masters_carry_what_16_bits_would_lose():
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    masters = MasterWeights(model)
    before = masters.masters[0].detach().clone()
    optimizer = torch.optim.SGD(masters.masters, lr=1e-4)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        masters.take_gradients()
        optimizer.step()
        masters.give_weights()
    torch.testing.assert_close(before - masters.masters[0].detach(), torch.full((1, 1), 1e-2), rtol=1e-3, atol=0.0)
    assert model.weight.grad is None
    torch.testing.assert_close(model.weight.float(), masters.masters[0].detach().bfloat16().float())


def test_masters_follow_weights_that_another_rank_has_sent():
    model = torch.nn.Linear(2, 2).bfloat16()
    masters = MasterWeights(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    masters.take_weights()
    assert masters.masters[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]
