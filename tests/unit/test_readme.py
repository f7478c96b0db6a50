"""The README's example and the page on callbacks run, links lead somewhere, generated pages are up to date."""

import json
import runpy

import pytest

from tests.files import ds_config
from tests.lines import HeldOut
from tests.processes import REPOSITORY, run_ranks, warm
from tests.unit.test_site import texts


def test_generated_pages_are_up_to_date():
    for path, text in runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run make docs"


def test_the_example_has_twelve_lines_and_trains(tmp_path):
    code = texts(REPOSITORY / "README.md", "python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    (tmp_path / "circles.py").write_text(code)
    command = warm(2, ["circles.py", "--config", "zero3.json", "--run-dir", "run", "--set", "dsframe.steps=20"])
    assert "20 steps in" in run_ranks(command, cwd=tmp_path, timeout_seconds=150).check().stderr


def test_the_example_of_hooks_runs(tmp_path):
    (tmp_path / "line.py").write_text(texts(REPOSITORY / "docs" / "how_to" / "callbacks.md", "python")[0])
    output = run_ranks(warm(1, ["line.py"]), cwd=tmp_path, timeout_seconds=150).check().output
    assert "step 10 of 200: " in output
    assert "loss is not better in 2 evaluation(s); the best was " in output
    (trace,) = (tmp_path / "line" / "profile").glob("rank0.*.pt.trace.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if name.startswith("ProfilerStep#")} == {
        f"ProfilerStep#{step}" for step in (2, 3, 4)
    }


def test_the_search_with_optuna_runs(here):
    """One process a trial, in this one."""
    pytest.importorskip("optuna")
    code = texts(REPOSITORY / "docs" / "runs.md", "python")[0]
    file = ds_config(8, "SGD", 0.1, engine="single", steps=2, order="sequential")
    ran = {"task": HeldOut(), "file": file}
    exec(compile(code, "runs.md", "exec"), ran)
    assert len(ran["study"].trials) == 2
    assert {path.name for path in (here / "search").iterdir()} == {"0", "1"}
