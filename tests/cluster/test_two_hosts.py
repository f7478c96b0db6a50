"""Two hosts, for real: every launcher trains the same on them as one host does, and a host that is cut off ends the job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import jobs
from tests.cluster.network import NODES, Network, missing
from tests.processes import Running, free_port, python, run_ranks

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

LAUNCH = ["python", "-m", "dsframe.cli", "launch"]
TRAIN = ["-m", "dsframe.train", "--config", "small.json", "--run-dir", "run"]
TRAINING = TRAIN[2:]
COMMANDS = {
    "horovodrun -H": ["horovodrun", "-np", "2", "-H", "node1:1,node2:1", "python", *TRAIN],
    "deepspeed --hostfile": ["deepspeed", "--hostfile", "hosts", "--master_addr", "node1", "--master_port", "PORT", *TRAIN],
    "torchrun --nnodes 2": [
        *("sh", "-c"),
        'node() { echo torchrun --nnodes 2 --node-rank $1 --nproc-per-node 1 --master-addr node1 --master-port PORT "$2"; }; '
        'ssh node2 "cd $PWD && PATH=$PATH PYTHONPATH=$PYTHONPATH OMP_NUM_THREADS=1 $(node 1 "$0")" & $(node 0 "$0") && wait',
        " ".join([*TRAIN, "--engine", "ddp"]),
    ],
    "dsframe launch --hostfile": [*LAUNCH, "--hostfile", "hosts", *TRAINING],
    "dsframe launch --engine horovod": [*LAUNCH, "-H", "node1:1,node2:1", *TRAINING, "--engine", "horovod"],
}  # fmt: skip


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network") / "here") as network:
        yield network


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected")
    jobs.write(folder)
    run_ranks(python([*TRAIN, "--engine", "single"]), cwd=folder, timeout_seconds=90).check()
    return jobs.losses(folder / "run")


LONG = {"dsframe launch --engine horovod"}
"""Which differs from the command above it in how ranks meet, and that is tested on one host too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in COMMANDS]
)
def test_the_same_losses_as_on_one_host(name: str, network: Network, expected: list[float], tmp_path: Path) -> None:
    jobs.write(tmp_path)
    (tmp_path / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES))
    port = str(free_port())
    typed = [word.replace("PORT", port) for word in COMMANDS[name]]
    finished = run_ranks(network.on("node1", typed), cwd=tmp_path, timeout_seconds=150).check()
    assert jobs.losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5), finished
    assert network.processes("node1") == network.processes("node2") == []


def test_a_host_that_is_cut_off(network: Network, expected: list[float], tmp_path: Path) -> None:
    """Its link is taken down in mid-training: both hosts end within the limit, and the job goes on when the link is back."""
    steps = 60
    jobs.write(tmp_path, steps=steps, checkpoints={"every_steps": 10}, task={"name": "tests.faults.slow_task:SlowTask"})
    ended: list[float] = []

    def cut(running: Running) -> None:
        running.wait_for(lambda: "step-00000020" in running.output, timeout_seconds=120, what="a checkpoint")
        network.cut()
        began = time.monotonic()
        running.wait_for(lambda: "restarting in" in running.output, timeout_seconds=90, what="the end of the job")
        while network.processes("node2"):
            assert time.monotonic() < began + 90, "node2 is still training"
            time.sleep(0.2)
        ended.append(time.monotonic() - began)
        network.mend()

    options = ["-H", "node1:1,node2:1", "--engine", "ddp", "--restarts", "20", "--restart-wait", "2"]
    typed = network.on("node1", [*LAUNCH, *options, *TRAINING])
    finished = run_ranks(typed, cwd=tmp_path, timeout_seconds=300, while_running=cut).check()
    assert "lost the connection to node2" in finished.output
    assert ended[0] < 60
    assert re.search(r"going on after step [23]0 from", finished.output), finished
    alone = python([*TRAIN[:-1], "alone", "--engine", "single"])
    run_ranks(alone, cwd=tmp_path, env={"STEP_SECONDS": "0"}, timeout_seconds=90).check()
    assert jobs.losses(tmp_path / "run")[-1] == pytest.approx(jobs.losses(tmp_path / "alone")[-1], abs=1e-5)


@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        ("node1:1,10.77.0.9:1", "", "10.77.0.9 cannot be reached; is it switched on"),
        ("node1:1,node3:1", "", "node3 is an unknown name"),
        ("node1:1,node2:1", "--engine horovod --interface ib0", "node2 has no network interface ib0 (it has eth0, lo)"),
    ],
)
def test_hosts_that_cannot_take_part_are_named(
    hosts: str, options: str, message: str, network: Network, tmp_path: Path
) -> None:
    jobs.write(tmp_path)
    typed = network.on("node1", [*LAUNCH, "-H", hosts, *options.split(), *TRAINING])
    finished = run_ranks(typed, cwd=tmp_path, timeout_seconds=60)
    assert finished.returncode == 3
    assert message in finished.stderr
    assert not (tmp_path / "run").exists()


def test_a_host_that_refuses_the_key(network: Network, tmp_path: Path) -> None:
    jobs.write(tmp_path)
    keys = network.folder / "authorized_keys"
    keys.rename(keys.with_suffix(".away"))
    try:
        finished = run_ranks(
            network.on("node1", [*LAUNCH, "-H", "node1:1,node2:1", *TRAINING]), cwd=tmp_path, timeout_seconds=60
        )
    finally:
        keys.with_suffix(".away").rename(keys)
    assert finished.returncode == 3
    assert "node2 refuses this user's key; make ssh work without a password: ssh-copy-id node2" in finished.stderr
