"""Layers cut among ranks train as one process does; their state goes anywhere."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsframe.engines.deepspeed import state_tensor
from dsframe.engines.deepspeed.state_tensor import Cut, Shares
from dsframe.engines.deepspeed.tensor import completed, cuts
from dsframe.errors import CheckpointError, EngineError
from dsframe.model.state import EngineState, ParameterState
from dsframe.tasks import _transformers
from tests.engines.refused_cuts import CASES as CUTS
from tests.engines.snapshot import Snapshot
from tests.engines.tensor import CASES, LLAMA
from tests.processes import reported

NOISE = {"loss": 1e-5, "norm": 1e-5, "state": 5e-4}
"""Measured: 7e-7 , 5e-7, 4e-5. The state is that of Adam, which divides by small numbers."""
BF16_NOISE = {"loss": 2e-3, "norm": 1e-2, "state": 0.2}
"""Measured: 3e-4, 2e-3, 6e-2."""


def distance(left, right, part):
    assert len(left) == len(right) > 0
    return max(abs(a[part] - b[part]) for a, b in zip(left, right, strict=True))


def check_round_trips(report, noise):
    """The state is one process's, goes on there and from there, and its evaluation is the same."""
    assert report["state"] < noise["state"]
    assert report["read_back"] == 0.0
    assert abs(report["evaluated"][0] - report["evaluated"][1]) < noise["loss"]
    assert distance(report["on"], report["on from the single"], 0) < noise["loss"]
    assert distance(report["on"], report["single on from it"], 0) < noise["loss"]
    assert report["again"], "its own state, put back, goes on to the last bit"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return reported("tensor", tmp_path_factory.mktemp("tensor"), 4, CASES)


@pytest.mark.parametrize("case", CASES)
def test_several_ranks_are_one_process(case, reports):
    report = reports[case]
    assert "tensor parallel, 2 ranks" in report["description"]
    assert report["before"] == 0.0
    assert distance(report["alone"], report["cut"], 0) < NOISE["loss"]
    assert report["alone"][-1][0] < 0.98 * report["alone"][0][0], "it has learned something"
    if "zero0" not in case:  # where DeepSpeed tells no norm
        assert distance(report["alone"], report["cut"], 1) < NOISE["norm"]
    assert min(norm for _, norm in report["alone"]) > 0.5, "every step was clipped"
    check_round_trips(report, NOISE)
    held, whole = report["elements"]
    assert held < (0.95 if "moe" in case else 0.7) * whole, "experts are whole on each rank"


def test_what_would_train_otherwise_is_refused(tmp_path):
    report = reported("refused_cuts", tmp_path, 2)
    wrong = {case: said for case, said in report.items() if CUTS[case] not in said or bool(said) != bool(CUTS[case])}
    assert not wrong


# Without processes.

PACKED = Cut((12, 3), (12, 3), 0, ((2, 2), (2, 2), (2, 2)))
ROW = Cut((2, 5), (2, 5), 1, ((3, 2),))
EXPERTS = Cut((8, 3), (2, 4, 3), 1, ((3, 1),))


@pytest.mark.parametrize("cut", [PACKED, ROW, EXPERTS, Cut((5,), (5,), 0, ((3, 2),))])
def test_shares_make_the_whole_again(cut):
    whole = torch.arange(math.prod(cut.shape), dtype=torch.float32).view(cut.shape)
    shares = [cut.share(whole, rank, (-1,)) for rank in range(2)]
    assert [share.numel() for share in shares] == [cut.numel(rank) for rank in range(2)]
    assert sum(share.numel() for share in shares) == whole.numel()
    assert torch.equal(cut.whole(shares), whole)


def test_query_key_and_value_are_each_cut():
    whole = torch.arange(12)[:, None].expand(12, 3)
    assert PACKED.share(whole, 1, (6, 3))[:, 0].tolist() == [2, 3, 6, 7, 10, 11]


def test_a_state_of_another_model_is_refused():
    one = ParameterState("a", torch.zeros(2, 6), {"sum": torch.zeros(1)}, {})
    saved = Snapshot(EngineState(3, None, {}, {}, [one]))
    with pytest.raises(CheckpointError, match=r"a has shape \[2, 5\], saved \[2, 6\]"):
        Shares(saved, {"a": (2, 3)}, {"a": ROW}, 0)


def test_state_that_is_no_share_cannot_be_made_whole():
    one = ParameterState("a", torch.zeros(2, 3), {"row_var": torch.zeros(2, 1)}, {})
    group = None
    with pytest.raises(
        CheckpointError, match=r"a: .* share has shape \[2, 3\], but the optimizer's row_var for it has shape \[2, 1\]"
    ):
        list(state_tensor.whole(EngineState(3, None, {}, {}, [one]), {"a": ROW}, group).parameters)


def told(model, size, **section):
    batch, task = SimpleNamespace(tensor_parallel_size=size), SimpleNamespace(partition_config=None)
    return completed({"autotp_size": size, **section}, model, SimpleNamespace(batch=batch, task=task))


def transformer(**settings):
    config = _transformers.configure("AutoModelForCausalLM", {**LLAMA, **settings}, {"vocab_size": 256})
    return _transformers.build("AutoModelForCausalLM", config, None)


def test_who_says_how_a_model_is_cut():
    assert told(transformer(), 2) == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    plain = nn.Sequential(nn.Linear(2, 2))
    assert "partition_config" in told(plain, 2, partition_config={"layer_specs": []})
    with pytest.raises(EngineError, match=r'nothing says how to shard a Sequential; say in "tensor_parallel"'):
        told(plain, 2)
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4}
    config = _transformers.configure("AutoModelForCausalLM", gpt2, {"vocab_size": 256})
    with pytest.raises(EngineError, match="nothing says how to shard a GPT2LMHeadModel"):
        told(_transformers.build("AutoModelForCausalLM", config, None), 2)
    with pytest.raises(
        EngineError, match=r"shards a MixtralForCausalLM in ways unknown to DeepSpeed \(.*packed_colwise"
    ):
        told(transformer(model_type="mixtral", num_local_experts=2), 2)
    with pytest.raises(EngineError, match="num_key_value_heads 2 is not divisible by autotp_size 4; choose another"):
        told(transformer(), 4)


def test_nothing_that_is_cut_is_a_mistake():
    with pytest.raises(
        EngineError, match="no layer matches partition_config, so nothing is sharded; correct its patterns"
    ):
        cuts(nn.Linear(2, 2))
