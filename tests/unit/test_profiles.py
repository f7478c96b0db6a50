"""What counts operations and marks output. ``tests/engines/test_loggers.py`` has real runs with all of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsframe
from dsframe.config import load
from dsframe.errors import StoppedError
from dsframe.observe.flops import FlopsProfile
from dsframe.observe.traffic import TrafficLog
from dsframe.tasks import Task
from dsframe.tools.check import main as check
from tests.files import ds_config, read_json, write_json
from tests.processes import REPOSITORY


def profiled(model: nn.Module, inputs: torch.Tensor, **section: Any) -> tuple[FlopsProfile, str]:
    settings = load({"train_batch_size": 4, "flops_profiler": {"enabled": True, "profile_step": 0, **section}})
    said: list[str] = []
    found = FlopsProfile(settings.deepspeed.flops_profiler, 1, 6, 8, said.append)  # 6: of an earlier process
    for step in (7, 8):
        with found.around_step(step):
            model(inputs).sum().backward()
    assert said == ([] if "output_file" in section else [found.text()])
    return found, found.text()


def test_operations_of_modules_are_those_that_deepspeeds_profiler_counts(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from deepspeed.profiling.flops_profiler import get_model_profile

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(784, 10)
    )  # fmt: skip
    _, macs, _ = get_model_profile(
        model, (5, 3, 16, 16), print_profile=False, as_string=False, warm_up=0, detailed=False
    )
    capsys.readouterr()
    found, _ = profiled(model, torch.randn(5, 3, 16, 16))
    assert found.forward == 2 * macs
    # Backwards, each product is two: for its inputs (not the first's: they need no gradient) and for its weights.
    first = 2 * 5 * 8 * 7 * 7 * 27
    assert found.backward == 2 * found.forward - first


def test_what_is_computed_again_counts_in_the_backward_pass(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, inputs: torch.Tensor) -> Any:
            return checkpoint(self.inner, inputs, use_reentrant=False)

    file = tmp_path / "deep" / "flops.txt"
    found, text = profiled(Again(), torch.randn(4, 8, requires_grad=True), output_file=str(file))
    assert found.forward == 2 * 2 * 4 * 8 * 16
    assert found.backward == 2.5 * found.forward  # the second layer's output is needed by nobody
    assert file.read_text().strip() == text


FILE = ds_config(4, steps=4)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "longer than the run": ({"dsframe": {"steps": 4, "profile": {"active": 9}}}, "(1 + 1 + 9) x 1 = 11 steps, but the run"),
    "no rank": ({"dsframe": {"profile": {"ranks": []}}}, "the list is empty"),
    "a rank that is not there": ({"dsframe": {"profile": {"ranks": [0, 2]}}}, "no rank 2 among 2 processes"),
    "a step that does not come": ({**FILE, "flops_profiler": {"enabled": True, "profile_step": 4}}, "the run has only 4"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_nonsense_is_found_before_anything_starts(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, message = MISTAKES[mistake]
    file = tmp_path / "file.json"
    write_json(file, {"train_batch_size": 4} | more)
    assert check([str(file), "-np", "2"]) == 2
    assert message in capsys.readouterr().out


def test_the_logger_of_collectives_has_the_mean_of_a_step(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path, lambda line: None)
    with log.around_step(1):
        log._counter.add("all-reduce", 1000, 2)
    assert log.figures() == {"sent_bytes": 1000}
    assert log.figures() == {"sent_bytes": 0}


def test_what_watched_a_run_is_kept_where_a_signal_stops_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signals = [signal.SIGTERM]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if signals:
            signal.raise_signal(signals.pop())
        return (outputs - targets).square().mean()

    rows = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    task = Task.from_module(lambda: nn.Linear(2, 1), loss, rows)
    settings = {"engine": "single", "steps": 4, "run_dir": "run", "profile": {"wait": 0, "warmup": 0, "active": 3}}
    file = {
        **FILE,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "dsframe": settings,
    }

    def kept() -> set[str]:
        return {path.name for path in Path("run/profile").glob("*.gz")}

    with pytest.raises(StoppedError):
        dsframe.fit(task, file)
    assert kept() == {"rank0-steps-1-1.trace.json.gz"}
    assert read_json(Path("run/communication.json"))["steps"] == 1
    assert "traces are in" in capsys.readouterr().err
    dsframe.fit(task, file, resume="auto")
    assert kept() == {"rank0-steps-1-1.trace.json.gz", "rank0-steps-2-4.trace.json.gz"}
    assert "no flops profile: it would be of step 5, and the run ends after step 4" in capsys.readouterr().err


PROGRAM = """
import os, sys
from dsframe.run_dir.output import rank_output
from dsframe.cluster.world import World
print("before")
with rank_output(World(3, 4, 3, 4, launcher=sys.argv[2]), sys.argv[1]):
    print("one\\ntwo", end=" ")
    print("[rank 3] marked already", file=sys.stderr)
    os.write(2, b"native\\n")
print("after")
"""
MARKED = "before\n[rank 3] one\n[rank 3] two \nafter\n"
PLAIN = "before\none\ntwo after\n"


@pytest.mark.parametrize(
    ("how", "launcher", "out"),
    [("prefix", "torchrun", MARKED), ("prefix", "horovodrun", PLAIN), ("plain", "deepspeed", PLAIN)],
)
def test_what_other_ranks_print_says_whose_it_is(how: str, launcher: str, out: str) -> None:
    command = [sys.executable, "-c", PROGRAM, how, launcher]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY)
    assert done.stdout == out
    assert set(done.stderr.splitlines()) == {"[rank 3] marked already", "native"}


def test_what_the_file_does_not_switch_on_is_not_imported() -> None:
    """Each observer is a module of its own: a plain run pays for none of them."""
    look = (
        "import sys; from types import SimpleNamespace as N; import dsframe.job; "
        "from dsframe.config import load; from dsframe.observe.observer import Observers, ObserverContext; "
        "Observers(ObserverContext(N(config=load({'train_batch_size': 4})), 0, 1, print)); "
        "print([name for name in sys.modules if name.startswith('dsframe.observe.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "['dsframe.observe.observer']"
