"""Any engine under any launcher, and the two lines of the README exactly as a person types them.

``make launchers`` runs every cell of the matrix. The commands are those that ``dsframe launch --print`` shows.
"""

import re
import shutil

import pytest

from dsframe.config import load
from dsframe.run_dir.record import read_summary
from dsframe.tools.launch.launchers import Job, plan
from tests.cluster import network, slurm
from tests.cluster.jobs import losses
from tests.files import ds_config, write_json
from tests.processes import free_port, run_ranks

PROCESSES, STEPS = 2, 10
LAUNCHERS = ("deepspeed", "torchrun", "horovodrun", "mpirun", "srun")
ENGINES = {
    "zero1": ("deepspeed", {"zero_optimization": {"stage": 1}}),
    "zero3": ("deepspeed", {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
    "pipeline": ("deepspeed", {"pipeline": {"stages": 2}}),
    "horovod": ("horovod", {}),
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
}
"""Name -> the engine and what its file says beyond the others'."""
TRAINING = ds_config(
    8,
    "AdamW",
    0.002,
    sections={"train_micro_batch_size_per_gpu": 2},
    task={"name": "language", "layers": 2, "width": 32, "context": 32, "corpus": "synthetic", "samples": 300},
    steps=STEPS,
    eval_micro_batch_size=200,
    log_every_steps=1,
    checkpoints={"at_end": False},
)
TOLERANCE = 1e-5


def missing(launcher):
    """Why a launcher cannot be tried here, in one line; empty where it can."""
    if launcher == "srun":
        return slurm.missing() or network.missing()
    if launcher == "mpirun" and not shutil.which("mpirun"):
        return "no mpirun: apt-get install openmpi-bin"
    return ""


OFTEN = (
    ("zero3", "deepspeed"),
    ("zero1", "horovodrun"),
    ("pipeline", "srun"),
    ("horovod", "torchrun"),
    ("horovod", "mpirun"),
    ("ddp", "horovodrun"),
    ("fsdp", "mpirun"),
)
"""Of the matrix: every engine and every launcher."""


def train(engine, more, launcher, processes, folder, cluster=None):
    """The losses. ``cluster``: for srun."""
    write_json(folder / "file.json", TRAINING | more)
    arguments = ("--config", "file.json", "--engine", engine, "--run-dir", "run")
    launch = plan(launcher, Job(processes, ("-m", "dsframe.train"), arguments, port=free_port()))
    command, variables = list(launch.command), dict(launch.environment)
    if cluster:
        hosts, scheduler = cluster
        command, variables = hosts.on("node1", command), variables | scheduler.environment
    run_ranks(command, cwd=folder, env=variables, timeout_seconds=150).check()
    summary = read_summary(folder / "run")
    assert (summary["engine"], summary["launcher"], summary["world_size"]) == (engine, launcher, processes)
    return losses(folder / "run")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Of one process of plain PyTorch."""
    return train("single", {}, "python", 1, tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    try:
        with network.Network(folder / "network") as hosts, slurm.Slurm(hosts, folder / "slurm") as scheduler:
            yield hosts, scheduler
    except slurm.DoesNotStartError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("engine", "launcher"),
    [
        pytest.param(engine, launcher, marks=[pytest.mark.long] * ((engine, launcher) not in OFTEN))
        for engine in ENGINES
        for launcher in LAUNCHERS
    ],
)
def test_cells_have_the_same_losses(engine, launcher, expected, tmp_path, request):
    if reason := missing(launcher):
        pytest.skip(reason)
    cluster = request.getfixturevalue("cluster") if launcher == "srun" else None
    found = train(*ENGINES[engine], launcher, PROCESSES, tmp_path, cluster)
    assert found == pytest.approx(expected, abs=TOLERANCE)


def short(directory, steps):
    """The default file in ``directory``, where it is found first, with few steps."""
    document = load("zero3.json").written()
    del document["dsframe"]["epochs"]
    document["dsframe"] |= {
        "steps": steps,
        "log_every_steps": 1,
        "task": {"name": "vision", "dataset": "synthetic", "samples": 1024},
    }
    write_json(directory / "zero3.json", document)


@pytest.mark.parametrize(
    ("line", "engine", "processes"),
    [
        ("deepspeed --num_gpus=4 -m dsframe.train --config zero3.json", "deepspeed", 4),
        ("horovodrun -np 2 python -m dsframe.train", "horovod", 2),
        pytest.param("horovodrun -np 8 python -m dsframe.train", "horovod", 8, marks=pytest.mark.long),
    ],
)
def test_the_two_lines_as_typed(line, engine, processes, tmp_path):
    short(tmp_path, 3)
    finished = run_ranks(line.split(), cwd=tmp_path, timeout_seconds=300).check()
    summary = read_summary(tmp_path / "runs" / f"zero3-{engine}")
    assert (summary["engine"], summary["world_size"], summary["steps"]) == (engine, processes, 3)
    assert len(re.findall(r"results +runs/zero3", finished.output)) == 1, "one rank speaks"
    blocks = re.compile(
        r"(^|<stderr>:)  ([a-z]+ {2,}| {10})"
    )  # labelled lines at the beginning and the end; the model's parts
    rest = [one for one in finished.output.splitlines() if not blocks.search(one)]
    assert len(rest) < 15, f"little noise\n{finished}"
