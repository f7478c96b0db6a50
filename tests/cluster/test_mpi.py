"""Horovod over MPI on two hosts, under mpirun and under horovodrun; on one: tests/engines/test_launchers.py."""

import subprocess
import sys

import pytest

from dsframe.run_dir.record import read_summary
from tests.cluster import jobs
from tests.cluster.network import Network, missing
from tests.processes import run_ranks

TRAIN = ["-m", "dsframe.train", "--config", "small.json", "--engine", "horovod", "--run-dir"]


@pytest.fixture(scope="module", autouse=True)
def mpi():
    probe = [sys.executable, "-c", "import horovod.torch as hvd; print(hvd.mpi_built())"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.stdout.strip() != "True":
        pytest.skip("this Horovod has no MPI: install openmpi-bin and libopenmpi-dev, then make setup")


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_on_two_hosts(tmp_path):
    jobs.write(tmp_path)
    hosts = ["-H", "node1:1,node2:1"]
    launch = ["python", "-m", "dsframe.cli", "launch", "--launcher", "mpirun", *hosts, *TRAIN[2:], "launch"]
    with Network(tmp_path / "network") as network:
        for command in (launch, ["horovodrun", "--mpi", "-np", "2", *hosts, "python", *TRAIN, "horovodrun"]):
            run_ranks(network.on("node1", command), cwd=tmp_path, timeout_seconds=120).check()
    expected = jobs.alone(tmp_path)
    for name, launcher in (("launch", "mpirun"), ("horovodrun", "horovodrun")):
        summary = read_summary(tmp_path / name)
        assert summary["description"] == "Horovod (MPI, mean, a round every 5 ms)"
        assert (summary["launcher"], summary["world_size"]) == (launcher, 2)
        assert jobs.losses(tmp_path / name) == pytest.approx(expected, abs=1e-5)
