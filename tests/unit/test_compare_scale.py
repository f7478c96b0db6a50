"""``dsframe compare`` and ``dsframe scale``: what is trained, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsframe.cli import main
from dsframe.errors import TrainingError
from dsframe.tools import compare, subprocess_runs
from dsframe.tools.plan import report_prediction
from tests.unit.test_report_page import write_run

Trained = list[tuple[str, int, str | None, dict[str, Any]]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Trainings that were asked for, each of which takes 1 / processes seconds a step, a tenth more each time."""
    found: Trained = []

    def train(
        file: Path, processes: int, directory: Path, *, engine: str | None = None, overrides: Sequence[str] = ()
    ) -> None:
        content = json.loads(file.read_text()) | {"overrides": list(overrides)}
        found.append((file.stem, processes, engine, content))
        batch = 32
        seconds = (1 + len(found) / 10) / processes
        for name in ("file.json", "metrics.jsonl"):
            (directory / name).unlink(missing_ok=True)
        if directory.exists():
            directory.rmdir()
        write_run(
            directory, [2.0, 1.0 + len(found) / 100], description=f"engine {engine}", steps=2, rate=batch / seconds,
            unit="samples", units_per_step=batch, seconds=1.0, first_step_seconds=0.5, metrics={"accuracy": 0.5},
            peak_memory_bytes=[2**20], launcher="python", predicted={"sent_bytes_per_step": {"gradients": 3e6}},
        )  # fmt: skip

    monkeypatch.setattr(subprocess_runs, "train", train)
    monkeypatch.setattr(report_prediction, "predicted", lambda directory, summary: summary.get("predicted", {}))
    return found


def write(folder: Path, name: str, **more: Any) -> Path:
    task = {"name": "language", "layers": 1, "width": 32, "context": 8, "corpus": "synthetic"}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"train_batch_size": 32, "dsframe": {"task": task, "steps": 2}} | more))
    return path


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Trained) -> None:
    for name in ("a", "b"):
        subprocess_runs.train(write(tmp_path, name), 2, tmp_path / name)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert rows["sent, predicted, MB"].split()[-2:] == ["3", "3"]
    assert rows["loss at step 2"].split()[-1] == "+1.0e-02"
    assert f"{tmp_path / 'b'}: not the same training as {tmp_path / 'a'}: at step 2" in printed
    assert "Training loss" in (tmp_path / "page.html").read_text()
    write_run(tmp_path / "run", [1.0])
    assert main(["compare", str(tmp_path / "run")]) == 6  # it did not come to its end


@pytest.mark.parametrize(("kind", "rows"), [("strong", {1: 32, 2: 16, 4: 8}), ("weak", {1: 32, 2: 32, 4: 32})])
def test_scaling(
    kind: str, rows: dict[int, int], tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path, "file"), tmp_path / "out"
    words = ["-np", "1,2,4", "--kinds", kind, "--out", str(out), "--set", "dsframe.engine=ddp"]
    assert main(["scale", "--config", str(path), *words]) == 0
    assert {processes: file["train_micro_batch_size_per_gpu"] for _, processes, _, file in trained} == rows
    assert all(file["dsframe"]["engine"] == "ddp" for *_, file in trained)
    points = json.loads((out / "scale.json").read_text())[kind]
    assert [point["seconds"] for point in points] == pytest.approx([1.1, 1.2 / 2, 1.3 / 4])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [kind, "processes", "1", "2", "4"]
    ideal = 1 if kind == "strong" else 4
    assert lines[-1].split()[-2] == f"{1.1 / 1.3 * 4 * ideal:.2f}"


def test_keys_of_accounts_are_kept_nowhere(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling trains a changed file: that has the key, where nobody else reads, and what stays has not."""
    train = subprocess_runs.train

    def look(file: Path, processes: int, directory: Path, **more: Any) -> None:
        assert file.parent.stat().st_mode & 0o077 == 0
        train(file, processes, directory, **more)

    monkeypatch.setattr(subprocess_runs, "train", look)
    path, out = write(tmp_path, "file", comet={"api_key": "the-key"}), tmp_path / "out"
    words = ["-np", "1", "--kinds", "weak", "--out", str(out)]
    assert main(["scale", "--config", str(path), *words]) == 0
    assert [content["comet"] for *_, content in trained] == [{"api_key": "the-key"}]
    assert json.loads((out / "weak-np1-1" / "file.json").read_text())["comet"] == {}


def test_a_training_that_fails_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "broken", optimizer={"type": "nonsense"})
    with pytest.raises(TrainingError, match="exit code 2"):
        subprocess_runs.train(path, 1, tmp_path / "run")
    assert "optimizer" in (tmp_path / "run" / "log.txt").read_text()


def test_a_verdict_tells_rounding_from_another_training() -> None:
    curves = [{1: 2.0, 10: 1.0, 100: 0.5}, {1: 2.0, 10: 1.0 + 1e-7, 100: 0.6}, {1: 2.0, 10: 1.01, 100: 0.5}]
    rounded, other = compare.verdicts(["a", "b", "c"], curves, 1e-5)
    assert rounded == (
        "b: the same training as a: up to step 10 the losses differ by 1.0e-07, as rounding does (up to 1e-05)"
    )
    assert other.startswith(
        "c: not the same training as a: at step 10 the losses differ by 1.0e-02, which is more than"
    )
    assert compare.verdicts(["a", "b"], [{1: 2.0}, {}], 1e-5) == ["b: no step was logged by both runs"]
