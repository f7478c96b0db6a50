"""What test_references.py runs on every rank: the contract of the textbook engines, and their training beside DDP's.

torchrun --nproc-per-node=2 -m tests.engines.references REPORT.json
"""

import sys
from pathlib import Path

import torch

from dsframe.model.micro_batch import MicroBatch
from dsframe.train import leave_at_once
from tests.contract import CHECKS, make, micro_batches
from tests.engines.several import one_process_group
from tests.engines.snapshot import Snapshot, apart
from tests.files import write_json

ADAM = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
}
SGD = {**ADAM, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
STAGES = {"pipeline": {"stages": 2}}
EVERY_2 = {"dsframe": {"engine_options": {"every_steps": 2}}}
AVERAGING = "reference-parameter-averaging"
CASES = {
    "ddp": ("ddp", ADAM),
    "all-reduce": ("reference-allreduce", ADAM),
    "ring": ("reference-ring", ADAM),
    "server": ("reference-parameter-server", ADAM),
    "model parallel": ("reference-model-parallel", ADAM | STAGES),
    "ddp sgd": ("ddp", SGD),
    "averaging sgd": (AVERAGING, SGD),
}

CONTRACTS = (
    ("reference-allreduce", ADAM | FP16),
    ("reference-ring", ADAM | FP16),
    (AVERAGING, ADAM | EVERY_2),
    ("reference-parameter-server", ADAM),
    ("reference-async-parameter-server", ADAM),
    ("reference-model-parallel", ADAM | STAGES | FP16),
)
"""Engines, and files on which they keep the rules of tests/contract.py."""


def steps(engine, first, last):
    """The global batch's loss at each step."""
    losses = []
    for step in range(first, last):
        result = engine.train_step(MicroBatch.of(micro_batches(engine, step)))
        losses.append(float(engine.sum_over_ranks(result.loss.reshape(1).double())) / engine.plan.world.size)
    return losses


def leave(engine):
    """**Collective.** Ends what an engine has beside the process group, which the next one needs."""
    if hasattr(engine, "leave"):
        engine.leave()


def measure(name, file):
    """Five steps, their end kept, five more, back, the same five."""
    engine = make(file, name)
    losses = steps(engine, 0, 5)
    kept = Snapshot(engine.state())
    after = steps(engine, 5, 10)
    engine.load_state(kept)
    read_back, held = apart(kept, Snapshot(engine.state())), [kept.parameter(key) for key in kept.shapes]
    repeated = steps(engine, 5, 10)
    leave(engine)
    return {
        "losses": losses + after,
        "repeated": repeated,
        "read_back": read_back,
        "state": [tensor.flatten().tolist() for one in held for tensor in (one.weight, *one.moments.values())],
        "names": [[one.name, list(one.moments), dict(one.scalars)] for one in held],
    }


def main(path):
    with one_process_group():
        for name, file in CONTRACTS:
            made = make(file, name)
            for check in CHECKS:
                check(made)
            leave(made)
        report = {case: measure(name, file) for case, (name, file) in CASES.items()}
        if torch.distributed.get_rank() == 0:
            write_json(Path(path), report)


if __name__ == "__main__":
    main(sys.argv[1])
    leave_at_once(0)
