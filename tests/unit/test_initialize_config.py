"""What ``deepspeed.initialize`` gets: the file in, the exact dictionary out, and nothing else touched."""

import copy
import dataclasses

import pytest
import torch

import dsframe
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.config.schema.zero import SMALL
from dsframe.engines.deepspeed.initialize_config import initialize_config
from dsframe.errors import EngineError
from dsframe.model import optimizers, schedules
from dsframe.model.plan import Plan
from tests.files import ds_config, zero

FILE = ds_config(
    16,
    "AdamW",
    0.01,
    sections={
        "gradient_accumulation_steps": 2,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "tensorboard": {"enabled": False},
        "flops_profiler": {"enabled": True},
    },
    steps=3,
)
ADAM = {
    "type": "Adam",
    "params": {"lr": 0.01, "weight_decay": 0.0, "fused": True, "adam_w_mode": True, "torch_adam": True},
}
BATCH = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
FETCHED = {
    "stage3_prefetch_bucket_size": 1 << 22,
    "stage3_max_live_parameters": 1 << 23,
    "stage3_max_reuse_distance": 0,
}
KEPT = {"stage3_param_persistence_threshold": 1 << 23, "stage3_model_persistence_threshold": 1 << 23}
SPLIT = {"autotp_size": 2, "vocab_parallel_lm_head": False, "tp": {"tp_size": 2}}
NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/somewhere"}}


def plan(changes, ranks=2, *, verbose=False):
    config = load({**FILE, **changes})
    return Plan(
        config,
        World(0, ranks, 0, ranks),
        dsframe.Task(),
        optimizers.read(config),
        schedules.constant(0.01),
        config.batch(ranks),
        torch.device("cpu"),
        verbose,
    )


def copied(stage, **more):
    """Gradients are copied once."""
    return {**BATCH, **zero(stage, contiguous_gradients=False, **more)}


LARGE = {"elements": 1 << 26}
UNIFORM = {"stages": 2, "partition": "uniform"}
CASES = {
    "only what the file says": ({}, {}, BATCH),
    "zero 1": (zero(1), {}, copied(1)),
    "gradients in turns would spoil checkpoints": (zero(2, round_robin_gradients=True), {}, copied(2)),
    "but not where the bucket is sent": (
        zero(3, reduce_scatter=False),
        {},
        {**BATCH, **zero(3, reduce_scatter=False)},
    ),
    "weights not resharded": (zero(3), {"keeps_weights": True}, copied(3, **KEPT)),
    "a large model's gradients are reduced in parts": (
        zero(3),
        LARGE,
        copied(3, reduce_bucket_size=1 << 22, **FETCHED),
    ),
    "and its weights gathered in turn, where the file does not say how": (
        zero(3, stage3_max_live_parameters=10**9),
        LARGE,
        copied(3, reduce_bucket_size=1 << 22, stage3_max_live_parameters=10**9),
    ),
    "but not where the file says how": (
        zero(3, reduce_bucket_size=10**9),
        LARGE,
        copied(3, reduce_bucket_size=10**9, **FETCHED),
    ),
    "a folder of its own": (
        {"zero_optimization": NVME},
        {"swap_paths": {"offload_optimizer": "/somewhere/else"}},
        copied(3, offload_optimizer={"device": "nvme", "nvme_path": "/somewhere/else"}),
    ),
    "tensor parallel": (
        {"tensor_parallel": {"autotp_size": 2}},
        {"tensor_parallel": SPLIT},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "tensor_parallel": SPLIT},
    ),
    "sequence parallel": (
        {"sequence_parallel_size": 2, "data_parallel_size": 1, "dsframe": {"task": {"name": "language"}}},
        {},
        {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
    ),
    "pipeline": (
        {"pipeline": UNIFORM},
        {},
        {
            **BATCH,
            "train_micro_batch_size_per_gpu": 8,
            "pipeline": {**UNIFORM, "use_reentrant": False},
            "steps_per_print": 2**62,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_handover(case):
    changes, arguments, expected = CASES[case]
    made, given = plan(changes), copy.deepcopy(arguments)
    before = copy.deepcopy((made.config.written(), made.config.deepspeed, dict(made.optimizer.arguments)))
    found = initialize_config(made, **arguments)
    assert found == {**expected, "optimizer": ADAM}
    assert found == initialize_config(made, **arguments)
    _spoil(found)
    assert (made.config.written(), made.config.deepspeed, dict(made.optimizer.arguments)) == before
    assert arguments == given


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": {"enabled": True}},
        {"torch_autocast": {"enabled": True}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"overlap_comm": True}},
        {"zero_optimization": {"contiguous_gradients": True}},
        {"pipeline": {"stages": 2}},
    ],
    ids=str,
)
def test_gradients_are_copied_as_deepspeed_does_where_more_depends_on_it(changes):
    zero = {"stage": 1, **changes.get("zero_optimization", {})}
    assert initialize_config(plan({**changes, "zero_optimization": zero}, 4))["zero_optimization"] == zero


def _spoil(value):
    """Changes everything in ``value``, as DeepSpeed may: it writes into the dictionary."""
    for one in list(value.values()):
        if isinstance(one, dict):
            _spoil(one)
    value.clear()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_a_gpu_nothing_is_timed_and_the_bucket_is_no_larger_than_the_model(stage):
    on_gpu = dataclasses.replace(plan({"zero_optimization": {"stage": stage}}), device=torch.device("cuda", 0))
    document = initialize_config(on_gpu, elements=1000)
    assert document["timers"] == {"throughput": {"enabled": False}}
    assert document["zero_optimization"] == {"stage": stage, "reduce_bucket_size": 1000}
    timed = dataclasses.replace(on_gpu, config=load({**FILE, "timers": {"throughput": {"enabled": True}}}))
    assert initialize_config(timed, elements=1000)["timers"] == {"throughput": {"enabled": True}}


def test_a_parameter_that_stage_3_cannot_shard_is_named():
    from dsframe.engines.deepspeed import engine

    model = torch.nn.ParameterDict({"empty": torch.empty(0), "logit_scale": torch.tensor(2.65)})
    with pytest.raises(EngineError, match="stage 3 cannot shard empty, which has no elements"):
        engine.refuse_empty(model)
    engine.refuse_empty(torch.nn.Linear(2, 2))


def test_a_small_model_stays_whole_where_the_file_does_not_say_what_to_keep():
    written = {
        "stage3_param_persistence_threshold": 10**5,
        "stage3_model_persistence_threshold": 10**6,
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
        "offload_param": {"device": "cpu"},
    }
    for stage, section, keeps in [(3, {}, True), (2, {}, False), *((3, {key: written[key]}, False) for key in written)]:
        zero_3 = load(
            {"train_batch_size": 2, "zero_optimization": {"stage": stage, **section}}
        ).deepspeed.zero_optimization
        assert (zero_3.keeps_whole(SMALL), zero_3.keeps_whole(SMALL + 1)) == (keeps, False), section


def test_a_bucket_is_never_so_small_that_messages_are():
    stage_3 = load({"train_batch_size": 2, "zero_optimization": {"stage": 3}}).deepspeed.zero_optimization
    sizes = [stage_3.bucket_elements(elements, on_cpu=True) for elements in (SMALL + 1, 4 * SMALL, 8 * SMALL, 10**12)]
    assert sizes == [SMALL // 4, SMALL // 4, SMALL // 2, stage_3.reduce_bucket_size]
    assert stage_3.bucket_elements(0, on_cpu=False) == stage_3.reduce_bucket_size
    assert stage_3.bucket_elements(SMALL, on_cpu=False) == SMALL
