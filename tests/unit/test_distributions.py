"""What is built: the wheel of dsframe holds what its commands need, and dsframe-check checks where there is no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsframe
from tests.files import read_json
from tests.processes import BIN, REPOSITORY, run_program, run_ranks

NEEDED = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions.py", "typing_inspection", "rapidfuzz")
"""All that dsframe-check may import: its two dependencies, and theirs."""


def built(source, folder):
    """Returns the wheel of ``source``, made in ``folder`` without a network."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which dsframe's wheel is installed."""
    wheel = built(REPOSITORY, tmp_path_factory.mktemp("wheel"))
    assert wheel.name == f"dsframe-{dsframe.__version__}-py3-none-any.whl"
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run(command, check=True, timeout=120)
    return folder


def shell(site, folder, line, timeout_seconds=150):
    """Runs a line as a user of the wheel types it, in a folder of theirs."""
    environment = {"PYTHONPATH": str(site), "PATH": f"{BIN}{os.pathsep}{os.defpath}"}
    return run_ranks(["bash", "-c", line], cwd=folder, env=environment, timeout_seconds=timeout_seconds)


SHORT = "--set dsframe.steps=3 --set dsframe.task.samples=256 --set dsframe.task.dataset=synthetic"


@pytest.mark.parametrize(
    "line",
    [
        "deepspeed --num_gpus=2 -m dsframe.train --config zero3.json",
        pytest.param("horovodrun -np 2 python -m dsframe.train --config zero3.json", marks=pytest.mark.long),
    ],
    ids=["deepspeed", "horovodrun"],
)
def test_the_two_lines_work_from_the_wheel(site, tmp_path, line):
    where = 'python -c "import dsframe; print(dsframe.__file__)"'
    active = 'eval "$(python -m dsframe activate)"'
    finished = shell(site, tmp_path, f"{active} && {where} && {line} {SHORT} --run-dir run").check()
    assert f"{site}/dsframe/__init__.py" in finished.stdout
    assert read_json(tmp_path / "run" / "summary.json")["world_size"] == 2


def test_the_check_by_itself_needs_no_torch(tmp_path):
    """In an environment that holds its two dependencies, and theirs, alone."""
    wheel = built(REPOSITORY / "check", tmp_path / "wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", packages, wheel]
    subprocess.run(command, check=True, timeout=120)
    import pydantic

    for name in NEEDED:
        (packages / name).symlink_to(Path(pydantic.__file__).parents[1] / name)

    def run(*arguments):
        return run_program(
            [tmp_path / "venv" / "bin" / "python", "-m", "dsframe_check", *arguments],
            cwd=tmp_path,
            env={"PATH": os.defpath},
            check=False,
        )

    assert run().returncode == 2
    (tmp_path / "wrong.json").write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}\n')
    wrong = run("wrong.json", "-np", "2")
    assert wrong.returncode == 2
    files = [str(file) for file in sorted((REPOSITORY / "ds_configs").glob("*.json")) if "schema" not in file.name]
    assert len(files) > 10
    command = [sys.executable, "-m", "dsframe", "check", *files, "-np", "2"]
    here = run_program(command, check=False)
    there = run(*files, "-np", "2")
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)
    assert json.loads(run("schema").stdout) == read_json(REPOSITORY / "ds_configs" / "dsframe.schema.json")
