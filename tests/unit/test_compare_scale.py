"""``dsframe compare FILE FILE`` and ``dsframe scale``: what is trained, in which order, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsframe.cli import main
from dsframe.errors import TrainingError
from dsframe.tools import compare, scale, subprocess_runs
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


def test_files_are_trained_in_turns_and_compared(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write(tmp_path, name)) for name in ("one", "two")]
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", *files, "-np", "2", "--engines", "ddp,horovod", "--repeats", "2", *out]) == 0
    order = [(name, engine) for name, _, engine, _ in trained]
    assert order == [(name, engine) for name in ("one", "two") for engine in ("ddp", "horovod")] * 2
    assert {processes for _, processes, _, _ in trained} == {2}
    said = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert rows["samples/s"].count(" to ") == 4  # a median of two, and both
    assert rows["predicted to be sent, MB"].split()[-4:] == ["3"] * 4
    assert rows["largest to its repeats"].split()[-4:] == ["4.0e-02"] * 4
    assert said.splitlines()[0].split()[-1] == "noise"
    assert rows["loss at step 2"].split()[-1] == "4.0e-02"  # of a run to its repeat
    assert "two ddp: the same training as one ddp: up to step 2 the losses differ by" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f"{name} {engine}" in page for name in ("one", "two") for engine in ("ddp", "horovod"))
    assert main(["compare", files[0], "--engines", "nonsense", *out]) == 2
    assert len(trained) == 8  # mistakes are found before anything is trained


def test_runs_and_files_are_not_mixed(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [1.0])
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path / "run"), "zero1.json"])
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path / "run"), "--engines", "ddp"])
    assert main(["compare", str(tmp_path / "run")]) == 6  # it did not come to its end


@pytest.mark.parametrize(
    ("kind", "shares", "ideal"), [("strong", {1: 32, 2: 16, 4: 8}, 4.0), ("weak", {1: 32, 2: 32, 4: 32}, 4.0)]
)
def test_scaling(
    kind: str,
    shares: dict[int, int],
    ideal: float,
    tmp_path: Path,
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scale, "_devices", lambda: 2)
    path = write(tmp_path, "file")
    arguments = [
        "-np",
        "1,2,4",
        "--kinds",
        kind,
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["scale", "--config", str(path), "--engine", "ddp", *arguments, "--format", "json"]) == 0
    assert {processes: file["train_micro_batch_size_per_gpu"] for _, processes, _, file in trained} == shares
    assert all(file["dsframe"]["engine"] == "ddp" for *_, file in trained)
    points = {point["processes"]: point for point in json.loads(capsys.readouterr().out)[kind]}
    assert set(points) == {1, 2, 4}
    assert [count for count, point in points.items() if point["crowded"]] == [4]
    assert points[1]["seconds"] == pytest.approx(1.1)
    assert points[4]["seconds"] == pytest.approx(1.3 / 4)
    drawn = (tmp_path / "out" / "scale.svg").read_text()
    assert f"{kind.capitalize()} scaling" in drawn
    assert all(name in drawn for name in ("measured", "measured, cores shared", "ideal", "processes"))
    said = scale.table(kind, [scale.Point(**point) for point in points.values()]).splitlines()
    assert [line.split()[0] for line in said[2:5]] == ["1", "2", "4*"]
    assert said[-1].startswith("* more processes than this machine's 2 cores")


def test_keys_of_accounts_are_kept_nowhere(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling trains a changed file: that has the key, where nobody else reads, and what stays has not."""
    kept, train = [], subprocess_runs.train

    def look(file: Path, processes: int, directory: Path, **more: Any) -> None:
        kept.append(json.loads((directory / "file.json").read_text()))
        assert file.parent.stat().st_mode & 0o077 == 0
        train(file, processes, directory, **more)

    monkeypatch.setattr(subprocess_runs, "train", look)
    path, out = write(tmp_path, "file", comet={"api_key": "the-key"}), tmp_path / "out"
    words = ["-np", "1", "--kinds", "weak", "--out", str(out)]
    assert main(["scale", "--config", str(path), *words]) == 0
    assert [content["comet"] for *_, content in trained] == [{"api_key": "the-key"}]
    assert [content["comet"] for content in kept] == [{}]


def test_a_training_that_fails_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "broken", optimizer={"type": "nonsense"})
    with pytest.raises(TrainingError, match="exit code 2"):
        subprocess_runs.train(path, 1, tmp_path / "run")
    assert "optimizer" in (tmp_path / "run" / "log.txt").read_text()


def test_a_verdict_tells_rounding_from_another_training() -> None:
    curves = [{1: 2.0, 10: 1.0, 100: 0.5}, {1: 2.0, 10: 1.0 + 1e-7, 100: 0.6}, {1: 2.0, 10: 1.01, 100: 0.5}]
    rounded, other = compare.verdicts(["a", "b", "c"], curves, None, in_16_bits=False)
    assert rounded == (
        "b: the same training as a: up to step 10 the losses differ by 1.0e-07, as rounding does (up to 1e-05)"
    )
    assert (
        other
        == "c: not the same training as a: at step 10 the losses differ by 1.0e-02, which is more than rounding (up to 1e-05)"
    )
    (noisy,) = compare.verdicts(["a", "c"], [curves[0], curves[2]], 0.005, in_16_bits=False)
    assert noisy.startswith("c: the same training as a: ")
    assert noisy.endswith("(up to 1e-02)")  # three times the noise, rounded
    (coarse,) = compare.verdicts(["a", "b"], [{1: 2.0}, {1: 2.001}], None, in_16_bits=True)
    assert "the same training" in coarse
    assert compare.verdicts(["a", "b"], [{1: 2.0}, {}], None, in_16_bits=False) == [
        "b: no step was logged by both runs"
    ]
