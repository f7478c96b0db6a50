"""Horovod over MPI: under mpirun, under horovodrun, and on two hosts."""

import os
import subprocess
import sys

import pytest

from dsframe.run_dir.record import read_summary
from tests.cluster import jobs
from tests.cluster.network import Network, missing
from tests.processes import python, run_ranks

TRAIN = ["-m", "dsframe.train", "--config", "small.json", "--engine", "horovod", "--run-dir"]
AS_ROOT = ["--allow-run-as-root"] * (os.getuid() == 0)
MPIRUN = ["mpirun", "-np", "2", *AS_ROOT, "--oversubscribe", "--bind-to", "none"]


@pytest.fixture(scope="module", autouse=True)
def mpi():
    probe = [sys.executable, "-c", "import horovod.torch as hvd; print(hvd.mpi_built())"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.stdout.strip() != "True":
        pytest.skip("this Horovod has no MPI: install openmpi-bin and libopenmpi-dev, then make setup")


def test_under_mpirun_and_horovodrun(tmp_path):
    jobs.write(tmp_path)
    for launcher in (MPIRUN, ["horovodrun", "--mpi", "-np", "2"]):
        command = [*launcher, "python", *TRAIN, launcher[0]]
        run_ranks(command, cwd=tmp_path, timeout_seconds=120).check()
    run_ranks(python([*TRAIN, "alone"]), cwd=tmp_path, timeout_seconds=120).check()
    for name in ("mpirun", "horovodrun"):
        summary = read_summary(tmp_path / name)
        assert (summary["launcher"], summary["world_size"], summary["description"]) == (
            name,
            2,
            "Horovod (MPI, mean, a round every 5 ms)",
        )
        assert jobs.losses(tmp_path / name) == pytest.approx(jobs.losses(tmp_path / "alone"), abs=1e-5)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_on_two_hosts(tmp_path):
    jobs.write(tmp_path)
    hosts = ["-H", "node1:1,node2:1"]
    launch = ["python", "-m", "dsframe.cli", "launch", "--launcher", "mpirun", *hosts, *TRAIN[2:], "launch"]
    with Network(tmp_path / "network") as network:
        for command in (launch, ["horovodrun", "--mpi", "-np", "2", *hosts, "python", *TRAIN, "horovodrun"]):
            run_ranks(network.on("node1", command), cwd=tmp_path, timeout_seconds=120).check()
    run_ranks(python([*TRAIN, "alone"]), cwd=tmp_path, timeout_seconds=120).check()
    for name in ("launch", "horovodrun"):
        assert read_summary(tmp_path / name)["description"] == "Horovod (MPI, mean, a round every 5 ms)"
        assert jobs.losses(tmp_path / name) == pytest.approx(jobs.losses(tmp_path / "alone"), abs=1e-5)
