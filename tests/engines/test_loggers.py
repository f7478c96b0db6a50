"""TensorBoard and Weights & Biases write what the run's own record has."""

import re

import pytest

from dsframe.tools.report.runs import read_run
from tests.files import ds_config, write_json
from tests.processes import run_ranks, torchrun
from tests.unit.test_loggers import scalars

STEPS, BATCH = 4, 8
SECRET = "the-key-of-an-account"
TASK = {"name": "language", "layers": 2, "heads": 2, "width": 32, "context": 16, "corpus": "synthetic", "samples": 64}


def file(folder):
    """Of a pipeline, whose last stage has the loss, and the first one the loggers."""
    return ds_config(
        BATCH,
        "AdamW",
        1e-3,
        sections={
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 0},
            "pipeline": {"stages": 2},
            "gradient_clipping": 0.0,
            "tensorboard": {"enabled": True, "output_path": str(folder / "board"), "job_name": "job"},
            "wandb": {"enabled": True, "project": "tests"},
        },
        engine="deepspeed",
        task=TASK,
        steps=STEPS,
        log_every_steps=1,
        run_dir=str(folder / "run"),
        eval_micro_batch_size=200,
    )


def test_every_logger_has_what_the_record_has(tmp_path):
    path = write_json(tmp_path / "file.json", file(tmp_path))
    secret = ["--set", f'comet={{"enabled": true, "api_key": "{SECRET}"}}']
    command = torchrun(2, ["-m", "dsframe.train", "--config", str(path), *secret])
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    finished = run_ranks(command, timeout_seconds=300, env=offline).check()
    run = read_run(tmp_path / "run")
    wanted = {name: run.curve(key) for name, key in NAMES.items()}
    assert len(wanted["train/loss"]) == STEPS
    assert len(wanted["eval/accuracy"]) == 1
    wanted = {name: curve for name, curve in wanted.items() if curve}
    assert set(wanted) == set(NAMES)
    found = scalars(tmp_path / "board" / "job")
    assert {name: found[name] for name in wanted} == {
        name: [(at, pytest.approx(value, rel=1e-6)) for at, value in curve] for name, curve in wanted.items()
    }
    assert len([*(tmp_path / "run").glob("wandb/offline-run-*/*.wandb")]) == 1
    assert "wandb failed" not in finished.output
    labelled = r"dsframe \d|(^|<stderr>:)  ([a-z]+ {2,}| {12})"  # the blocks at the beginning and at the end
    progress = r"dsframe: |: note: |step +\d|^saved |<stderr>:saved "
    expected = rf"{labelled}|{progress}|wandb|(^|:)\s*$"
    noise = [line for line in finished.output.splitlines() if not re.search(expected, line)]
    assert noise == []
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in finished.output


NAMES = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/gradient_norm": "gradient_norm",
    "train/rate": "rate",
    "train/memory_bytes": "memory_bytes",
    "eval/accuracy": "evaluation.accuracy",
}
