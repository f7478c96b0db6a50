"""Each example: its README says whom it is for, its files are checked, its programs train for five steps."""

import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from dsframe.cli import main
from dsframe.run_dir.record import read_metrics, read_summary
from dsframe.tools.compare import losses
from tests.files import read_json
from tests.processes import BIN, REPOSITORY, run_ranks, warm

EXAMPLES = REPOSITORY / "examples"
FIVE = ["--set", "dsframe.steps=5", "--set", "dsframe.epochs=null", "--set", "dsframe.eval_every_steps=5"]
TRAINED = {
    "own_model": "ddp",
    "table": "fsdp",
    "images": "ddp",
    "text": "deepspeed",
    "finetune": "deepspeed",
    "from_ddp": "ddp",
    "from_horovod": "horovod",
    "evaluate_predict": "ddp",
    "first_run": "deepspeed",
    "gan": "deepspeed",
    "preferences": "deepspeed",
}
"""Example -> the engine that it is trained on here."""
LONG = {"text", "finetune", "first_run", "evaluate_predict", "from_horovod", "table"}
"""Of these, what `make test` leaves to `make test-all`."""


def copied(name, folder):
    return Path(shutil.copytree(EXAMPLES / name, folder / name))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.json")), ids=lambda path: path.parent.name)
def test_a_file_has_no_mistake(path, capsys):
    processes = "64" if path.parent.name == "slurm" else "8" if path.parent.name == "seven_billion" else "2"
    engine = ["--engine", "horovod"] if path.parent.name == "from_horovod" else []
    assert main(["check", str(path), "-np", processes, "--strict", *engine]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [name if name not in LONG else pytest.param(name, marks=pytest.mark.long) for name in TRAINED]
)
def test_an_example_trains(name, tmp_path, monkeypatch):
    folder = copied(name, tmp_path)
    monkeypatch.chdir(folder)
    if (folder / "make_data.py").exists():
        runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    config = next(iter(folder.glob("*.json"))).name
    words = ["--config", config, "--engine", TRAINED[name], "--run-dir", "run", *FIVE]
    program = ["gan.py"] if name == "gan" else ["-m", "dsframe.train"]
    if name in ("text", "first_run"):
        data = "corpus" if name == "text" else "dataset"
        words += ["--set", f"dsframe.task.{data}=synthetic", "--set", "dsframe.task.samples=640"]
    run_ranks(warm(2, [*program, *words]), cwd=folder, timeout_seconds=150).check()
    summary = read_summary(folder / "run")
    assert (summary["steps"], summary["engine"], summary["world_size"]) == (5, TRAINED[name], 2)
    losses = [line["loss"] for line in read_metrics(folder / "run") if "loss" in line]
    assert name != "preferences" or losses[0] == pytest.approx(math.log(2), abs=1e-6)  # nothing has been learned yet


def test_a_training_goes_on_with_another_engine(tmp_path, monkeypatch):
    folder = copied("resume_elsewhere", tmp_path)
    monkeypatch.chdir(folder)

    def train(*words, ranks=1):
        command = warm(ranks, ["-m", "dsframe.train", "--config", "config.json", *words])
        return run_ranks(command, cwd=folder, timeout_seconds=150).check().output

    train("--engine", "fsdp", "--set", "dsframe.steps=20", ranks=2)
    assert 'engine was "fsdp", is "single"' in train("--engine", "single", "--resume", "auto")
    train("--engine", "single", "--run-dir", "runs/whole")
    whole, travels = (losses(folder / "runs" / name) for name in ("whole", "travels"))
    assert whole == pytest.approx(travels, abs=1e-5)
    assert {20, 40} <= set(whole)


def test_seven_billion_are_planned(capsys):
    words = ["--config", str(EXAMPLES / "seven_billion" / "config.json"), "-np", "8", "--gpu-memory", "24GB"]
    main(["plan", *words, "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 6_738_415_616


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (
            "from_ddp",
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "before.py"],
        ),
        pytest.param("from_horovod", [f"{BIN}/horovodrun", "-np", "2", "python", "before.py"], marks=pytest.mark.long),
    ],
    ids=["ddp", "horovod"],
)
def test_what_an_example_begins_with_runs(name, command, tmp_path):
    assert "loss" in run_ranks(command, cwd=copied(name, tmp_path), timeout_seconds=150).check().output


@pytest.mark.long
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    notebook = read_json(EXAMPLES / "reference_engines" / "course.ipynb")
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3
    (tmp_path / "course.py").write_text("\n".join(cells))
    finished = run_ranks([sys.executable, "course.py"], cwd=tmp_path, timeout_seconds=300).check()
    assert "'ring': " in finished.stdout
