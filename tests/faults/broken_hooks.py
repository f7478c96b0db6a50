"""A hook that hangs on rank 1 after step 5 where $FAULT is "sleep", and early stopping on two ranks, for test_hooks.py."""

import os
import time

import torch
import torch.distributed as dist

import dsframe
from tests.faults.slow_task import SlowTask


class Evaluated(SlowTask):
    """Is evaluated on its training samples."""

    def eval_data(self):
        return self.train_data()


class Broken(dsframe.Hooks):
    """Sums its step numbers over the ranks, as only hooks that all ranks call can."""

    def on_step(self, run):
        if run.step == 5 and run.rank == 1 and os.environ.get("FAULT") == "sleep":
            time.sleep(600)

    def on_evaluation(self, run, metrics):
        seen = torch.tensor([float(run.step), metrics["loss"]], dtype=torch.float64)
        dist.all_reduce(seen)
        print(f"hook on rank {run.rank}: {seen.tolist() == [2.0 * run.step, 2.0 * metrics['loss']]}", flush=True)
