"""Any engine under any launcher: the same ten losses, with two processes and the launchers themselves.

    make launchers                                        # the whole matrix, about ten seconds a cell
    python -m tests.launchers --of zero3,fsdp --under mpirun

A row is an engine, a column a launcher; a cell the largest difference of a loss to plain Python's in one process. The commands are
those that ``dsframe launch --print`` shows.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

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
Cluster = tuple[network.Network, slurm.Slurm]


def missing(launcher):
    """Why a launcher cannot be tried here, in one line; empty where it can."""
    if launcher == "srun":
        return slurm.missing() or network.missing()
    if launcher == "mpirun" and not shutil.which("mpirun"):
        return "no mpirun: apt-get install openmpi-bin"
    return ""


def expected(folder):
    """The losses of one process of plain PyTorch."""
    return _train("single", {}, "python", 1, folder, None)


@contextlib.contextmanager
def slurm_cluster(folder):
    """Where srun's cells train; one for all of them. Raises RuntimeError where Slurm does not start."""
    with network.Network(folder / "network") as hosts, slurm.Slurm(hosts, folder / "slurm") as scheduler:
        yield hosts, scheduler


def train(engine, launcher, folder, cluster=None):
    """The losses of a cell; ``cluster`` for srun. Raises AssertionError where it does not train, or as somebody else."""
    name, more = ENGINES[engine]
    return _train(name, more, launcher, PROCESSES, folder, cluster)


def _train(
    engine,
    more,
    launcher,
    processes,
    folder,
    cluster,
):
    write_json(folder / "file.json", TRAINING | more)
    arguments = ("--config", "file.json", "--engine", engine, "--run-dir", "run")
    launch = plan(launcher, Job(processes, ("-m", "dsframe.train"), arguments, port=free_port()))
    command, variables = list(launch.command), dict(launch.environment)
    if cluster:
        hosts, scheduler = cluster
        command, variables = hosts.on("node1", command), variables | scheduler.environment
    run_ranks(command, cwd=folder, env=variables, timeout_seconds=150).check()
    summary = read_summary(folder / "run")
    found = summary["engine"], summary["launcher"], summary["world_size"]
    if found != (engine, launcher, processes):
        raise AssertionError(f"{found} instead of {(engine, launcher, processes)}")
    return losses(folder / "run")


def difference(found, wanted):
    """The largest of a step."""
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


def main(argv=None):
    """Prints the matrix. Returns 1 where a cell does not train, or otherwise than the others."""
    parser = argparse.ArgumentParser(prog="tests.launchers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--of", default=",".join(ENGINES), help="these engines, separated by commas")
    parser.add_argument("--under", default=",".join(LAUNCHERS), help="these launchers")
    options = parser.parse_args(argv)
    reasons = []
    wrong = False
    columns = options.under.split(",")
    print(f"{'':10}" + "".join(f"{name:>12}" for name in columns), flush=True)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        cluster = None
        wanted = expected(_folder(Path(name), "expected"))
        for engine in options.of.split(","):
            print(f"{engine:10}", end="", flush=True)
            for launcher in columns:
                reason, cell = missing(launcher), "--"
                if not reason:
                    try:
                        if launcher == "srun" and not cluster:
                            cluster = stack.enter_context(slurm_cluster(_folder(Path(name), "cluster")))
                        folder = _folder(Path(name), f"{engine}-{launcher}")
                        apart = difference(
                            train(engine, launcher, folder, cluster if launcher == "srun" else None), wanted
                        )
                        cell, wrong = f"{apart:.1e}", wrong or apart > TOLERANCE
                    except slurm.DoesNotStartError as error:
                        reason = str(error)
                    except AssertionError as error:
                        reason, cell, wrong = str(error), "failed", True
                print(f"{cell:>12}", end="", flush=True)
                line = f"{launcher}: {reason}" if cell == "--" else f"{engine} under {launcher}: {reason}"
                if reason and line not in reasons:
                    reasons.append(line)
            print(flush=True)
    print(*reasons, sep="\n")
    return int(wrong)


def _folder(parent, name):
    (parent / name).mkdir()
    return parent / name


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
