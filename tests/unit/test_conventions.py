"""Files that other programs read: their form, and that what they name is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dsframe
from tests.processes import REPOSITORY

WORKFLOWS = [
    *sorted((REPOSITORY / ".github").rglob("*.yml")),
    REPOSITORY / "action.yml",
    REPOSITORY / ".pre-commit-hooks.yaml",
]
CONTAINERS = REPOSITORY / "launch" / "containers"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


@pytest.mark.parametrize("path", [*WORKFLOWS, REPOSITORY / "CITATION.cff"], ids=lambda path: path.name)
def test_yaml_can_be_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_citation_is_of_this_version() -> None:
    found = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "title", "message", "authors", "version", "date-released"} <= set(found)
    assert found["version"] == dsframe.__version__
    assert f"## {found['version']} ({found['date-released']})" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_every_release_has_its_date() -> None:
    heads = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert len(heads) > 2
    assert all(re.match(r"\d+\.\d+\.\d+ \(\d{4}-\d{2}-\d{2}\)", head) for head in heads[1:])


def test_the_action_and_the_hook_start_what_there_is() -> None:
    action = yaml.safe_load((REPOSITORY / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert all(step.get("shell") == "bash" for step in steps if "run" in step), "a composite action needs it"
    for step in steps:
        if "run" in step:
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True, timeout=30)
    assert all("${{" not in step["run"] for step in steps if "run" in step), "an input in a script is code of others"
    (hook,) = yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
    entry = REPOSITORY / hook["entry"]
    assert entry.stat().st_mode & 0o100
    subprocess.run(["bash", "-n", entry], check=True, timeout=30)
    files = re.compile(hook["files"])
    assert files.search("ds_config.json")
    assert files.search("configs/deepspeed_zero3.json")
    assert not files.search("package.json")


def test_workflows_run_what_there_is() -> None:
    jobs = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in runs
    for run in runs:
        subprocess.run(["bash", "-n", "-c", run], check=True, timeout=30)
    assert any("./check" in run for run in runs)


def dockerfile() -> list[tuple[str, str]]:
    """Each instruction with its words, continuation lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (CONTAINERS / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_a_dockerfile_copies_what_there_is() -> None:
    instructions = dockerfile()
    assert {name for name, _ in instructions} <= INSTRUCTIONS
    assert [name for name, _ in instructions][:2] == ["ARG", "FROM"]
    for name, words in instructions:
        if name == "COPY":
            *sources, _ = words.split()
            assert all((REPOSITORY / source).exists() for source in sources), words
        elif name == "RUN":
            subprocess.run(["bash", "-n", "-c", words], check=True, timeout=30)
        elif name == "CMD":
            assert json.loads(words) == ["dsframe", "doctor"]
    needed = {
        "dsframe",
        "ds_configs",
        "launch/bin",
        "launch/readme.py",
        "launch/horovod.cmake",
        "examples",
    }  # what the wheel is made of
    assert needed <= {source for name, words in instructions if name == "COPY" for source in words.split()[:-1]}


def test_an_apptainer_definition_has_its_sections() -> None:
    text = (CONTAINERS / "dsframe.def").read_text()
    head, *sections = re.split(r"^%(\w+)", text, flags=re.MULTILINE)
    assert "Bootstrap: docker\nFrom: " in head
    named = dict(zip(sections[::2], sections[1::2], strict=True))
    assert set(named) == {"files", "post", "environment", "runscript", "test"}
    for line in named["files"].split("\n"):
        if line.strip():
            assert (REPOSITORY / shlex.split(line)[0]).exists(), line
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n", "-c", named[name]], check=True, timeout=30)


@pytest.mark.parametrize("name", ["Dockerfile", "dsframe.def"])
def test_a_container_finds_the_launchers(name: str) -> None:
    (program,) = re.findall(r"python -c '([^']+)'", (CONTAINERS / name).read_text())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert Path(done.stdout.strip()) == REPOSITORY / "launch" / "bin"


def test_a_devcontainer_is_json() -> None:
    found = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())
    assert found["postCreateCommand"] == "make setup-test"
    schema = found["customizations"]["vscode"]["settings"]["json.schemas"][0]["url"]
    assert (REPOSITORY / schema).exists()


def test_the_oldest_python_is_the_same_everywhere() -> None:
    for project in ("pyproject.toml", "check/pyproject.toml"):
        assert 'requires-python = ">=3.10"' in (REPOSITORY / project).read_text()
