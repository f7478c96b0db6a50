"""Save under one engine, go on under another: how far the losses are from those of the run that was never interrupted.

    make portability                              # about seven seconds a cell
    python -m tests.portability --whole           # every pair
    python -m tests.portability --of zero3@2,ddp@2  # these by these

A row is the engine that saved after step 5, a column the one that went on for 10 steps; a cell the largest difference of the
training loss of one step. 0 is equality to the last bit, and what the diagonal has to show. A checkpoint's files are the same
whoever wrote them, so each setup goes on from its own and from the first one's, and the first one from each; ``--whole`` has all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dsframe.tools.compare import losses
from tests import kept
from tests.processes import COMPILING_SECONDS, python, run_ranks, torchrun
from tests.text_files import LLAMA

SAVED_STEP, STEPS = 5, 15


@dataclass(frozen=True)
class Setup:
    """One way to run the same training."""

    engine: str
    processes: int
    overrides: tuple[str, ...] = field(default=())
    model: str = "gpt"
    """One of MODELS: a checkpoint goes on under setups of its own model."""


_OFFLOAD = ("zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu")

_NVME = tuple(
    f"zero_optimization.offload_{what}.{setting}"
    for what in ("optimizer", "param")
    for setting in ("device=nvme", f"nvme_path={tempfile.gettempdir()}")
)

_SEQUENCE = "sequence_parallel_size=2"
_EXPERTS = ("expert_parallel.enabled=true", "expert_parallel.autoep_size=2")

SETUPS = {
    "single@1": Setup("single", 1),
    "ddp@2": Setup("ddp", 2),
    "ddp@3": Setup("ddp", 3),
    "fsdp@2": Setup("fsdp", 2),
    "fsdp@3": Setup("fsdp", 3),
    "horovod@2": Setup("horovod", 2),
    "zero0@2": Setup("deepspeed", 2, ("zero_optimization.stage=0",)),
    "zero1@2": Setup("deepspeed", 2, ("zero_optimization.stage=1",)),
    "zero2@2": Setup("deepspeed", 2, ("zero_optimization.stage=2",)),
    "zero3@2": Setup("deepspeed", 2, ("zero_optimization.stage=3",)),
    "zero3+background@2": Setup("deepspeed", 2, ("zero_optimization.stage=3", "dsframe.checkpoints.asynchronous=true")),
    "zero3+cpu@2": Setup("deepspeed", 2, ("zero_optimization.stage=3", *_OFFLOAD)),
    "zero3+nvme@2": Setup("deepspeed", 2, ("zero_optimization.stage=3", *_NVME)),
    "zero3@1": Setup("deepspeed", 1, ("zero_optimization.stage=3",)),
    # DeepSpeed counts tensor-parallel ranks in train_batch_size: each step takes 12 samples here, too.
    "tp@2": Setup(
        "deepspeed", 2, ("tensor_parallel.autotp_size=2", "zero_optimization.stage=1", "train_batch_size=24")
    ),
    "pipeline@2": Setup("deepspeed", 2, ("zero_optimization.stage=0", "pipeline.stages=2")),
    "pipeline+zero1@4": Setup("deepspeed", 4, ("zero_optimization.stage=1", "pipeline.stages=2")),
    "sequence+zero1@2": Setup("deepspeed", 2, (_SEQUENCE, "zero_optimization.stage=1")),
    "llama single@1": Setup("single", 1, model="llama"),
    "llama ddp@3": Setup("ddp", 3, model="llama"),
    "llama sequence+zero1@2": Setup("deepspeed", 2, (_SEQUENCE, "zero_optimization.stage=1"), "llama"),
    "llama sequence+zero3@4": Setup("deepspeed", 4, (_SEQUENCE, "zero_optimization.stage=3"), "llama"),
    "llama pipeline@2": Setup("deepspeed", 2, ("zero_optimization.stage=0", "pipeline.stages=2"), "llama"),
    "mixtral ddp@3": Setup("ddp", 3, model="mixtral"),
    "mixtral experts+zero0@2": Setup("deepspeed", 2, (*_EXPERTS, "zero_optimization.stage=0"), "mixtral"),
    "mixtral experts+zero2@4": Setup("deepspeed", 4, (*_EXPERTS, "zero_optimization.stage=2"), "mixtral"),
    "mixtral experts+zero3@2": Setup("deepspeed", 2, (*_EXPERTS, "zero_optimization.stage=3"), "mixtral"),
}

_MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
_TEXT = {"context": 32, "corpus": "synthetic", "samples": 300}
MODELS = {
    "gpt": {"name": "language", "layers": 2, "width": 64, "context": 64, "corpus": "synthetic", "samples": 300},
    "llama": {
        "name": "causal-language-model",
        "model": {**LLAMA, "tie_word_embeddings": True},
        **_TEXT,
    },
    "mixtral": {"name": "causal-language-model", "model": _MIXTRAL, **_TEXT},
}
"""The tasks."""

_FILE = """{
  "train_batch_size": 12,
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 8, "total_num_steps": "auto", "warmup_max_lr": 0.002}},
  "dsframe": {
    "task": TASK,
    "checkpoints": {"keep_last": 9},
    "eval_micro_batch_size": 200,
    "eval_samples": 50,
    "log_every_steps": 1,
    "threads_per_rank": 1
  }
}
"""


CONFIG = _FILE.replace("TASK", json.dumps(MODELS["gpt"]))
"""The file of the first model."""


def train(
    setup,
    run_dir,
    *arguments,
    steps=STEPS,
    timeout_seconds=150,
    while_running=None,
):
    """One run in ``run_dir``; ``arguments`` are added to the command line of ``dsframe.train``.

    ``while_running`` is about processes of its own.
    """
    run_dir.parent.mkdir(exist_ok=True)
    config = run_dir.parent / f"portable-{setup.model}.json"
    config.write_text(_FILE.replace("TASK", json.dumps(MODELS[setup.model])))
    own = ["-m", "dsframe.train", "--config", str(config), "--run-dir", str(run_dir), "--engine", setup.engine]
    for override in (f"dsframe.steps={steps}", *setup.overrides):
        own += ["--set", override]
    own += arguments
    if any(override.endswith("=nvme") for override in setup.overrides):
        timeout_seconds = COMPILING_SECONDS
    elif while_running is None:
        return kept.run(run_dir.parent, own[2:], setup.processes)
    command = torchrun(setup.processes, own) if setup.processes > 1 else python(own)
    return run_ranks(command, timeout_seconds=timeout_seconds, cwd=run_dir.parent, while_running=while_running)


def uninterrupted(name, folder):
    """Trains from beginning to end, saving on the way, once for each ``folder``; the losses."""
    run_dir = folder / name
    if not (run_dir / "summary.json").exists():
        train(SETUPS[name], run_dir, "--set", f"dsframe.checkpoints.every_steps={SAVED_STEP}").check()
    return losses(run_dir)


def resumed(saved, name, folder):
    """Goes on under ``name`` from what ``saved`` has written; the losses from there on."""
    checkpoint = folder / saved / "checkpoints" / f"step-{SAVED_STEP:08}"
    run_dir = folder / f"{saved}-{name}"
    train(SETUPS[name], run_dir, "--resume", str(checkpoint)).check()
    return losses(run_dir)


def difference(saved, name, folder):
    """The largest difference of the losses after the resume from the uninterrupted run of ``saved``."""
    whole, rest = uninterrupted(saved, folder), resumed(saved, name, folder)
    expected = range(SAVED_STEP + 1, STEPS + 1)
    if list(rest) != list(expected):
        raise AssertionError(f"{saved} -> {name}: steps {list(rest)} instead of {expected}")
    return max(abs(whole[step] - rest[step]) for step in expected)


def matrix(names, folder, *, whole):
    """Prints the cells of setups of one model."""
    width = max(map(len, names)) + 1
    print(" " * width + "".join(f"{name:>{width}}" for name in names), flush=True)
    for saved in names:
        print(f"{saved:<{width}}", end="", flush=True)
        for name in names:
            wanted = whole or saved == name or names[0] in (saved, name)
            cell = f"{difference(saved, name, folder):.1e}" if wanted else ""
            print(f"{cell:>{width}}", end="", flush=True)
        print(flush=True)


def main(argv=None):
    """Prints a matrix for each model."""
    parser = argparse.ArgumentParser(prog="tests.portability", description=__doc__.splitlines()[0])
    parser.add_argument("--of", default=",".join(SETUPS), help="these setups, separated by commas")
    parser.add_argument("--whole", action="store_true", help="every pair")
    options = parser.parse_args(argv)
    names = options.of.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            if own := [name for name in names if SETUPS[name].model == model]:
                matrix(own, Path(folder), whole=options.whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
