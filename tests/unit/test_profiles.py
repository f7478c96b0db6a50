"""What traces a training and marks output. ``tests/engines/test_loggers.py`` has real runs with all of it."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dsframe
from dsframe.errors import StoppedError
from dsframe.tasks import Task
from dsframe.tools.check import main as check
from tests.files import ds_config, write_json
from tests.processes import REPOSITORY, run_program

FILE = ds_config(4, steps=4)


def test_a_rank_that_is_not_there_is_found_before_anything_starts(tmp_path, capsys):
    file = write_json(tmp_path / "file.json", {"train_batch_size": 4, "dsframe": {"profile": {"ranks": [0, 2]}}})
    assert check([str(file), "-np", "2"]) == 2
    assert "no rank 2 among 2 processes" in capsys.readouterr().out


def test_what_watched_a_run_is_kept_where_a_signal_stops_it(here, capsys):
    signals = [signal.SIGTERM]

    def loss(outputs, targets):
        if signals:
            signal.raise_signal(signals.pop())
        return (outputs - targets).square().mean()

    rows = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    task = Task.from_module(lambda: nn.Linear(2, 1), loss, rows)
    settings = {"engine": "single", "steps": 4, "run_dir": "run", "profile": {"wait": 0, "warmup": 0, "active": 3}}
    file = {
        **FILE,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "dsframe": settings,
    }

    def kept():
        return {path.name for path in Path("run/profile").glob("*.gz")}

    with pytest.raises(StoppedError):
        dsframe.fit(task, file)
    assert kept() == {"rank0-steps-1-1.trace.json.gz"}
    assert "traces are in" in capsys.readouterr().err
    dsframe.fit(task, file, resume="auto")
    assert kept() == {"rank0-steps-1-1.trace.json.gz", "rank0-steps-2-4.trace.json.gz"}


PROGRAM = """
import os, sys
from dsframe.run_dir.output import marked
from dsframe.cluster.world import World
print("before")
with marked(World(3, 4, 3, 4, launcher=sys.argv[1])):
    print("one\\ntwo", end=" ")
    print("[rank 3] marked already", file=sys.stderr)
    os.write(2, b"native\\n")
print("after")
"""
MARKED = "before\n[rank 3] one\n[rank 3] two \nafter\n"
PLAIN = "before\none\ntwo after\n"


@pytest.mark.parametrize(
    ("launcher", "out"),
    [("torchrun", MARKED), ("horovodrun", PLAIN)],
)
def test_what_other_ranks_print_says_whose_it_is(launcher, out):
    command = [sys.executable, "-c", PROGRAM, launcher]
    done = run_program(command, cwd=REPOSITORY)
    assert done.stdout == out
    assert set(done.stderr.splitlines()) == {"[rank 3] marked already", "native"}
