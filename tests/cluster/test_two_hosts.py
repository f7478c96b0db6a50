"""Two hosts, for real: every launcher trains the same on them as one host does."""

import pytest

from tests.cluster import jobs
from tests.cluster.network import NODES, Network, missing
from tests.processes import free_port, run_ranks

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
def network(tmp_path_factory):
    with Network(tmp_path_factory.mktemp("network") / "here") as network:
        yield network


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    jobs.write(folder)
    return jobs.alone(folder)


LONG = {"dsframe launch --engine horovod"}
"""Which differs from the command above it in how ranks meet, and that is tested on one host too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in COMMANDS]
)
def test_the_same_losses_as_on_one_host(name, network, expected, tmp_path):
    jobs.write(tmp_path)
    (tmp_path / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES))
    port = str(free_port())
    typed = [word.replace("PORT", port) for word in COMMANDS[name]]
    finished = run_ranks(network.on("node1", typed), cwd=tmp_path, timeout_seconds=150).check()
    assert jobs.losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5), finished
    assert network.processes("node1") == network.processes("node2") == []
