"""Each patch of DeepSpeed: the fault is there without it, and dsframe patches DeepSpeed in one file only."""

import json
import os
import re

import pytest

from dsframe.engines.deepspeed import patches, versions
from dsframe.errors import EngineError
from tests.processes import REPOSITORY, run_ranks, torchrun


@pytest.fixture(scope="module")
def findings():
    command = torchrun(2, ["-m", "tests.engines.unpatched"])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    output = run_ranks(command, timeout_seconds=200, env=environment).check().stdout
    line = next(line for line in output.splitlines() if line.startswith('{"mlflow"'))
    return json.loads(line)


@pytest.mark.parametrize("name", patches.PATCHES)
def test_the_fault_is_there_without_the_patch(name, findings):
    assert findings[name] == ""


def test_the_reports_for_deepspeed_show_their_faults(tmp_path):
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


def test_a_patch_whose_place_has_gone_is_named():
    with pytest.raises(EngineError) as caught:
        patches._upstream("gathers", "runtime.zero.partition_parameters", "Gone")
    version = patches.version()
    assert str(caught.value).startswith(
        f'DeepSpeed {version} has no deepspeed.runtime.zero.partition_parameters.Gone, which the patch "gathers" changes'
    )
    with pytest.raises(EngineError, match=r"has no deepspeed\.gone, which the patch \"norm\" changes"):
        patches._upstream("norm", "gone")


def test_a_release_that_nobody_tried_is_warned_of_once(capsys):
    versions.check("0.19.9", speaks=True)
    versions.check("0.19.9", speaks=False)
    said = capsys.readouterr().err
    assert said == "dsframe: warning: DeepSpeed 0.19.9 was never tested with this dsframe, which knows 0.19.8\n"
    for version in versions.HOLDS:
        versions.check(version, speaks=True)
    assert capsys.readouterr().err == ""
    assert patches.version() in versions.HOLDS


def test_what_is_called_late_is_looked_for_at_start(monkeypatch):
    monkeypatch.setitem(patches.PATCHES["groups"], "later", ["utils.groups:gone"])
    with pytest.raises(EngineError, match=r'has no deepspeed\.utils\.groups\.gone, which the patch "groups" changes'):
        patches.check_later_ones()
