"""Keys that could mean different things on different engines, and do not: real runs, compared step by step."""

import json

import pytest

from dsframe.tools.compare import losses
from tests import kept
from tests.engines.test_foreign import SETUPS
from tests.files import ds_config
from tests.processes import REPOSITORY

STEPS = 8
BASE = ds_config(
    32,
    "AdamW",
    2e-3,
    sections={"gradient_accumulation_steps": 2},
    task={
        "name": "language",
        "layers": 2,
        "heads": 2,
        "width": 32,
        "context": 16,
        "corpus": str(REPOSITORY / "LICENSE"),
        "samples": 160,
    },
    steps=STEPS,
    eval_micro_batch_size=200,
    log_every_steps=1,
    seed=3,
)
# No gradient_clipping anywhere: DeepSpeed's default of 1.0 must hold on every engine. The learning rates make it bite.
FILES = {
    "sgd, torch schedule, predivided": {
        "optimizer": {"type": "SGD", "params": {"lr": 2.0, "momentum": 0.9}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 4, "gamma": 0.5}},
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "zero_allow_untested_optimizer": True,
    },
    "sum, cycled momentum": {
        "gradient_allreduce_op": "sum",
        "scheduler": {
            "type": "OneCycleLR",
            "params": {"max_lr": 2e-3, "total_steps": STEPS, "pct_start": 0.4},
        },
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
BOUNDS = {"autocast": 5e-3}
ENGINES = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "horovod": {"dsframe": {"engine": "horovod"}},
    "ddp": {"dsframe": {"engine": "ddp"}},
}


def curve(directory, name, engine):
    changes = ENGINES[engine]
    ours = {**BASE["dsframe"], **changes.get("dsframe", {}), "run_dir": engine}
    kept.train(directory, {**BASE, **FILES[name], **changes, "dsframe": ours}, 2).check()
    return [loss for _, loss in sorted(losses(directory / engine).items())]


@pytest.mark.parametrize("name", FILES)
def test_one_meaning(name, tmp_path):
    chosen = ["ddp", "horovod", "zero1"] if name not in BOUNDS else ["ddp", "horovod", "zero2"]
    curves = {engine: curve(tmp_path, name, engine) for engine in chosen}
    for engine in chosen[1:]:
        assert curves[engine] == pytest.approx(curves["ddp"], abs=BOUNDS.get(name, 2e-5)), engine
    assert min(curves["ddp"]) < curves["ddp"][0] - 0.01, "it moves"


def evaluations(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}


def test_a_loss_over_other_numbers_of_items_is_the_same_training(tmp_path):
    """However the global batch is cut, and where a micro-batch is all padding; without the weights it is another training."""

    def curve(name, task, ranks, changes):
        section = {"task": {"name": f"tests.engines.padded_task:{task}"}, "steps": 6, "log_every_steps": 1}
        sections = {"gradient_accumulation_steps": 4, **changes}
        section |= {"run_dir": name, **sections.pop("dsframe", {})}
        kept.train(tmp_path, ds_config(16, "AdamW", 0.02, sections=sections, **section), ranks).check()
        evaluation = next(iter(evaluations(tmp_path / name).values()))
        return [*(loss for _, loss in sorted(losses(tmp_path / name).items())), evaluation]

    alone = {"gradient_accumulation_steps": 1, "dsframe": {"engine": "single"}}
    expected = curve("alone", "Padded", 1, alone)
    assert len(expected) == 7
    for name, (ranks, changes) in SETUPS.items():
        if name.endswith("units"):
            continue  # those of a model with such blocks
        assert curve(name, "Padded", ranks, changes) == pytest.approx(expected, abs=2e-6), name
    ignorant = curve("ignorant", "Unweighted", 2, {"gradient_accumulation_steps": 1, "dsframe": {"engine": "ddp"}})
    assert max(abs(one - two) for one, two in zip(ignorant[:-1], expected[:-1], strict=True)) > 1e-3
