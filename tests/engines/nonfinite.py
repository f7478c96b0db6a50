"""What test_nonfinite.py runs on every rank: engines that meet a broken sample, one after another.

torchrun --nproc-per-node=2 -m tests.engines.nonfinite ENGINE[:STAGE | :pipeline] ...

Each trains twice: ``skip`` leaves its figures in RUN_DIR/skip, and what ``stop`` ends with is in said.json.
"""

import sys
from pathlib import Path

from dsframe.cluster.world import here
from dsframe.config import load
from dsframe.errors import TrainingError
from dsframe.run import execute
from dsframe.train import leave_at_once
from tests.files import write_json

STEPS = 20
TASK = {"name": "tests.engines.nan_task:OneBrokenSample"}


def configuration(case, run_dir, **settings):
    engine, _, how = case.partition(":")
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": int(how) if how.isdigit() else 0},
        **({"pipeline": {"stages": 2}} if how == "pipeline" else {}),
        "dsframe": {
            "engine": engine,
            "task": TASK,
            "steps": STEPS,
            "threads_per_rank": 1,
            "run_dir": run_dir,
            "log_every_steps": 1,
            **settings,
        },
    }


def main(cases):
    said = {}
    for case in cases:
        execute(load(configuration(case, f"{case}/skip", on_nonfinite="skip")), quiet=True)
        try:
            execute(load(configuration(case, f"{case}/stop")), quiet=True)
        except TrainingError as error:
            said[case] = str(error)
    if here().is_main:
        write_json(Path("said.json"), said)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave_at_once(0)
