"""Processes that do not come together, or are not alike: every one of them says which and why."""

import json
import shlex

import pytest

from tests.cluster import jobs
from tests.files import ds_config, write_json
from tests.processes import free_port, run_ranks, torchrun, warm

ALL = "for pid in $pids; do wait $pid || code=$?; done"
FIRST = "wait -n; code=$?; kill $pids; wait"
"""How the shell ends: when every rank has left, or the others with the first, as launchers do."""


def ranks(numbers, size, changes, ends=ALL):
    """A shell that starts these of ``size`` ranks as torchrun would; ``changes`` are options of some of them."""
    port = free_port()
    lines = []
    for rank in numbers:
        place = f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank} LOCAL_WORLD_SIZE={size}"
        options = f"--config small.json --run-dir run --engine ddp {changes.get(rank, '')}"
        command = shlex.join(warm(1, ["-m", "dsframe.train", *shlex.split(options)]))
        lines.append(f"{place} MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {command} &")
        lines.append('pids="$pids $!"')
    return ["bash", "-c", "\n".join([*lines, ends, "exit $code"])]


def test_a_rank_that_never_arrives(tmp_path):
    jobs.write(tmp_path)
    finished = run_ranks(ranks((0, 2), 4, {}), cwd=tmp_path, env={"DSFRAME_MEETING_SECONDS": "3"}, timeout_seconds=90)
    assert finished.returncode == 3, finished
    assert finished.stderr.count("ranks 1, 3 of 4 did not arrive within 3 s; did the launcher start") == 2


OTHERS = {
    f"--set {shlex.quote('dsframe.task.samples=299')}": "training samples is 299 on rank 1 and 300 on rank 0",
    "--engine horovod": "engine is horovod on rank 1 and ddp on rank 0",
    f"--engine deepspeed --set {shlex.quote('zero_optimization.stage=3')}": "engine is deepspeed on rank 1",
    "--resume auto": "--resume is auto on rank 1 and never on rank 0",
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_rank_that_was_told_something_else(other, tmp_path):
    """Before any library starts: ranks with other engines waited for each other, or aborted."""
    jobs.write(tmp_path)
    finished = run_ranks(ranks((0, 1), 2, {1: other}, FIRST), cwd=tmp_path, timeout_seconds=90)
    assert finished.returncode == 3, finished
    assert "the processes of this run differ: " in finished.stderr
    assert OTHERS[other] in finished.stderr
    assert "Traceback" not in finished.output


def test_a_rank_that_hangs_while_it_is_set_up_is_named(tmp_path):
    jobs.write(tmp_path)
    task = shlex.quote('dsframe.task={"name": "tests.faults.broken_task:BrokenTask"}')
    options = f"--set {task} --set dsframe.hang_timeout_seconds=1"
    started = ranks((0, 1), 2, {0: options, 1: options})
    finished = run_ranks(started, cwd=tmp_path, env={"FAULT": "build"}, timeout_seconds=90)
    assert finished.returncode == 9, finished
    assert "the run hangs before its first step, while it is set up: no progress for" in finished.stderr
    assert "rank 0 waits in " in finished.stderr
    assert "rank 1 IS MISSING there: it is in model, broken_task.py:" in finished.stderr


STAGE_1 = {"zero_optimization": {"stage": 1}}
ENGINES = {"ddp": {}, "horovod": {}, "deepspeed": STAGE_1, "fsdp": {}}


def differing(folder, how, engine, *, starts=False, **more):
    """Two ranks with a task that is another one on rank 1. ``starts``: as users do, with a hash seed of its own for each."""
    dsframe = {"engine": engine, "steps": 2, "task": {"name": "tests.faults.differing_task:DifferingTask"}}
    file = ds_config(8, "AdamW", 0.1, **dsframe)
    write_json(folder / "my.json", file | ENGINES[engine] | more)
    launch = torchrun if starts else warm
    command = launch(2, ["-m", "dsframe.train", "--config", "my.json", "--run-dir", "run"])
    return run_ranks(command, cwd=folder, env={"DIFFERS": how, "PYTHONHASHSEED": None}, timeout_seconds=120)


def refused(finished, code):
    """The one message."""
    assert finished.returncode != 0, finished
    assert "] Traceback" not in finished.output  # torchrun has its own
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert line.endswith(f"[{code}]")
    return line


FIRST_DIFFERENCE = {
    "shape": "parameter 1.heads.head2.weight [1, 4] float32 on rank 0; parameter 1.heads.head2.weight [2, 4] float32 on rank 1. ",
    "frozen": "1.heads.head2.weight [1, 4] float32 on rank 0; parameter 1.heads.head2.weight [1, 4] float32 frozen on rank 1",
    "more": "on rank 0; parameter 2.weight [1, 1] float32 on rank 1. ",
    "tie": "parameter 1.heads.head1.weight, which is 1.heads.head0.weight on rank 0; parameter 1.heads.head1.weight [1, 4] ",
    "buffer": "on rank 0; buffer scale [3] float32 on rank 1. ",
}


@pytest.mark.parametrize(
    ("how", "engine"),
    [
        ("shape", "horovod"),
        ("shape", "ddp"),
        ("frozen", "deepspeed"),
        ("frozen", "fsdp"),
        *((how, "ddp") for how in ("more", "tie", "buffer")),
    ],
)
def test_ranks_with_another_model_are_named(tmp_path, how, engine):
    finished = differing(tmp_path, how, engine)
    message = refused(finished, "task")
    assert "DifferingTask: the model differs between ranks. The first difference: " in message
    assert FIRST_DIFFERENCE[how] in message
    assert finished.returncode == 5


def test_names_from_a_set_are_another_model(tmp_path):
    """The optimizers of ZeRO and Horovod would take one parameter's moments for another's, in silence."""
    message = refused(differing(tmp_path, "names from a set", "ddp", starts=True), "task")
    assert "The first difference: parameter 1.heads.head" in message


def test_a_stage_with_another_model_is_named(tmp_path):
    """A pipeline's ranks hold different layers, but know all of them."""
    finished = differing(tmp_path, "frozen", "deepspeed", zero_optimization={"stage": 0}, pipeline={"stages": 2})
    assert "head2.weight [1, 4] float32 frozen on rank 1" in refused(finished, "task")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("last sample", "the training data differ between ranks: sample 63, "),
        ("types", "the training data differ between ranks: sample 0, "),
        ("evaluation sample", "the evaluation data differ between ranks: sample 63, "),
    ],
)
def test_ranks_with_other_data_are_named(how, said, tmp_path):
    message = refused(differing(tmp_path, how, "ddp"), "data")
    assert f"{said}counted from 0, is another one on rank 1 than on rank 0" in message
    assert ("torch.int64" in message) == (how == "types")


def test_samples_that_are_drawn_anew_at_each_reading_are_no_difference(tmp_path):
    assert "2 steps in" in differing(tmp_path, "augmented", "ddp").check().stderr
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000002/manifest.json").read_bytes())["manifest"]
    assert manifest["data"] == {}
