"""``dsframe.train`` on the stand-in: ``python -m tests.standin.train FOLDER [WORDS...] -- ARGUMENTS...``

It leaves ``FOLDER/rank-N.json``: each event with the phase in which it happened ("set-up", "step 3", and in a step "log 3";
"save 3", "evaluation 3"), and the device's bytes when a phase ended. Words before ``--`` change something first: a launcher to
imitate (``srun``, ``mpirun``), or a mistake to make (``MISTAKES``), of which the tests show that the stand-in sees it.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import torch

from tests.standin import switch_on

peaks = {}
"""Bytes live and at peak when a phase ended."""


def in_phase(owner, name, phase):
    """Has ``owner.name`` note its phase while it runs."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*arguments, **named):
        peaks[f"before {name}"] = switch_on.usage()
        before, switch_on.phase = switch_on.phase, phase(*arguments)
        try:
            return original(*arguments, **named)
        finally:
            peaks[switch_on.phase] = switch_on.usage()
            switch_on.phase = before

    setattr(owner, name, noting)


def record(folder):
    """Notes phases, and writes everything when the process ends."""
    from dsframe import job
    from dsframe.engines.deepspeed.imports import deepspeed
    from dsframe.trainer import Trainer
    from dsframe.training.checkpoints import Checkpoints
    from dsframe.training.evaluations import Evaluations
    from dsframe.training.finite import FiniteCheck
    from dsframe.training.step_log import StepLog

    switch_on.phase = "set-up"
    in_phase(deepspeed, "initialize", lambda *_: "set-up")
    in_phase(job, "make_engine", lambda *_: "set-up")
    in_phase(Trainer, "fit", lambda *_: "training")
    in_phase(Trainer, "_train_step", lambda _, step, *__: f"step {step}")
    in_phase(FiniteCheck, "on_step", lambda _, training, *__: f"step {training.step}")
    in_phase(StepLog, "log", lambda _, training, *__: f"log {training.step}")
    in_phase(Checkpoints, "save", lambda _, training: f"save {training.step}")
    in_phase(Evaluations, "evaluate", lambda _, training: f"evaluation {training.step}")
    folder.mkdir(parents=True, exist_ok=True)
    rank, leave = os.environ.get("RANK", "0"), os._exit

    def write(code):
        (folder / f"rank-{rank}.json").write_text(json.dumps({"events": switch_on.events, "usage": peaks}))
        leave(code)

    os._exit = write


# What a launcher says.


def forget_torchrun():
    """Takes torchrun's variables away; returns rank and size."""
    switch_on.device.set_device_count(1)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        del os.environ[name]
    return os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")


def srun():
    """As ``srun --gpus-per-task=1``: a task sees one GPU."""
    rank, size = forget_torchrun()
    os.environ.update(
        SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS=size, SLURM_LOCALID=rank, SLURM_STEP_TASKS_PER_NODE=size, SLURM_NODEID="0",
        SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost",
    )  # fmt: skip


def mpirun():
    """As Open MPI where a process sees one GPU."""
    rank, size = forget_torchrun()
    os.environ.update(
        OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_SIZE=size, OMPI_COMM_WORLD_LOCAL_RANK=rank, OMPI_COMM_WORLD_LOCAL_SIZE=size,
        PMIX_NAMESPACE=os.environ["DSFRAME_TEST_ID"],
    )  # fmt: skip


# Mistakes that a change of dsframe could make.


def host_tensor_in_a_collective():
    """Sums over ranks are made on the host."""
    from dsframe.cluster import process_group

    original = process_group.sum_over_ranks
    process_group.sum_over_ranks = lambda values: original(values.cpu())


def item_in_every_step():
    """A step reads its loss."""
    from dsframe.guard.nonfinite import FirstNonFinite

    original = FirstNonFinite.look

    def reads(self, step, loss, norm):
        float(loss)
        original(self, step, loss, norm)

    FirstNonFinite.look = reads


def batch_on_the_host():
    """The loader forgets the device."""
    from dsframe.data.reading import Fetcher

    Fetcher._to_device = lambda self, batches: batches


def model_on_the_host():
    """The model is not moved."""
    from dsframe.model import build

    build._place = lambda *_: ""


def device_of_another_host():
    """A rank takes the GPU of its rank, not of its local rank."""
    from dsframe import job

    switch_on.device.set_device_count(1)
    job.device_of = lambda world: torch.device("cuda", world.rank)


def whole_model_at_stage_3():
    """The model is moved before it is sharded."""
    from dsframe.engines.deepspeed import engine

    engine.on_disk = lambda *_: None


def pageable_batch():
    """Batches are not pinned."""
    from dsframe.data import prefetch

    prefetch._dense = lambda leaf: leaf.contiguous()
    torch.Tensor.pin_memory = lambda self, *_: self


def reads_before_it_arrived():
    """A number is fetched without waiting for the device, and then read."""
    from dsframe.training import step_log

    def means(engine, result):
        host = torch.empty(1, dtype=torch.float64).pin_memory()
        host.copy_(engine.sum_over_ranks(result.loss.detach().reshape(1).double()), non_blocking=True)
        return float(host) / engine.plan.world.size, {}

    step_log._means = means


def sleeping_rank():
    """Rank 1 stands still in step 3."""
    from dsframe.trainer import Trainer

    original = Trainer._train_step

    def slow(self, step, *more):
        if step == 3 and os.environ["RANK"] == "1":
            time.sleep(1000)
        return original(self, step, *more)

    Trainer._train_step = slow


MISTAKES = {
    "host-tensor-in-a-collective": host_tensor_in_a_collective,
    "item-in-every-step": item_in_every_step,
    "batch-on-the-host": batch_on_the_host,
    "model-on-the-host": model_on_the_host,
    "device-of-another-host": device_of_another_host,
    "whole-model-at-stage-3": whole_model_at_stage_3,
    "pageable-batch": pageable_batch,
    "reads-before-it-arrived": reads_before_it_arrived,
    "sleeping-rank": sleeping_rank,
}
CHANGES = {"srun": srun, "mpirun": mpirun, **MISTAKES}


if __name__ == "__main__":
    from dsframe.train import leave_at_once, main

    end = sys.argv.index("--")
    own, sys.argv[1:] = sys.argv[1:end], sys.argv[end + 1 :]
    record(Path(own[0]))
    for word in own[1:]:
        CHANGES[word]()
    leave_at_once(main())
