"""What was trained is what is exported, of each kind of model, trained on one process, by DDP and at ZeRO-3: every export gives
the evaluation's loss in a fresh process that loads it with the library it is for, without dsframe (docs/checkpoints.md)."""

from pathlib import Path

import pytest
import torch
import transformers

from dsframe.run_dir.record import read_summary
from dsframe.tools.export import main as export
from tests import kept
from tests.engines import exported
from tests.files import ds_config, read_json, write_json
from tests.processes import python, run_ranks

ENGINES = {"single": 1, "ddp": 2, "deepspeed": 2}
KEPT = {("deepspeed", "adapter"), ("ddp", "vision"), ("single", "untied")}
"""What ``make test`` has; the rest is for ``make test-all``."""
CASES = [
    pytest.param(engine, kind, marks=() if (engine, kind) in KEPT else pytest.mark.long)
    for engine in ENGINES
    for kind in exported.KINDS
]


@pytest.mark.parametrize(("engine", "kind"), CASES)
def test_every_export_is_the_model_that_was_trained(engine, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, sizes, adapter = exported.KINDS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    cls(cls.config_class(**sizes)).save_pretrained("base")
    task = {"name": "tests.engines.exported_task:Exported", "options": {"kind": kind}}
    file = ds_config(
        4,
        "AdamW",
        0.02,
        sections={"zero_optimization": {"stage": 3 if engine == "deepspeed" else 0}},
        **{"task": task, "steps": 6, "threads_per_rank": 1, **({"adapter": adapter} if adapter else {})},
    )
    write_json(Path("file.json"), file)
    kept.run(tmp_path, ["--config", "file.json", "--engine", engine, "--run-dir", "run"], ENGINES[engine]).check()
    merge = ["--merge"] if adapter else []
    Path("out").mkdir()
    for to in ("huggingface", "safetensors", "torch"):
        assert export(["run", "--to", to, "--out", f"out/{to}", *merge]) == 0
    others = ["peft"] if adapter else []
    for to in others:
        assert export(["run", "--to", to, "--out", f"out/{to}"]) == 0
    run_ranks(python([exported.__file__, kind]), cwd=tmp_path, timeout_seconds=150).check()
    found = read_json(Path("found.json"))
    trained = read_summary(tmp_path / "run")["metrics"]["loss"]
    assert trained < exported.loss(exported.base(kind), kind) - 0.05
    assert found == pytest.approx(
        dict.fromkeys(sorted([*others, "huggingface", "safetensors", "torch"]), trained), abs=1e-6
    )
