"""What a user sees who makes a mistake: one message that names the place and the remedy, and a non-zero exit code."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from dsframe.engines import TABLE
from tests.faults.environments import environment_without
from tests.processes import REPOSITORY, Finished, Running, deepspeed, horovodrun, python, run_ranks, torchrun

TRAIN = ["-m", "dsframe.train", "--set", "dsframe.steps=2"]
SYNTHETIC = ["--set", "dsframe.task.dataset=synthetic", "--set", "dsframe.task.samples=256"]
*OTHERS, LAST = ["auto", *TABLE]
ENGINES = ", ".join(f'"{name}"' for name in OTHERS) + f' or "{LAST}"'
OWN_TASK = '{"name": "tests.faults.broken_task:BrokenTask"}'


def train(folder: Path, *arguments: str, **variables: str) -> Finished:
    return run_ranks(python([*TRAIN, *arguments]), cwd=folder, timeout_seconds=120, env=variables)


def said(finished: Finished) -> str:
    """The one message of a refused run."""
    assert "Traceback" not in finished.output, str(finished)
    assert finished.stdout == ""
    return finished.stderr.removeprefix("dsframe: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}',
            'my.json:1:25: error: zero_optimisation: unknown key; did you mean "zero_optimization"? [unknown-key]',
        ),
        (
            '{"train_batch_size": "8"}',
            'my.json:1:22: error: train_batch_size: "8" must be a whole number; write 8 without quotes [type]',
        ),
        (
            '{"train_batch_size": 8,\n "dsframe": {"engine": "horovodd"}}',
            'my.json:2:24: error: dsframe.engine: "horovodd" must be ' + ENGINES + '; did you mean "horovod"? [value]',
        ),
        ('{"train_batch_size": 8,', 'my.json:1:1: error: "{" is never closed; add the missing } [syntax]'),
        ("train", "my.json:1:1: error: expected a key and ':', found 'train'; check quotes and commas [syntax]"),
    ],
    ids=["unknown key", "wrong type", "unknown engine", "not closed", "not JSON"],
)
def test_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "my.json").write_text(text)
    finished = train(tmp_path, "--config", "my.json")
    assert said(finished) == message
    assert finished.returncode == 2


def test_missing_file(tmp_path: Path) -> None:
    finished = train(tmp_path, "--config", "nowhere.json")
    known = sorted(path.name for path in (REPOSITORY / "ds_configs").glob("*.json") if "schema" not in path.name)
    assert (
        said(finished)
        == f"nowhere.json: error: no such file, here or in ds_configs/; choose from {', '.join(known)} [missing-file]"
    )
    assert finished.returncode == 2


@pytest.mark.parametrize("launch", [deepspeed, horovodrun, torchrun])
def test_world_size_that_does_not_divide_the_batch_is_said_once(
    tmp_path: Path, launch: Callable[[int, list[str]], list[str]]
) -> None:
    command = launch(3, [*TRAIN, "--config", "zero1.json"])
    finished = run_ranks(command, cwd=tmp_path, timeout_seconds=120)
    message = (
        "train_batch_size: 128 is not divisible by 3 (data-parallel ranks); the nearest legal batch sizes are 126 or 129; "
        "legal numbers of data-parallel ranks near 3: 1, 2, 4, 8"
    )
    assert finished.output.count(message) == 1, str(finished)
    passed_on = {deepspeed: (2,), torchrun: (1,), horovodrun: (1, 2)}  # mpirun under horovodrun passes the code on
    assert finished.returncode in passed_on[launch]


def test_data_folder_missing(tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    finished = train(tmp_path, "--config", "single.json", "--set", f"dsframe.task.data_dir={folder}")
    assert said(finished) == (
        f"fashion-mnist: the data folder {folder} does not exist; "
        f'run "python -m dsframe.data.fetch fashion-mnist --to {folder}" [data]'
    )
    assert finished.returncode == 6


def test_data_truncated(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "t10k-images-idx3", "train-labels-idx1", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(struct.pack(">4I", 2051, 60_000, 28, 28) + bytes(999_984))
    images = raw / "train-images-idx3-ubyte"
    finished = train(tmp_path, "--config", "single.json", "--set", f"dsframe.task.data_dir={tmp_path}")
    assert said(finished) == (
        f"{images}: truncated or damaged: its header says 60000 x 28 x 28, 47,040,016 bytes, but it has 1,000,000; "
        "delete it and fetch it again [data]"
    )
    assert finished.returncode == 6


def test_batch_larger_than_the_data_set(tmp_path: Path) -> None:
    arguments = ["--set", "dsframe.task.dataset=synthetic", "--set", "dsframe.task.samples=10"]
    finished = train(tmp_path, "--config", "single.json", *arguments)
    assert said(finished).startswith(
        "one global batch takes 128 samples, but the training data set has only 10; lower train_batch_size to 10 or less"
    )
    assert finished.returncode == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Task", 'task "nowhere:Task": no module named nowhere; searched '),
        (
            "tests.faults.broken_task:Nothing",
            'task "tests.faults.broken_task:Nothing": module tests.faults.broken_task (',
        ),
        ("tests.faults.broken_task:NotATask", 'task "tests.faults.broken_task:NotATask": '),
    ],
)
def test_task_that_cannot_be_used(tmp_path: Path, name: str, message: str) -> None:
    finished = train(tmp_path, "--config", "single.json", "--set", f'dsframe.task={{"name": "{name}"}}')
    assert said(finished).startswith(message)
    assert finished.returncode == 5


def test_units_that_the_model_does_not_have(tmp_path: Path) -> None:
    finished = train(tmp_path, "--config", "fsdp.json", "--set", 'dsframe.fsdp.wrap=["Blok"]', *SYNTHETIC)
    assert (
        said(finished)
        == "fsdp.wrap: this model has no Blok; it has Sequential (4), Conv2d (3), Linear (2) [engine-unavailable]"
    )
    assert finished.returncode == 4


def test_two_jobs_on_one_port(tmp_path: Path) -> None:
    first = deepspeed(2, ["-m", "dsframe.train", "--config", "zero1.json", "--set", f"dsframe.task={OWN_TASK}"])
    port = first[2].rpartition("=")[2]
    second: list[Finished] = []

    def start_second(running: Running) -> None:
        running.wait_for(lambda: re.search(r"step +10/", running.output), timeout_seconds=90, what="it trained")
        command = deepspeed(2, [*TRAIN, "--config", "zero1.json", "--run-dir", "second"], port=int(port))
        second.append(run_ranks(command, cwd=tmp_path, timeout_seconds=90))
        running.process.terminate()

    run_ranks(
        [*first, "--set", "dsframe.steps=1000000"],
        cwd=tmp_path,
        timeout_seconds=240,
        env={"FAULT": "none"},
        while_running=start_second,
    )
    message = f"dsframe: error: port {port} on 127.0.0.1 is in use, perhaps by another job; choose another: "
    assert second[0].output.count(message) == 1, str(second[0])
    assert second[0].returncode == 3


def test_without_deepspeed(tmp_path: Path) -> None:
    path = f"{environment_without({'deepspeed'}, tmp_path / 'venv')}:/usr/bin:/bin"
    arguments = ["--config", "zero3.json", "--run-dir", "run", *SYNTHETIC]
    fallback = train(tmp_path, *arguments, PATH=path)
    assert fallback.returncode == 0, str(fallback)
    assert (
        "dsframe: deepspeed is not installed: falling back to horovod, the same training with full replicas"
        in fallback.stderr
    )
    refused = train(tmp_path, *arguments, "--set", "dsframe.fallback=error", PATH=path)
    assert said(refused) == (
        'deepspeed is not installed and the file says "fallback": "error"; '
        "pip install 'dsframe[deepspeed]' [engine-unavailable]"
    )
    assert refused.returncode == 4
    named = train(tmp_path, *arguments, "--engine", "deepspeed", PATH=path)
    assert said(named) == (
        'engine "deepspeed" needs the package deepspeed, which is not installed; '
        "pip install 'dsframe[deepspeed]' [engine-unavailable]"
    )
    assert named.returncode == 4


def test_without_deepspeed_and_horovod(tmp_path: Path) -> None:
    path = f"{environment_without({'deepspeed', 'horovod'}, tmp_path / 'venv')}:/usr/bin:/bin"
    arguments = ["--config", "zero3.json", "--run-dir", "run", *SYNTHETIC]
    fallback = run_ranks(
        torchrun(2, [*TRAIN, *arguments]), cwd=tmp_path, timeout_seconds=120, env={"PATH": path}
    ).check()
    assert (
        fallback.stderr.count(
            "dsframe: deepspeed is not installed: falling back to ddp, the same training with full replicas"
        )
        == 1
    )
    named = train(tmp_path, *arguments, "--engine", "horovod", PATH=path)
    assert said(named) == (
        'engine "horovod" needs the package horovod, which is not installed; compile it against this torch as '
        "docs/coming_from/horovod.md says (pip install horovod alone fails) [engine-unavailable]"
    )
    assert named.returncode == 4
