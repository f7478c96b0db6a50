"""What test_groups.py runs on both ranks: parameter groups, adapters and averages beside one process with the same.

    torchrun --nproc-per-node=2 -m tests.engines.groups REPORT.json CASE...

Each case as in tests/engines/tensor.py: losses, states with every parameter's moments, and going on from the other's state.
"""

from tests.engines import several
from tests.engines.tensor import BF16, CUT, TASKS, measure
from tests.files import zero

STAGES = {"pipeline": {"stages": 2}}
GROUPS = {
    "ema": {"decay": 0.9},
    "no_decay": "norms-and-biases",
    "parameter_groups": [
        {"match": ["5.weight"], "lr_scale": 3.0},  # the output layer: the tokens' embedding by its further name
        {"match": ["1.*"], "freeze": True},
        {"match": ["3.expand.*", "2.norm_1.weight"], "weight_decay": 2.0, "lr_scale": 0.5},
    ],
}
CPU = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "zero0 bf16": ("deepspeed", {**zero(0), **BF16}),
    "zero1": ("deepspeed", zero(1)),
    "zero2 cpu": ("deepspeed", zero(2, **CPU)),
    "zero3": ("deepspeed", zero(3, stage3_param_persistence_threshold=0)),
    "zero3 cpu": ("deepspeed", zero(3, **CPU)),
    "tensor parallel zero3": ("deepspeed", {**CUT, **zero(3)}),
    "pipeline zero1": ("deepspeed", {**STAGES, **zero(1)}),
}
ADAPTER = {"ema": {"decay": 0.9}, "adapter": {"r": 4, "lora_alpha": 16}}
ADAPTED = ("ddp", "fsdp", "zero0 bf16", "zero2 cpu", "zero3")
CASES |= {f"adapter {case}": CASES[case] for case in ADAPTED}
CASES["adapter nf4 ddp"] = CASES["ddp"]
CASES["adapter zero3 bf16"] = ("deepspeed", {**zero(3, stage3_param_persistence_threshold=0), **BF16})


def of(case):
    engine, changes = CASES[case]
    settings = {"task": TASKS["gpt"], **(ADAPTER if "adapter" in case else GROUPS)}
    if "nf4" in case:
        settings["adapter"] = {**settings["adapter"], "base_format": "nf4"}
    return measure("gpt", engine, {**changes, "dsframe": settings})


if __name__ == "__main__":
    several.report(of, CASES)
