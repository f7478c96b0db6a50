"""Every engine's state out and in again: five steps, a snapshot, five steps, the snapshot back, the same five again."""

import pytest

from tests.files import ds_config, write_json, zero
from tests.processes import reported

BF16 = {"bf16": {"enabled": True}}
PIPELINE = {"pipeline": {"stages": 2}}
OFFLOADED = {"wrap": ["Linear"], "offload": "cpu", "reshard_after_forward": False}
CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

ROUND_TRIPS = {
    "single": ("single", {}),
    "ddp-bf16": ("ddp", BF16),
    "fsdp-bf16-cpu": ("fsdp", {**BF16, "dsframe": {"fsdp": OFFLOADED}}),
    "horovod": ("horovod", {}),
    "zero0-bf16": ("deepspeed", {**zero(0), **BF16}),
    "zero1-bf16": ("deepspeed", {**zero(1), **BF16}),
    "zero2-cpu": ("deepspeed", zero(2, offload_optimizer={"device": "cpu"})),
    "zero3": ("deepspeed", zero(3, sub_group_size=200)),
    "zero3-kept": ("deepspeed", {**zero(3, stage3_param_persistence_threshold=0), **BF16}),
    "zero3-cpu": ("deepspeed", zero(3, **CPU)),
    "pipeline-bf16": ("deepspeed", {**PIPELINE, **BF16}),
}


OTHER_OPTIMIZERS = {
    "SGD": (3, {"lr": 0.01, "momentum": 0.9}, ["momentum_buffer"]),
    "Adagrad": (1, {"lr": 0.01}, ["sum"]),
}
ROUND_TRIPS |= {
    kind: (
        "deepspeed",
        {**zero(stage), "optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True},
    )
    for kind, (stage, params, _) in OTHER_OPTIMIZERS.items()
}
OWN_JOB = ("single", "horovod")
TOGETHER = sorted({*ROUND_TRIPS} - {*OWN_JOB}, key=lambda name: "pipeline" in name)
"""Pipelines last: after them DeepSpeed's groups suit no stage 3."""


def also_long(names, long):
    """The names as parameters, of which ``make test`` leaves some out."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


@pytest.mark.parametrize(("ranks", "cases"), [(1, ["single"]), (2, ["horovod"]), (2, TOGETHER)])
def test_state_goes_out_and_in_again(ranks, cases, tmp_path):
    files = {case: configuration(*ROUND_TRIPS[case], 19) for case in cases}
    for case, report in round_trips(tmp_path, ranks, files).items():
        check(case, report)


def round_trips(folder, ranks, files, timeout_seconds=300.0):
    """What each of the files, by name, comes to."""
    for case, file in files.items():
        write_json(folder / f"{case}.json", file)
    reports = reported("round_trip", folder, ranks, files, timeout_seconds=timeout_seconds)
    assert reports.keys() == files.keys()
    return reports


def check(case, report):
    engine, changes = ROUND_TRIPS[case]
    assert report["repeated"] == report["after"], case
    assert report["from_the_start"] == report["first"], case
    assert report["read_back"] == 0.0, case
    assert report["after"] != report["first"], case
    assert report["updates"] == 5, case
    assert report["seen"] == (40 if engine == "single" or "pipeline" in changes else 20), case
    assert report["dtypes"] == ["torch.float32"], case
    assert report["shapes"] == {
        "scale": [3],
        "first.weight": [19, 7],
        "first.bias": [19],
        "middle.weight": [19, 19],
        "middle.bias": [19],
        "last.weight": [3, 19],
        "last.bias": [3],
    }
    kept = OTHER_OPTIMIZERS[case][2] if case in OTHER_OPTIMIZERS else ["exp_avg", "exp_avg_sq"]
    moments = {**{name: kept for name in report["shapes"] if name != "scale"}, "scale": []}
    assert report["moments"] == moments, case
    if case not in OTHER_OPTIMIZERS:
        steps = {one.get("step") for name, one in report["scalars"].items() if name != "scale"}
        assert steps == {5.0}, case


def configuration(engine, changes, width):
    return ds_config(
        8,
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        sections={
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
            **{key: value for key, value in changes.items() if key != "dsframe"},
        },
        **{
            "engine": engine,
            "task": {"name": "tests.engines.odd_task:Odd", "options": {"width": width}},
            "threads_per_rank": 1,
            **changes.get("dsframe", {}),
        },
    )
