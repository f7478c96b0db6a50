"""The promise, measured: one file, one model, one seed, and every engine's loss beside a single process's.

    python -m tests.equivalence        # prints the table (make equivalence)

Each case is a real job under its own launcher: Fashion-MNIST, the CNN, fp32, AdamW with warm-up and clipping, 50 steps of a
global batch of 64 with gradient accumulation 2. The noise floor is what single processes differ by among themselves when only
the order of summation differs: the same global batches, cut into other micro-batches.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsframe.report.compare import losses
from tests.processes import deepspeed, horovodrun, python, run_ranks, torchrun

STEPS = 50
EARLY = 10
EARLY_BOUND = 1e-5
NOISE_FACTOR = 3.0
FILE = {
    "train_batch_size": "64",
    "gradient_accumulation_steps": "2",
    "optimizer.params.lr": "0.001",
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}',
    "dsframe.steps": str(STEPS),
    "dsframe.log_every_steps": "1",
    "dsframe.eval_micro_batch_size": "500",
    "dsframe.threads_per_rank": "1",
}
CUTS = (1, 2, 4, 8, 16)
"""Accumulation steps of the single-process runs that make the noise floor."""


@dataclass(frozen=True)
class Case:
    """One engine: its file, its launcher and how many processes it takes."""

    config: str
    launch: Callable[[Sequence[str]], list[str]]

    def command(self, directory: Path, changes: dict[str, str]) -> list[str]:
        options = [f"--set={key}={value}" for key, value in {**FILE, **changes}.items()]
        return self.launch(["-m", "dsframe.train", "--config", self.config, "--run-dir", str(directory), *options])


def two(launcher: Callable[[int, Iterable[str]], list[str]]) -> Callable[[Sequence[str]], list[str]]:
    """The launcher with two processes."""
    return lambda arguments: launcher(2, arguments)


CASES = {
    "zero0": Case("zero0.json", two(deepspeed)),
    "zero1": Case("zero1.json", two(deepspeed)),
    "zero2": Case("zero2.json", two(deepspeed)),
    "zero3": Case("zero3.json", two(deepspeed)),
    "zero3_offload_cpu": Case("zero3_offload_cpu.json", two(deepspeed)),
    "zero3_offload_nvme": Case("zero3_offload_nvme.json", two(deepspeed)),
    "horovod": Case("horovod.json", two(horovodrun)),
    "ddp": Case("ddp.json", two(torchrun)),
}
SINGLE = Case("single.json", python)


def curve(case: Case, changes: dict[str, str] | None = None) -> list[float]:
    """The losses of the first STEPS steps of a real run."""
    with tempfile.TemporaryDirectory(prefix="dsframe-equivalence-") as directory:
        run_ranks(case.command(Path(directory), changes or {}), timeout_seconds=590).check()
        return [loss for _, loss in sorted(losses(Path(directory)).items())]


def difference(left: Sequence[float], right: Sequence[float], steps: int = STEPS) -> float:
    """The largest difference over the first ``steps`` steps."""
    assert len(left) == len(right) == STEPS
    return max(abs(a - b) for a, b in zip(left[:steps], right[:steps], strict=True))


def noise_floor() -> tuple[list[float], float]:
    """The reference curve (accumulation 2) and the largest difference between any two cuts."""
    curves = {cut: curve(SINGLE, {"gradient_accumulation_steps": str(cut)}) for cut in CUTS}
    return curves[2], max(difference(a, b) for a, b in itertools.combinations(curves.values(), 2))


def main() -> int:
    """Prints the table; 1 where a case breaks its bound."""
    single, floor = noise_floor()
    sizes = ", ".join(str(64 // cut) for cut in CUTS)
    print(f"noise floor over {STEPS} steps: {floor:.1e}  (single processes, micro-batches of {sizes})")
    print(f"{'':20} {f'first {EARLY} steps':>15} {f'all {STEPS} steps':>15} {'/ floor':>8}")
    broken = False
    for name, case in CASES.items():
        losses_ = curve(case)
        early, late = difference(single, losses_, EARLY), difference(single, losses_)
        broken |= early > EARLY_BOUND or late > NOISE_FACTOR * floor
        print(f"{name:20} {early:15.1e} {late:15.1e} {late / floor:8.2f}", flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
