"""Processes come and go under a launcher that lets them: the same training goes on, on one, two or three of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil

from dsframe.run_dir.record import read_metrics, read_summary
from tests.processes import Running, environment, free_port, python, run_ranks

STEPS = 100
TRAIN = ["-m", "dsframe.train", "--config", "long.json", "--run-dir"]
SLOWLY, AT_ONCE = {"STEP_SECONDS": "0.1"}, {"STEP_SECONDS": "0"}


def write(directory: Path) -> None:
    document = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "dsframe": {
            "task": {"name": "tests.faults.slow_task:SlowTask"},
            "steps": STEPS,
            "log_every_steps": 1,
            "checkpoints": {"every_steps": 10, "asynchronous": True},
            "horovod": {"commit_every_steps": 5},
        },
    }
    (directory / "long.json").write_text(json.dumps(document))


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run) if "loss" in record}


def check_undisturbed(directory: Path) -> None:
    """Every step's loss in ``run`` is that of one process which nobody disturbed."""
    run_ranks(python([*TRAIN, "one", "--engine", "single"]), cwd=directory, env=AT_ONCE, timeout_seconds=90).check()
    expected, found = losses(directory / "one"), losses(directory / "run")
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


def test_horovod_trains_on_in_place(tmp_path: Path) -> None:
    """Rank 0 is killed: the other one goes on alone, in the same process. Then its host has three slots: two more join, though
    three cannot share the batch."""
    write(tmp_path)
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    stayed: list[psutil.Process] = []

    def disturb(running: Running) -> None:
        running.wait_for(lambda: "step  12/" in running.output, timeout_seconds=90, what="some steps")
        ranks = running.ranks()
        stayed.append(ranks[1])
        own_host = ranks[1].environ()["HOROVOD_HOSTNAME"]
        ranks[0].kill()
        running.wait_for(lambda: "memory, with 1 rank(s)" in running.output, timeout_seconds=60, what="one to go on")
        running.wait_for(lambda: "step  20/" in running.output, timeout_seconds=60, what="some steps of one")
        hosts.write_text(f"{own_host}:3\n")
        running.wait_for(lambda: "memory, with 3 rank(s)" in running.output, timeout_seconds=90, what="others to join")
        assert stayed[0].is_running()

    elastic = ["--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script), "--network-interfaces", "lo"]
    command = ["horovodrun", "-np", "2", *elastic, "python", *TRAIN, "run", "--engine", "horovod"]
    finished = run_ranks(command, cwd=tmp_path, env=SLOWLY, timeout_seconds=240, while_running=disturb).check()
    assert "going on after step 10 from memory" in finished.output, finished
    assert (
        "3 processes cannot divide a batch of 8: 2 train, 1 stay in step but contribute no gradients" in finished.output
    )
    assert read_summary(tmp_path / "run")["world_size"] == 3
    check_undisturbed(tmp_path)


def test_torchrun_goes_on_with_more_and_with_fewer_nodes(tmp_path: Path) -> None:
    """torchrun starts all workers again when one is lost, when a node comes and when one goes: from the newest checkpoint."""
    write(tmp_path)
    meeting = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=run")
    patience = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
    node = ["torchrun", "--nnodes=1:2", "--nproc-per-node=1", *meeting, "--local-addr=127.0.0.1", patience]
    node += ["--max-restarts=3", *TRAIN, "run", "--engine", "ddp", "--resume", "auto"]
    # Without it a node that comes later waits for an address that nobody writes (torch 2.13, elastic/rendezvous/api.py).
    variables = {**SLOWLY, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def disturb(running: Running) -> None:
        running.wait_for(lambda: "step-00000010" in running.output, timeout_seconds=90, what="the first checkpoint")
        (tmp_path / "wait").touch()
        running.ranks()[0].kill()
        running.wait_for(lambda: "going on after" in running.output, timeout_seconds=90, what="its second start")
        with (tmp_path / "second").open("wb") as log:
            marked = environment(running.mark, variables)
            second = psutil.Popen(node, cwd=tmp_path, env=marked, stdout=log, stderr=subprocess.STDOUT)
        try:
            running.wait_for(lambda: "2 x cpu under torchrun" in running.output, timeout_seconds=90, what="two nodes")
            (tmp_path / "wait").unlink()
            shown = running.output.count("step ")
            running.wait_for(lambda: running.output.count("step ") > shown + 3, timeout_seconds=90, what="their steps")
        finally:
            for process in (*second.children(recursive=True), second):
                process.kill()
            second.wait(10)

    finished = run_ranks(node, cwd=tmp_path, env=variables, timeout_seconds=240, while_running=disturb).check()
    assert finished.output.count("1 x cpu under torchrun") == 3, finished
    assert finished.output.count("2 x cpu under torchrun") == 1, finished
    assert "by SIGTERM; go on with --resume auto" in finished.output, "one node saves before it makes way for two"
    check_undisturbed(tmp_path)
