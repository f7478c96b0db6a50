"""Save under one engine, go on under another: how far the losses are from those of the run that was never interrupted.

    make portability                              # the whole matrix, about seven seconds a cell
    python -m tests.portability --of zero3@2,ddp@2  # these by these

A row is the engine that saved after step 5, a column the one that went on for 20 steps; a cell the largest difference of the
training loss of one step. 0 is equality to the last bit, and what the diagonal has to show.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsframe.run_dir.record import read_metrics
from tests.processes import Finished, Running, python, run_ranks, torchrun, warm

SAVED_STEP, STEPS = 5, 25


@dataclass(frozen=True)
class Setup:
    """One way to run the same training."""

    engine: str
    processes: int
    overrides: tuple[str, ...] = field(default=())


_OFFLOAD = ("zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu")

_SHARDED = ("dsframe.checkpoints.form=sharded",)

_NVME = tuple(
    f"zero_optimization.offload_{what}.{setting}"
    for what in ("optimizer", "param")
    for setting in ("device=nvme", f"nvme_path={tempfile.gettempdir()}")
)

SETUPS: dict[str, Setup] = {
    "single@1": Setup("single", 1),
    "ddp@2": Setup("ddp", 2),
    "ddp@3": Setup("ddp", 3),
    "fsdp@2": Setup("fsdp", 2),
    "fsdp@3": Setup("fsdp", 3),
    "fsdp+sharded@2": Setup("fsdp", 2, _SHARDED),
    "horovod@2": Setup("horovod", 2),
    "horovod@1": Setup("horovod", 1),
    "zero0@2": Setup("deepspeed", 2, ("zero_optimization.stage=0",)),
    "zero1@2": Setup("deepspeed", 2, ("zero_optimization.stage=1",)),
    "zero2@2": Setup("deepspeed", 2, ("zero_optimization.stage=2",)),
    "zero3@2": Setup("deepspeed", 2, ("zero_optimization.stage=3",)),
    "zero3+sharded@2": Setup(
        "deepspeed", 2, ("zero_optimization.stage=3", *_SHARDED, "dsframe.checkpoints.asynchronous=true")
    ),
    "zero3+cpu@2": Setup("deepspeed", 2, ("zero_optimization.stage=3", *_OFFLOAD)),
    "zero3+nvme@2": Setup("deepspeed", 2, ("zero_optimization.stage=3", *_NVME)),
    "zero3@1": Setup("deepspeed", 1, ("zero_optimization.stage=3",)),
    "zero3@4": Setup("deepspeed", 4, ("zero_optimization.stage=3",)),
    "horovod@3": Setup("horovod", 3),
    # DeepSpeed counts tensor-parallel ranks in train_batch_size: each step takes 12 samples here, too.
    "tp@2": Setup(
        "deepspeed", 2, ("tensor_parallel.autotp_size=2", "zero_optimization.stage=1", "train_batch_size=24")
    ),
    "pipeline@2": Setup("deepspeed", 2, ("zero_optimization.stage=0", "pipeline.stages=2")),
    "pipeline+zero1@4": Setup("deepspeed", 4, ("zero_optimization.stage=1", "pipeline.stages=2")),
}

CONFIG = """{
  "train_batch_size": 12,
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 8, "total_num_steps": "auto", "warmup_max_lr": 0.002}},
  "dsframe": {
    "task": {"name": "language", "layers": 2, "width": 64, "context": 64, "corpus": "synthetic", "samples": 300},
    "checkpoints": {"keep_last": 9},
    "eval_micro_batch_size": 200,
    "log_every_steps": 1,
    "threads_per_rank": 1
  }
}
"""


def train(
    setup: Setup,
    run_dir: Path,
    *arguments: str,
    steps: int = STEPS,
    timeout_seconds: float = 150,
    limit_kilobytes: int | None = None,
    while_running: Callable[[Running], None] | None = None,
) -> Finished:
    """One run in ``run_dir``; ``arguments`` are added to the command line of ``dsframe.train``.

    ``limit_kilobytes``: no file of the run may grow larger.
    """
    run_dir.parent.mkdir(exist_ok=True)
    config = run_dir.parent / "portable.json"
    config.write_text(CONFIG)
    own = ["-m", "dsframe.train", "--config", str(config), "--run-dir", str(run_dir), "--engine", setup.engine]
    for override in (f"dsframe.steps={steps}", *setup.overrides):
        own += ["--set", override]
    own += arguments
    command = warm(setup.processes, own)
    if limit_kilobytes is not None or while_running is not None:  # which is about these processes alone
        command = torchrun(setup.processes, own) if setup.processes > 1 else python(own)
    if limit_kilobytes is not None:
        command = ["bash", "-c", f'ulimit -f {limit_kilobytes}; exec "$0" "$@"', *command]
    return run_ranks(command, timeout_seconds=timeout_seconds, cwd=run_dir.parent, while_running=while_running)


def losses(run_dir: Path) -> dict[int, float]:
    """The training loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(run_dir) if "loss" in record}


def losses_of(name: str, run_dir: Path, *, steps: int) -> dict[int, float]:
    """Trains from beginning to end without a checkpoint; the losses."""
    train(SETUPS[name], run_dir, "--set", "dsframe.checkpoints.at_end=false", steps=steps).check()
    return losses(run_dir)


def uninterrupted(name: str, folder: Path) -> dict[int, float]:
    """Trains from beginning to end, saving on the way, once for each ``folder``; the losses."""
    run_dir = folder / name
    if not (run_dir / "summary.json").exists():
        train(SETUPS[name], run_dir, "--set", f"dsframe.checkpoints.every_steps={SAVED_STEP}").check()
    return losses(run_dir)


def resumed(saved: str, name: str, folder: Path) -> dict[int, float]:
    """Goes on under ``name`` from what ``saved`` has written; the losses from there on."""
    checkpoint = folder / saved / "checkpoints" / f"step-{SAVED_STEP:08}"
    run_dir = folder / f"{saved}-{name}"
    train(SETUPS[name], run_dir, "--resume", str(checkpoint)).check()
    return losses(run_dir)


def difference(saved: str, name: str, folder: Path) -> float:
    """The largest difference of the losses after the resume from the uninterrupted run of ``saved``."""
    whole, rest = uninterrupted(saved, folder), resumed(saved, name, folder)
    expected = range(SAVED_STEP + 1, STEPS + 1)
    if list(rest) != list(expected):
        raise AssertionError(f"{saved} -> {name}: steps {list(rest)} instead of {expected}")
    return max(abs(whole[step] - rest[step]) for step in expected)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the matrix."""
    parser = argparse.ArgumentParser(prog="tests.portability", description=__doc__.splitlines()[0])
    parser.add_argument("--of", default=",".join(SETUPS), help="these setups, separated by commas")
    names = parser.parse_args(argv).of.split(",")
    width = max(map(len, names)) + 1
    print(" " * width + "".join(f"{name:>{width}}" for name in names), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for saved in names:
            print(f"{saved:<{width}}", end="", flush=True)
            for name in names:
                print(f"{difference(saved, name, Path(folder)):>{width}.1e}", end="", flush=True)
            print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
