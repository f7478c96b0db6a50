"""What a model keeps in attributes of its modules: said, or refused at a resume, where its loss depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dsframe
from dsframe.errors import TaskError
from dsframe.tools.compare import losses
from tests.engines.foreign_tasks import Remembers


def fit(folder: Path, what: str, steps: int, **more: Any) -> None:
    file = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "dsframe": {
            "engine": "single",
            "steps": steps,
            "order": "sequential",
            "log_every_steps": 1,
            "run_dir": str(folder),
        },
    }
    dsframe.fit(Remembers(what=what), file, **more)


@pytest.mark.parametrize(
    ("what", "names"),
    [("carried", "carried"), ("mean", "mean"), ("queue", "queue"), ("calls", "calls"), ("nothing", "")],
)
def test_a_state_is_said_and_a_resume_refused(
    what: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, what, 2)
    said = "from one forward pass to the next, and its loss depends on that"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if said in line] or [""]
    assert line == (f"dsframe: this model keeps {names} {said}; no checkpoint has it" if names else "")
    if not names:
        fit(tmp_path, what, 4, resume="auto")
        return
    with pytest.raises(TaskError, match=f"{names}.* {said}: a resumed run would begin with another"):
        fit(tmp_path, what, 4, resume="auto")


def test_the_look_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "a", "queue", 3)
    monkeypatch.setattr("dsframe.training.module_state.ModuleState._needed", lambda *_: set())
    fit(tmp_path / "b", "queue", 3)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
