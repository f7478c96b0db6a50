"""Ranks that call other modules than each other, on engines that gather weights when a module is called: named, and soon."""

import re

import pytest

from dsframe.checkpoint.store import Store
from tests import portability
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

LONG = pytest.mark.long
ZERO = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
KEPT = {"zero_optimization": {"stage": 3}}
FILES = {
    "gathered": ZERO,
    "kept": KEPT,
    "fsdp": {"dsframe": {"engine": "fsdp", "fsdp": {"wrap": ["Linear"]}}},
    "ddp": {"dsframe": {"engine": "ddp"}},
}


def trained(folder, kind, how, begins=1, **more):
    extra = dict(FILES[kind])
    dsframe = {
        "engine": "deepspeed",
        "steps": 6,
        "hang_timeout_seconds": 6,
        "log_every_steps": 1,
        "checkpoints": {"every_steps": 1},
        "task": {"name": "tests.faults.branching_task:BranchingTask"},
        **extra.pop("dsframe", {}),
        **more,
    }
    file = ds_config(8, "AdamW", 0.01, sections=extra, **dsframe)
    write_json(folder / "my.json", file)
    command = warm(2, ["-m", "dsframe.train", "--config", "my.json", "--run-dir", "run"])
    return run_ranks(command, cwd=folder, env={"HOW": how, "FROM": str(begins)}, timeout_seconds=60)


BRANCHES = "branches.0 on rank 0; branches.1 on rank 1"
LARGE = "branches.0 on rank 0; large.0 on rank 1"
SKIPPED = "branches.0 on rank 0; last on rank 1"
UNUSED = "a gradient of branches.0.weight on rank 0; a gradient of branches.1.weight on rank 1"
CASES = [
    pytest.param("gathered", "sizes", 4, LARGE, id="gathered sizes"),
    pytest.param("kept", "unused", 1, UNUSED, id="kept unused"),
    pytest.param("fsdp", "skips", 4, SKIPPED, id="fsdp skips"),
    pytest.param("fsdp", "evaluation", 6, BRANCHES, marks=LONG),
]


@pytest.mark.parametrize(("kind", "how", "begins", "first"), CASES)
def test_ranks_that_call_other_modules_are_named(kind, how, begins, first, tmp_path):
    """Before a step of which they do is saved."""
    finished = trained(tmp_path, kind, how, begins)
    assert finished.returncode == 5, finished
    assert (
        f"BranchingTask: ranks call different modules of the model. The first difference: {first}. " in finished.stderr
    )
    assert "Traceback" not in finished.output
    saved = [path.name for path in Store(tmp_path / "run" / "checkpoints").newest_first()]
    assert (saved[:1] or ["step-00000000"]) == [f"step-{begins - (how != 'evaluation'):08}"]


def test_ranks_may_call_other_modules_in_an_evaluation_that_gathers_nothing(tmp_path):
    """From the first update on ZeRO-3 keeps all weights of a small model gathered. Comparing calls took 6 % of an evaluation."""
    trained(tmp_path, "kept", "evaluation", 6).check()


@LONG
def test_ranks_whose_losses_depend_on_other_modules_later_on(tmp_path):
    """They call the same ones, and wait in their backward passes."""
    finished = trained(tmp_path, "gathered", "unused", 4)
    assert finished.returncode == 9, finished
    assert "the run hangs in step 4: no progress for" in finished.stderr
    assert len(re.findall(r"^  rank \d (?:waits|IS MISSING)", finished.stderr, re.MULTILINE)) == 2


def test_all_ranks_may_call_others_in_each_step(tmp_path):
    """A layer that had a gradient in the step before has a zero one now: ZeRO-3 by itself takes the earlier one again."""
    losses = {}
    for kind in FILES:
        (tmp_path / kind).mkdir()
        trained(tmp_path / kind, kind, "changing").check()
        losses[kind] = portability.losses(tmp_path / kind / "run")
    for kind, found in losses.items():
        assert found == pytest.approx(losses["ddp"], abs=1e-5), kind
