"""Slurm, for real: the script of docs/how_to/slurm.md, preempted, at its time limit, and after a lost node."""

import contextlib
import os
import re
import time

import pytest

from tests.cluster import jobs, network, slurm
from tests.cluster.slurm import Slurm
from tests.processes import REPOSITORY, end, environment, run_ranks, warm

pytestmark = pytest.mark.skipif(bool(network.missing() or slurm.missing()), reason=network.missing() or slurm.missing())

PAGE = (REPOSITORY / "docs" / "how_to" / "slurm.md").read_text()
LINES = re.findall(r"```bash\n(#!.*?)```\n", PAGE, re.DOTALL)[0]
"""The batch script, as the page has it."""
TRAINING = ["--config", "small.json", "--run-dir", "run"]
MARK = f"dsframe-slurm-test-{os.getpid()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network.Network(folder / "network"))
        try:
            cluster = stack.enter_context(Slurm(hosts, folder / "here"))
        except slurm.DoesNotStartError as error:
            pytest.skip(str(error))
        yield cluster
    end(MARK)


def script(folder):
    """The page's batch script, in a file."""
    (path := folder / "slurm.sbatch").write_text(LINES)
    return str(path)


def shell(folder):
    """The environment of a shell in which dsframe's is active."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "dsframe").write_text('#!/bin/sh\nexec python -m dsframe.cli "$@"\n')
    (folder / "bin" / "dsframe").chmod(0o755)
    variables = environment(MARK, {"MASTER_PORT": None})
    return variables | {"PATH": f"{folder / 'bin'}:{variables['PATH']}"}


def wait(cluster, job, until, folder, seconds):
    limit = time.monotonic() + seconds
    while not until(state := cluster.state(job)):
        written = "".join(path.read_text() for path in folder.glob("*.out"))
        assert time.monotonic() < limit, f"{state}\n{written}"
        time.sleep(0.3)
    return state


def ended(state):
    return state["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_one_node(cluster, tmp_path):
    jobs.write(tmp_path, threads_per_rank=None)
    words = ["--ntasks=2", "--cpus-per-task=2", script(tmp_path), *TRAINING]
    job = cluster.submit(*words, folder=tmp_path, environment=shell(tmp_path) | {"OMP_NUM_THREADS": "1"})
    state = wait(cluster, job, ended, tmp_path, 120)
    written = (tmp_path / f"dsframe-{job}.out").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), written
    assert "2 x cpu under srun, 2 thread(s) each" in written, "of --cpus-per-task, not of the login node"
    assert jobs.losses(tmp_path / "run") == pytest.approx(jobs.alone(tmp_path), abs=1e-5)


def preempted(cluster, job, words, folder):
    urgent = folder / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    cluster.submit("--partition=high", *words, str(urgent), folder=folder, environment=shell(folder / "urgent"))


def at_the_time_limit(cluster, job, words, folder):
    cluster.call("node1", "scontrol", "update", f"JobId={job}", "TimeLimit=1")


def lost_node(cluster, job, words, folder):
    cluster.call("node1", "scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    wait(cluster, job, lambda state: int(state["Restarts"]), folder, 60)
    with contextlib.suppress(RuntimeError):  # its daemon may have come back by itself
        cluster.call("node1", "scontrol", "update", "NodeName=node2", "State=RESUME")


@pytest.mark.parametrize(
    "interrupt",
    [preempted, *(pytest.param(each, marks=pytest.mark.long) for each in (at_the_time_limit, lost_node))],
    ids=lambda each: each.__name__,
)
def test_interrupted_on_two_nodes(interrupt, cluster, tmp_path):
    """It is requeued, continues from what was saved, and ends as if nothing had been."""
    task = {"name": "tests.faults.slow_task:SlowTask"}
    steps = {preempted: 240, at_the_time_limit: 1600, lost_node: 120}[interrupt]
    every = 10 if interrupt is lost_node else steps - 50
    jobs.write(tmp_path, steps=steps, checkpoints={"every_steps": every}, task=task)
    words = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--signal=USR1@30"]
    launch = [*words, script(tmp_path), *TRAINING, "--engine", "ddp"]
    job = cluster.submit(*launch, folder=tmp_path, environment=shell(tmp_path))
    output = tmp_path / f"dsframe-{job}.out"
    reached = re.compile(rf"step +30/{steps} ")
    wait(cluster, job, lambda _: output.exists() and reached.search(output.read_text()), tmp_path, 120)
    interrupt(cluster, job, words[:3], tmp_path)
    state = wait(cluster, job, lambda state: int(state["Restarts"]) and ended(state), tmp_path, 300)
    written = output.read_text()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), written
    found = re.search(r"continuing after step (\d+) from", written)
    assert found, written
    assert int(found[1]) < steps - 50, "from what the signal saved, or the last checkpoint before"
    alone = ["-m", "dsframe.train", *TRAINING[:-1], "alone", "--engine", "single"]
    run_ranks(warm(1, alone), cwd=tmp_path, env={"STEP_SECONDS": "0"}, timeout_seconds=90).check()
    assert jobs.losses(tmp_path / "run")[-1] == pytest.approx(jobs.losses(tmp_path / "alone")[-1], abs=1e-5)
