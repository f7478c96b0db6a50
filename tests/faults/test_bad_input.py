"""What a user sees who makes a mistake: one message that names the place and the remedy, and a non-zero exit code."""

import socket

from tests.faults.environments import environment_without
from tests.processes import deepspeed, forked, horovodrun, python, run_ranks

TRAIN = ["-m", "dsframe.train", "--set", "dsframe.steps=2"]
SYNTHETIC = ["--set", "dsframe.task.dataset=synthetic", "--set", "dsframe.task.samples=256"]


def train(folder, *arguments, **variables):
    return run_ranks(python([*TRAIN, *arguments]), cwd=folder, timeout_seconds=120, env=variables)


def said(finished):
    """The one message of a refused run."""
    assert "Traceback" not in finished.output, str(finished)
    assert finished.stdout == ""
    return finished.stderr.removeprefix("dsframe: error: ").rstrip("\n")


def test_a_wrong_file_is_one_line(tmp_path):
    (tmp_path / "my.json").write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}')
    finished = train(tmp_path, "--config", "my.json")
    assert said(finished).startswith("my.json:1:25: error: zero_optimisation: unknown key;")
    assert finished.returncode == 2


def test_world_size_that_does_not_divide_the_batch_is_said_once(tmp_path):
    command = forked(horovodrun, 3, [*TRAIN, "--config", "zero1.json"])
    finished = run_ranks(command, cwd=tmp_path, timeout_seconds=120)
    message = "train_batch_size: 128 is not divisible by 3 (data-parallel ranks); write 126 or 129"
    assert finished.output.count(message) == 1, str(finished)
    assert finished.returncode in (1, 2)  # mpirun under horovodrun passes the code on


def test_data_folder_missing(tmp_path):
    folder = tmp_path / "nothing"
    finished = train(tmp_path, "--config", "single.json", "--set", f"dsframe.task.data_dir={folder}")
    assert said(finished) == (
        f"fashion-mnist: not complete in {folder}, {folder}/FashionMNIST/raw, {folder}/fashion-mnist; "
        f'run "python -m dsframe.data.fetch fashion-mnist --to {folder}" [data]'
    )
    assert finished.returncode == 6


def test_a_port_that_another_job_has(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = forked(deepspeed, 2, [*TRAIN, "--config", "zero1.json"], port=port)
        finished = run_ranks(command, cwd=tmp_path, timeout_seconds=90)
    message = f"dsframe: error: port {port} on 127.0.0.1 is in use, perhaps by another job; choose another: "
    assert finished.output.count(message) == 1, str(finished)
    assert finished.returncode == 3


def test_without_deepspeed(tmp_path):
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
