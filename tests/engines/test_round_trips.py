"""Every engine's state out and in again: five steps, a snapshot, five steps, the snapshot back, the same five again."""

import pytest

from tests.files import ds_config, read_json, write_json
from tests.processes import run_ranks, warm


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


BF16 = {"bf16": {"enabled": True}}
PIPELINE = {"pipeline": {"stages": 2}}
CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

ROUND_TRIPS = {
    "single": ("single", {}),
    "ddp-bf16": ("ddp", BF16),
    "fsdp": ("fsdp", {}),
    "fsdp-bf16-cpu": ("fsdp", {**BF16, "dsframe": {"fsdp": {"wrap": ["Linear"], "offload": "cpu"}}}),
    "horovod": ("horovod", {}),
    "zero0": ("deepspeed", zero(0)),
    "zero0-bf16": ("deepspeed", {**zero(0), **BF16}),
    "zero1": ("deepspeed", zero(1)),
    "zero1-bf16": ("deepspeed", {**zero(1), **BF16}),
    "zero2-cpu": ("deepspeed", zero(2, offload_optimizer={"device": "cpu"})),
    "zero3": ("deepspeed", zero(3, sub_group_size=200)),
    "zero3-kept": ("deepspeed", {**zero(3, stage3_param_persistence_threshold=0), **BF16}),
    "zero3-cpu": ("deepspeed", zero(3, **CPU)),
    "pipeline-bf16": ("deepspeed", {**PIPELINE, **BF16}),
    "pipeline-zero1-cpu": ("deepspeed", {**PIPELINE, **zero(1, offload_optimizer={"device": "cpu"})}),
}


LONG_ROUND_TRIPS = {"fsdp", "zero0", "zero1", "pipeline-zero1-cpu"}
"""Whose engine and number format others have, one by one."""


def also_long(names, long):
    """The names as parameters, of which ``make test`` leaves some out."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


@pytest.mark.parametrize("case", also_long(ROUND_TRIPS, LONG_ROUND_TRIPS))
def test_state_goes_out_and_in_again(case, tmp_path):
    engine, changes = ROUND_TRIPS[case]
    report = round_trip(engine, changes, tmp_path)
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"]
    assert report["read_back"] == 0.0
    assert report["after"] != report["first"]
    assert report["updates"] == 5
    assert report["seen"] == (40 if engine == "single" or "pipeline" in changes else 20)
    assert report["dtypes"] == ["torch.float32"]
    assert report["shapes"] == {
        "scale": [3],
        "first.weight": [19, 7],
        "first.bias": [19],
        "middle.weight": [19, 19],
        "middle.bias": [19],
        "last.weight": [3, 19],
        "last.bias": [3],
    }
    moments = {**{name: ["exp_avg", "exp_avg_sq"] for name in report["shapes"] if name != "scale"}, "scale": []}
    assert report["moments"] == moments
    assert {one.get("step") for name, one in report["scalars"].items() if name != "scale"} == {5.0}


OTHER_OPTIMIZERS = {
    "SGD": (3, {"lr": 0.01, "momentum": 0.9}, ["momentum_buffer"]),
    "Adagrad": (1, {"lr": 0.01}, ["sum"]),
}


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_other_optimizers_keep_other_things(kind, tmp_path):
    stage, params, moments = OTHER_OPTIMIZERS[kind]
    changes = {**zero(stage), "optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True}
    report = round_trip("deepspeed", changes, tmp_path)
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"]
    assert report["read_back"] == 0.0
    assert report["moments"]["middle.weight"] == moments


def round_trip(engine, changes, folder, width=19, timeout_seconds=150):
    file = folder / "config.json"
    write_json(file, configuration(engine, changes, width))
    arguments = ["-m", "tests.engines.round_trip", str(file)]
    run_ranks(warm(1 if engine == "single" else 2, arguments), timeout_seconds=timeout_seconds, cwd=folder).check()
    return read_json(folder / "report.json")


def configuration(engine, changes, width):
    return ds_config(
        8,
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        sections={
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            **{key: value for key, value in changes.items() if key != "dsframe"},
        },
        **{
            "engine": engine,
            "task": {"name": "tests.engines.odd_task:Odd", "options": {"width": width}},
            "threads_per_rank": 1,
            **changes.get("dsframe", {}),
        },
    )
