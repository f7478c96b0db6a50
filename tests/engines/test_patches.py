"""Each patch of DeepSpeed: the fault is there without it, and dsframe patches DeepSpeed in one file only."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from pathlib import Path

import pytest

from dsframe.engines.deepspeed import versions
from dsframe.errors import EngineError
from tests.engines import unpatched
from tests.processes import REPOSITORY, run_ranks, torchrun


@pytest.fixture(scope="module")
def findings() -> dict[str, str]:
    command = torchrun(2, ["-m", "tests.engines.unpatched"])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    output = run_ranks(command, timeout_seconds=200, env=environment).check().stdout
    line = next(line for line in output.splitlines() if line.startswith('{"mlflow"'))
    found: dict[str, str] = json.loads(line)
    return found


@pytest.mark.parametrize("name", [check.__name__ for check in (*unpatched.EARLY, *unpatched.LATER)])
def test_the_fault_is_there_without_the_patch(name: str, findings: dict[str, str]) -> None:
    assert findings[name] == ""


def test_the_reports_for_deepspeed_show_their_faults(tmp_path: Path) -> None:
    """With DeepSpeed alone, but for an op that it would compile first. In one process: its import takes long."""
    runner = ["import runpy", "from dsframe.engines.deepspeed import patches", "patches.leave_out_shm_comm()"]
    expected = []
    for report in sorted((REPOSITORY / "docs" / "upstream").glob("*.md")):
        text = report.read_text()
        (tmp_path / f"{report.stem}.py").write_text(text.partition("```python\n")[2].partition("```")[0])
        runner.append(f"runpy.run_path('{report.stem}.py')")
        expected += re.findall(r"`([^`]*)`", text.partition("It prints ")[2].partition("\n\n")[0])
    (tmp_path / "all.py").write_text("\n".join(runner))
    output = run_ranks(torchrun(1, ["all.py"]), timeout_seconds=150, cwd=tmp_path).check().stdout
    assert len(expected) >= 4
    assert all(line in output for line in expected), output
    assert "gradient: 0.0\n" not in output


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.19.9")
    with pytest.raises(EngineError, match=r"DeepSpeed 0\.19\.9 was not found to train .*; install deepspeed==0\.19\.8"):
        versions.check()
