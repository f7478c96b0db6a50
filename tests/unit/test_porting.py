"""The page on moving a script: its programs run, and its files are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dsframe.config import load
from tests.processes import REPOSITORY

PAGE = (REPOSITORY / "docs" / "porting.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_its_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "porting"}
    for block in blocks("python"):
        exec(compile(block, "docs/porting.md", "exec"), names)
    assert names["summary"].steps == 20
    task = names["Balanced"]()
    assert len(task.order(0, 64)) == 64
    file = names["file"] | {"dsframe": {"engine": "single", "steps": 1, "run_dir": "groups"}}
    assert names["dsframe"].fit(names["NoDecay"](), file).steps == 1
    assert names["Measured"]().finalize({"loss": names["dsframe"].Sum(torch.tensor(8.0), 2)}) == {
        "loss": 4.0,
        "rmse": 2.0,
    }


@pytest.mark.parametrize("block", blocks("json"))
def test_its_files_are_right(block: str) -> None:
    assert load(json.loads(block)).problems == ()
