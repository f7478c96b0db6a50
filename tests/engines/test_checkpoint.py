"""Checkpoints with real processes, through what goes wrong: signals, damage, a full disk, another training."""

import os
import re
import signal

from dsframe.checkpoint import store
from dsframe.checkpoint.store import Store
from tests import portability


def _wait_for_step(running, run_dir, step):
    def reached():
        return (run_dir / "metrics.jsonl").exists() and len(portability.losses(run_dir)) >= step

    running.wait_for(reached, timeout_seconds=60, what=f"step {step}")


def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path):
    run_dir = tmp_path / "run"

    def ask(running):
        _wait_for_step(running, run_dir, 20)
        running.ranks()[1].send_signal(signal.SIGUSR1)

    setup = portability.SETUPS["ddp@2"]
    stopped = portability.train(setup, run_dir, steps=3000, while_running=ask)
    assert stopped.returncode == 75 or re.search(r"exitcode\s*: 75", stopped.stderr), "torchrun's own code is 1"
    assert "stopped after step" in stopped.stderr
    assert "signal to another rank" in stopped.stderr
    (saved,) = Store(run_dir / "checkpoints").newest_first()
    step = store.step_of(saved)
    assert step is not None
    assert store.verify(saved) == []
    assert max(portability.losses(run_dir)) == step
    # The schedule is longer: said.
    portability.train(setup, run_dir, "--resume", "auto", steps=step + 5, timeout_seconds=60)
    assert list(portability.losses(run_dir)) == list(range(1, step + 6))


def test_a_signal_to_every_process_saves_where_workers_read(tmp_path):
    run_dir = tmp_path / "run"

    def ask(running):
        _wait_for_step(running, run_dir, 1)
        os.killpg(running.process.pid, signal.SIGTERM)

    task = ("--set", 'dsframe.task={"name": "tests.faults.slow_task:ReadingTask"}')
    stopped = portability.train(portability.SETUPS["single@1"], run_dir, *task, steps=100_000, while_running=ask)
    assert stopped.returncode == 75, stopped
    assert "by SIGTERM; continue with --resume auto" in stopped.stderr
    assert len(list(Store(run_dir / "checkpoints").newest_first())) == 1


def test_damage_is_named_set_aside_and_the_one_before_used(tmp_path):
    setup, run_dir = portability.SETUPS["zero1@2"], tmp_path / "run"
    portability.train(setup, run_dir, "--set", "dsframe.checkpoints.every_steps=6").check()
    whole = portability.losses(run_dir)
    checkpoints = Store(run_dir / "checkpoints")
    assert [store.step_of(path) for path in checkpoints.newest_first()] == [15, 12, 6]
    part = checkpoints.path(15) / "optimizer.safetensors"
    content = bytearray(part.read_bytes())
    content[-100] ^= 4
    part.write_bytes(content)
    with (checkpoints.path(12) / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    done = portability.train(setup, run_dir, "--resume", "auto").check()
    assert "optimizer.safetensors was altered" in done.stderr
    assert "model.safetensors has 1,000 bytes instead of" in done.stderr
    assert "continuing after step 6" in done.stderr
    names = {path.name for path in checkpoints.directory.iterdir()}
    assert {"step-00000015.damaged", "step-00000012.damaged", "step-00000015", "step-00000006"} <= names
    assert portability.losses(run_dir) == whole
    # One of another version is whole: neither used nor set aside.
    newest = checkpoints.path(15)
    (newest / store.MANIFEST).write_bytes(store.dump({**store.read_manifest(newest), "format": store.FORMAT + 1}))
    refused = portability.train(setup, run_dir, "--resume", "auto")
    assert refused.returncode != 0
    assert f"{newest} has format {store.FORMAT + 1}, this dsframe reads {store.FORMAT}" in refused.stderr
    assert newest.is_dir()


def test_what_cannot_be_written_is_said_and_the_one_before_stays(tmp_path):
    """A limit on the size of files stands for a full disk."""
    setup, run_dir = portability.SETUPS["ddp@2"], tmp_path / "run"
    portability.train(
        setup,
        run_dir,
        "--set",
        "dsframe.checkpoints.at_end=false",
        "--set",
        "dsframe.checkpoints.every_steps=5",
        steps=7,
    ).check()
    (good,) = Store(run_dir / "checkpoints").newest_first()
    failed = portability.train(setup, run_dir, "--resume", "auto", limit_kilobytes=200)
    assert failed.returncode != 0
    assert "the checkpoint of step 15 cannot be written: rank 0: " in failed.stderr
    assert f"the last good one is {good}" in failed.stderr
    assert "File too large" in failed.stderr
    assert [path.name for path in good.parent.iterdir() if path.name != "latest"] == [good.name]
    assert store.verify(good) == []
