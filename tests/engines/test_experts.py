"""Experts spread over ranks train as one process does that has them all; their state goes anywhere; what cannot be is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsframe.config import load
from dsframe.engines.deepspeed import experts
from dsframe.engines.deepspeed.state_experts import Experts, Part
from dsframe.errors import CheckpointError, EngineError
from dsframe.model.persistent import compare
from dsframe.model.state import EngineState, ParameterState
from tests.engines.experts import CASES
from tests.engines.snapshot import Snapshot
from tests.engines.test_tensor import NOISE, check_round_trips, distance
from tests.processes import reported


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return reported("experts", tmp_path_factory.mktemp("experts"), 4, CASES)


@pytest.mark.parametrize("case", CASES)
def test_spread_experts_are_one_process(case, reports):
    report = reports[case]
    """Losses, norms, states, evaluation; on from the other's state; and what a rank holds."""
    size = CASES[case][1]["expert_parallel"]["autoep_size"]
    assert f"expert parallel, {size} ranks" in report["description"]
    assert report["before"] == 0.0
    assert distance(report["alone"], report["cut"], 0) < NOISE["loss"]
    assert report["alone"][-1][0] < 0.99 * report["alone"][0][0], "it has learned something"
    relative = [abs(one[1] - two[1]) / one[1] for one, two in zip(report["alone"], report["cut"], strict=True)]
    assert max(relative) < NOISE["norm"]
    check_round_trips(report, NOISE)
    held, whole = report["elements"]
    if size > 1:
        assert held < 0.85 * whole, "a rank has its own experts alone"


# Without processes.

FIRST = Part("m.gate_up_proj", (4, 6, 2), (2, 3, 2), 0, 0)
UP = Part("m.gate_up_proj", (4, 6, 2), (2, 3, 2), 2, 3)
DOWN = Part("m.down_proj", (4, 2, 3), (2, 2, 3), 2)
ROUTER = Part("m.gate.weight", (4, 2), (4, 2))


def saved():
    both, down, gate = torch.arange(48.0).view(4, 6, 2), torch.arange(24.0).view(4, 2, 3), torch.arange(8.0).view(4, 2)
    states = [
        ParameterState(name, weight, {"sum": -weight}, {"step": 3.0})
        for name, weight in (("m.gate_up_proj", both), ("m.down_proj", down), ("m.gate.weight", gate), ("head", gate))
    ]
    return Snapshot(EngineState(3, None, {}, {}, states))


def test_a_rank_sees_its_own_experts():
    view = Experts(saved(), {"w1": FIRST, "w3": UP, "w2": DOWN, "router": ROUTER})
    assert view.shapes == {"w1": (2, 3, 2), "w3": (2, 3, 2), "w2": (2, 2, 3), "router": (4, 2), "head": (4, 2)}
    both, down, gate = (saved().parameter(name).weight for name in ("m.gate_up_proj", "m.down_proj", "head"))
    own = {"w1": both[:2, :3], "w3": both[2:, 3:], "w2": down[2:], "router": gate, "head": gate}
    for name, weight in own.items():
        found = view.parameter(name)
        assert torch.equal(found.weight, weight)
        assert torch.equal(found.moments["sum"], -weight)
        assert torch.equal(view.part(name, 1, 3).weight, weight.flatten()[1:4])


def test_the_whole_is_made_of_every_ranks_part():
    whole, into = saved().parameter("m.gate_up_proj").weight, torch.zeros(4, 6, 2)
    for row in (0, 3):
        ranks = [Part("", (4, 6, 2), (2, 3, 2), first, row).pick(whole[first : first + 2]) for first in (0, 2)]
        Part("", (4, 6, 2), (2, 3, 2), 0, row).put(into, ranks)
    assert torch.equal(into, whole)


def test_a_checkpoint_of_another_model_is_refused():
    made = {"w1": Part("m.gate_up_proj", (8, 6, 2), (4, 3, 2)), "w2": DOWN, "router": ROUTER}
    own = {"w1": (4, 3, 2), "w2": DOWN.local_shape, "router": ROUTER.local_shape, "head": (4, 2)}
    with pytest.raises(CheckpointError, match=r"differ\): w1 has shape \[4, 3, 2\], saved \[4, 6, 2\]$"):
        compare("parameter", own, Experts(saved(), made).shapes)


@pytest.mark.parametrize(
    ("model", "section", "message"),
    [
        ({"model_type": "llama"}, {}, '"llama" is not a model whose experts dsframe can spread'),
        ({"num_local_experts": 3}, {}, "3 experts are not divisible by autoep_size 2; choose another"),
        ({}, {"autoep_size": 3}, "4 processes are not divisible by autoep_size 3"),
        ({}, {"preset_model": "qwen3_moe"}, 'preset_model "qwen3_moe" is for another model than "mixtral"; remove it'),
        ({"hidden_act": "gelu"}, {}, 'AutoEP\'s experts compute "silu", not this model\'s "gelu"'),
        ({"router_jitter_noise": 0.1}, {}, "AutoEP's router has no router_jitter_noise"),
    ],
)
def test_models_that_cannot_be_spread(model: dict[str, Any], section: dict[str, Any], message: str) -> None:
    settings = {"model_type": "mixtral", "num_local_experts": 4, **model}
    file = {"train_batch_size": 8, "expert_parallel": {"enabled": True, "autoep_size": 2, **section}}
    plan = SimpleNamespace(config=load(file), world=SimpleNamespace(size=4))
    with pytest.raises(EngineError, match=message):
        experts.refuse_unsupported(plan, SimpleNamespace(config=SimpleNamespace(**settings)))
