"""Keys that could mean different things on different engines, and do not: real runs, compared step by step."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dsframe.errors import TaskError
from dsframe.tools import export
from dsframe.tools.compare import losses
from tests import kept
from tests.engines.norm_task import Normed
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
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
BOUNDS = {"bf16": 5e-3, "autocast": 5e-3}
ENGINES = {
    "zero0": {"zero_optimization": {"stage": 0}},
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
    if name == "bf16":
        chosen.append("zero0")
    curves = {engine: curve(tmp_path, name, engine) for engine in chosen}
    for engine in chosen[1:]:
        assert curves[engine] == pytest.approx(curves["ddp"], abs=BOUNDS.get(name, 2e-5)), engine
    assert min(curves["ddp"]) < curves["ddp"][0] - 0.01, "it moves"


def test_an_evaluation_is_of_the_model_that_an_export_gives(tmp_path):
    """BatchNorm's statistics differ between ranks, and DDP by itself has other ones than the rest."""
    file = ds_config(
        16,
        "AdamW",
        0.01,
        task={"name": "tests.engines.norm_task:Normed"},
        steps=8,
        eval_every_steps=3,
        eval_micro_batch_size=7,
        checkpoints={"at_end": True},
    )
    found = {}
    for engine in ("ddp", "horovod", "fsdp", "deepspeed"):
        file["dsframe"] |= {"engine": engine, "run_dir": engine}
        kept.train(tmp_path, file, 2).check()
        found[engine] = evaluations(tmp_path / engine)
        weights = tmp_path / f"{engine}.safetensors"
        assert export.main([str(tmp_path / engine), "--out", str(weights)]) == 0
        model = Normed().model()
        model.load_state_dict(load_file(weights))
        inputs, targets = Normed().eval_data().batch(torch.arange(41), 0)
        with torch.no_grad():
            alone = float(Normed().loss(model.eval()(inputs), targets))
        assert found[engine][8] == pytest.approx(alone, rel=1e-5), engine
        assert found[engine] == pytest.approx(found["ddp"], rel=1e-5), engine


def evaluations(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_broken_evaluation_ends_a_run_before_its_first_step(engine, tmp_path):
    task = {"name": "tests.engines.norm_task:Scaled"}
    file = ds_config(16, "AdamW", 0.01, task=task, steps=8, engine=engine, run_dir="run")
    done = kept.train(tmp_path, file, 1 if engine == "single" else 2)
    assert done.returncode == TaskError.exit_code
    assert "Scaled.metrics: 'loss' is float; give a mapping from names to dsframe.Sum(total, count)" in done.output
    assert "step" not in (tmp_path / "run" / "metrics.jsonl").read_text()


WEIGHTED = {
    "alone in 8": (1, {"gradient_accumulation_steps": 8, "dsframe": {"engine": "single"}}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
    "zero3": (2, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
    "pipeline": (2, {"pipeline": {"stages": 2}}),
    "horovod": (2, {"dsframe": {"engine": "horovod"}}),
    "ddp": (2, {"dsframe": {"engine": "ddp"}}),
    "fsdp": (2, {"dsframe": {"engine": "fsdp"}}),
}


def test_a_loss_over_other_numbers_of_items_is_the_same_training(tmp_path):
    """However the global batch is cut, and where a micro-batch is all padding; without the weights it is another training."""

    def curve(name, task, ranks, changes):
        section = {
            "task": {"name": f"tests.engines.padded_task:{task}"},
            "steps": 6,
            "log_every_steps": 1,
            "run_dir": name,
        }
        optimizer = {"type": "AdamW", "params": {"lr": 0.02}}
        file = {"train_batch_size": 16, "gradient_accumulation_steps": 4, "optimizer": optimizer, **changes}
        file["dsframe"] = {**section, **changes.get("dsframe", {})}
        kept.train(tmp_path, file, ranks).check()
        evaluation = next(iter(evaluations(tmp_path / name).values()))
        return [*(loss for _, loss in sorted(losses(tmp_path / name).items())), evaluation]

    alone = {"gradient_accumulation_steps": 1, "dsframe": {"engine": "single"}}
    expected = curve("alone", "Padded", 1, alone)
    assert len(expected) == 7
    for name, (ranks, changes) in WEIGHTED.items():
        assert curve(name, "Padded", ranks, changes) == pytest.approx(expected, abs=2e-6), name
    ignorant = curve("ignorant", "Unweighted", 2, {"gradient_accumulation_steps": 1, "dsframe": {"engine": "ddp"}})
    assert max(abs(one - two) for one, two in zip(ignorant[:-1], expected[:-1], strict=True)) > 1e-3
