"""Hooks that fail on rank 1 after step 5, and early stopping on two ranks, for test_hooks.py.

$FAULT: "raise", "sleep", or nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import dsframe
from tests.faults.slow_task import SlowTask


class Evaluated(SlowTask):
    """Is evaluated on its training samples."""

    def eval_data(self) -> TensorDataset:
        return self.train_data()


class Broken(dsframe.Hooks):
    """Sums its step numbers over the ranks, as only hooks that all ranks call can."""

    def on_step(self, run: dsframe.RunView) -> None:
        if run.step == 5 and run.rank == 1:
            if os.environ.get("FAULT") == "raise":
                raise ValueError("a mistake in a hook")
            if os.environ.get("FAULT") == "sleep":
                time.sleep(600)

    def on_evaluation(self, run: dsframe.RunView, metrics: Mapping[str, float]) -> None:
        seen = torch.tensor([float(run.step), metrics["loss"]], dtype=torch.float64)
        dist.all_reduce(seen)
        print(f"hook on rank {run.rank}: {seen.tolist() == [2.0 * run.step, 2.0 * metrics['loss']]}", flush=True)
