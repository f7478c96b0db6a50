"""What test_experts.py runs on every rank: experts spread over ranks, beside one process that has them all.

    torchrun --nproc-per-node=4 -m tests.engines.experts REPORT.json CASE...

Each case is measured as those of tests/engines/tensor.py are: six steps of both, their states compared; then each goes on from the
other's state. By SGD without clipping unless it says otherwise: Adam and clipping hide factors.
"""

from tests.engines import several
from tests.engines.tensor import measure
from tests.files import zero

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}, "gradient_clipping": 0.0}
SGD |= {"zero_allow_untested_optimizer": True}
WHOLE = {"stage3_param_persistence_threshold": 0}


def spread(size=2, **more):
    """The file's section."""
    return {"expert_parallel": {"enabled": True, "autoep_size": size, **more}}


GROUPS = {"no_decay": "norms-and-biases", "parameter_groups": [{"match": ["*.gate.weight"], "lr_scale": 0.5}]}
CASES = {
    "zero0": ("balanced mixtral", {**SGD, **spread(), **zero(0)}),
    "zero2": ("balanced qwen3 moe", {**SGD, **spread(), **zero(2)}),
    "zero3 recomputed": ("balanced mixtral", {**SGD, **spread(), **zero(3, **WHOLE)}),
    "zero1 groups": ("mixtral", {**spread(), **zero(1)}),
}
SETTINGS = {
    "recomputed": {"model": {"activation_checkpointing": True}},
    "groups": GROUPS,
}
"""In the section "dsframe", by the last word of a case's name."""


def of(case):
    kind, changes = CASES[case]
    return measure(kind, "deepspeed", changes, **SETTINGS.get(case.rpartition(" ")[2], {}))


if __name__ == "__main__":
    several.report(of, CASES)
