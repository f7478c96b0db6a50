"""The door: the README's lines, typed in a fresh clone and a fresh environment; every Python that is declared has its row."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import versions
from tests.processes import REPOSITORY, run_ranks

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def typed():
    """The lines of the README's install part."""
    section = README.split("## Install")[1].split("\n## ")[0]
    return re.findall(r"^    (\S.*)$", section, re.MULTILINE)


def fresh_shell(line, folder, python, timeout_seconds, **others):
    """Types a line in a shell that has the system's PATH, and compiled Horovod wheels of this machine; trainings are short."""
    env = {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.defpath}",
        "PYTHON": python,
        "ARGS": "--set dsframe.steps=20",
        "DSFRAME_APT": "0",
        "MAKEFLAGS": "",  # of the make that runs the tests
        "MAKELEVEL": "",
        "VIRTUAL_ENV": "",
        "PYTHONPATH": "",
    }
    return run_ranks(["bash", "-euc", line], cwd=folder, env=env | others, timeout_seconds=timeout_seconds)


def another_python():
    """Another interpreter than that of the tests for which the package index has the same build of torch; else the same."""
    here = ".".join(map(str, sys.version_info[:3]))
    for found, path in versions.pythons():
        torch = f"torch=={version('torch')}"
        ask = [path, "-m", "pip", "install", "--dry-run", "--target", "never-made", "--no-deps", torch]
        if found != here and subprocess.run(ask, capture_output=True, check=False, timeout=120).returncode == 0:
            return path
    return sys.executable


@pytest.fixture
def clone(tmp_path):
    subprocess.run(["git", "clone", "-q", REPOSITORY, tmp_path / "clone"], check=True, timeout=60)
    return tmp_path / "clone"


def test_make_train_trains_one_file_with_two_engines(clone):
    """Without its set-up, which `make setup-test` has done for these tests; each engine by its launcher, then the comparison."""
    (clone / ".venv").symlink_to(REPOSITORY / ".venv")
    finished = fresh_shell(
        "launch/two-engines --set dsframe.steps=5 --set dsframe.eval_samples=64", clone, sys.executable, 300
    ).check()
    assert re.search(r"\n(horovod|ddp): the same training as deepspeed", finished.output), finished


@pytest.mark.long
def test_make_train_in_a_fresh_clone_on_another_python(clone):
    """Set-up, both engines, the comparison; the second time there is nothing to set up. Without compiling another Horovod."""
    python = another_python()
    finished = fresh_shell(typed()[0], clone, python, 900, DSFRAME_HOROVOD="0").check()
    assert "two-engines: Horovod is not installed" in finished.output
    assert "ddp: the same training as deepspeed" in finished.output
    lines = "make setup; source launch/activate; command -v deepspeed"
    again = fresh_shell(lines, clone, python, 60, DSFRAME_HOROVOD="0").check()
    assert again.output.strip() == f"{clone}/launch/bin/deepspeed"
