"""Any engine under any launcher, and the two lines of the README exactly as a person types them."""

import contextlib
import re

import pytest

from dsframe.config import load
from dsframe.run_dir.record import read_summary
from tests import launchers
from tests.cluster.slurm import DoesNotStartError
from tests.files import write_json
from tests.processes import run_ranks

CELLS = (
    ("zero3", "deepspeed"),
    ("zero1", "horovodrun"),
    ("pipeline", "srun"),
    ("horovod", "torchrun"),
    ("horovod", "mpirun"),
    ("ddp", "horovodrun"),
    ("fsdp", "mpirun"),
)
"""Of the matrix of `make launchers`: every engine and every launcher."""
MORE_CELLS = (
    ("zero3", "mpirun"),
    ("pipeline", "torchrun"),
    ("horovod", "deepspeed"),
    ("horovod", "srun"),
)
"""Horovod's own rendezvous under each of the others', and cells whose engine and launcher are in CELLS with another."""


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


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return launchers.expected(tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(launchers.slurm_cluster(tmp_path_factory.mktemp("slurm")))
        except DoesNotStartError as error:
            pytest.skip(str(error))
        yield found


@pytest.mark.parametrize(
    ("engine", "launcher"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in MORE_CELLS)]
)
def test_cells_have_the_same_losses(engine, launcher, expected, tmp_path, request):
    if reason := launchers.missing(launcher):
        pytest.skip(reason)
    cluster = request.getfixturevalue("cluster") if launcher == "srun" else None
    assert launchers.train(engine, launcher, tmp_path, cluster) == pytest.approx(expected, abs=launchers.TOLERANCE)


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
