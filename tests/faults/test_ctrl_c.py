"""Ctrl-C saves and says how to go on; a second one ends at once."""

import signal
import subprocess
import time

import pytest

from tests.cluster import jobs
from tests.processes import environment, python

LONG = pytest.mark.long
COMMANDS = [
    pytest.param(["-m", "dsframe.train", "--engine", "single"], id="one process"),
    pytest.param(["-m", "dsframe.cli", "launch", "-np", "2", "--engine", "ddp"], id="torchrun"),
    pytest.param(["-m", "dsframe.cli", "launch", "-np", "2", "--engine", "deepspeed"], id="deepspeed", marks=LONG),
    pytest.param(["-m", "dsframe.cli", "launch", "-np", "2", "--engine", "horovod"], id="horovodrun", marks=LONG),
]
NOTE = "note: stopping at the end of a step, then saving; Ctrl-C again ends at once, without saving"


def interrupted(words, folder, *, times, step_seconds):
    """The exit code and the lines of a training that gets so many SIGINTs, a second apart."""
    jobs.write(folder, steps=500, task={"name": "tests.faults.slow_task:SlowTask"}, run_dir="run")
    command = python([*words, "--config", "small.json"])
    variables = environment("", {"STEP_SECONDS": step_seconds})
    lines = []
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=-1, stderr=-2, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("step   2/"):
                time.sleep(0.2)  # into the next step
                process.send_signal(signal.SIGINT)
                if times > 1:
                    time.sleep(1.0)
                    process.send_signal(signal.SIGINT)
    return process.returncode, lines


@pytest.mark.parametrize("words", COMMANDS)
def test_it_saves_and_says_how_to_go_on(words, tmp_path):
    code, lines = interrupted(words, tmp_path, times=1, step_seconds="0.05")
    assert code == 75, "\n".join(lines)
    assert f"dsframe: {NOTE}" in lines
    assert lines[-1].startswith("dsframe: note: stopped after step ")
    assert lines[-1].endswith("; continue with --resume auto [stopped]")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("words", COMMANDS)
def test_a_second_one_ends_at_once(words, tmp_path):
    began = time.monotonic()
    code, lines = interrupted(words, tmp_path, times=2, step_seconds="3")
    assert code in (130, 128 + signal.SIGUSR1, 1), "\n".join(lines)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    assert time.monotonic() - began < 60
