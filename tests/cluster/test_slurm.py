"""Slurm, for real: launch/slurm.sbatch on one node and on two, where it is preempted, requeued, and ends as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import jobs, network, slurm
from tests.cluster.slurm import Slurm
from tests.processes import REPOSITORY, end, environment, python, run_ranks

pytestmark = pytest.mark.skipif(bool(network.missing() or slurm.missing()), reason=network.missing() or slurm.missing())

SCRIPT = str(REPOSITORY / "launch" / "slurm.sbatch")
TRAINING = ["--config", "small.json", "--run-dir", "run"]
MARK = f"dsframe-slurm-test-{os.getpid()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network.Network(folder / "network"))
        try:
            cluster = stack.enter_context(Slurm(hosts, folder / "here"))
        except slurm.DoesNotStartError as error:
            pytest.skip(str(error))
        yield cluster
    end(MARK)


def shell(folder: Path) -> dict[str, str]:
    """The environment of a shell in which dsframe's is active."""
    (folder / "bin").mkdir()
    (folder / "bin" / "dsframe").write_text('#!/bin/sh\nexec python -m dsframe.cli "$@"\n')
    (folder / "bin" / "dsframe").chmod(0o755)
    variables = environment(MARK, {"MASTER_PORT": None})
    return variables | {"PATH": f"{folder / 'bin'}:{variables['PATH']}"}


def wait(
    cluster: Slurm, job: str, until: Callable[[dict[str, str]], object], folder: Path, seconds: float
) -> dict[str, str]:
    limit = time.monotonic() + seconds
    while not until(state := cluster.state(job)):
        written = "".join(path.read_text() for path in folder.glob("*.out"))
        assert time.monotonic() < limit, f"{state}\n{written}"
        time.sleep(0.3)
    return state


def ended(state: dict[str, str]) -> bool:
    return state["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_one_node(cluster: Slurm, tmp_path: Path) -> None:
    jobs.write(tmp_path)
    job = cluster.submit("--ntasks=2", SCRIPT, *TRAINING, folder=tmp_path, environment=shell(tmp_path))
    state = wait(cluster, job, ended, tmp_path, 120)
    written = (tmp_path / f"dsframe-{job}.out").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), written
    assert "2 x cpu under srun" in written
    run_ranks(
        python(["-m", "dsframe.train", *TRAINING[:-1], "alone", "--engine", "single"]), cwd=tmp_path, timeout_seconds=90
    )
    assert jobs.losses(tmp_path / "run") == pytest.approx(jobs.losses(tmp_path / "alone"), abs=1e-5)


def test_preempted_on_two_nodes(cluster: Slurm, tmp_path: Path) -> None:
    task = {"name": "tests.faults.slow_task:SlowTask"}
    jobs.write(tmp_path, steps=300, checkpoints={"every_steps": 250}, task=task)
    variables = shell(tmp_path)
    whole = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4"]
    job = cluster.submit(*whole, SCRIPT, *TRAINING, "--engine", "ddp", folder=tmp_path, environment=variables)
    output = tmp_path / f"dsframe-{job}.out"
    wait(cluster, job, lambda _: output.exists() and "step  10/300" in output.read_text(), tmp_path, 120)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    cluster.submit("--partition=high", *whole, str(urgent), folder=tmp_path, environment=variables)
    state = wait(cluster, job, lambda state: int(state["Restarts"]) and ended(state), tmp_path, 180)
    written = output.read_text()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), written
    found = re.search(r"going on after step (\d+) from", written)
    assert found, written
    assert int(found[1]) < 250, "from what the signal saved"
    alone = ["-m", "dsframe.train", *TRAINING[:-1], "alone", "--engine", "single"]
    run_ranks(python(alone), cwd=tmp_path, env={"STEP_SECONDS": "0"}, timeout_seconds=90).check()
    assert jobs.losses(tmp_path / "run")[-1] == pytest.approx(jobs.losses(tmp_path / "alone")[-1], abs=1e-5)
