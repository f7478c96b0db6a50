"""What ``dsframe plan`` predicts of a rank's memory, and what runs on this machine take.

    python -m tests.predictions [CASE ...]       # prints the table (make predictions)

Each case is trained for a few steps. Memory is what the process holds at its fullest beyond what it held
before the engine was made (the interpreter, torch, DeepSpeed, the data), on the rank that needs most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsframe import tasks
from dsframe.config import load
from dsframe.run_dir.record import read_summary
from dsframe.tools import subprocess_runs
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.footprint import predict
from dsframe.tools.plan.model import traced

MEDIAN_ERROR, WORST_ERROR = 0.10, 0.25
"""Errors that are allowed, as shares of what was measured."""
STEPS = 5

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": ({"name": "language", "layers": 6, "heads": 8, "width": 512, "context": 256}, 2),
    "llama": (
        {
            "name": "causal-language-model",
            "model": {
                "model_type": "llama",
                "hidden_size": 512,
                "intermediate_size": 1376,
                "num_hidden_layers": 6,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
            "context": 256,
        },
        2,
    ),
    "cnn": ({"name": "vision", "model": "cnn", "dataset": "synthetic", "image_size": 128, "samples": 256}, 128),
    "resnet18": (
        {"name": "vision", "model": "resnet18", "dataset": "synthetic", "image_size": 64, "samples": 256},
        32,
    ),
}
"""Tasks, and samples of a micro-batch. Large enough that a model's memory is some hundred MB."""
BF16 = {"bf16": {"enabled": True}}


@dataclass(frozen=True)
class Case:
    """One file on one number of processes."""

    engine: str
    model: str
    ranks: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    """Micro-batches."""

    def file(self, text: Path, steps: int = STEPS) -> dict[str, Any]:
        task, rows = MODELS[self.model]
        if "context" in task:
            task = task | {"corpus": str(text)}
        return {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": self.steps,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            **self.changes,
            "dsframe": {"task": task, "steps": steps, "log_every_steps": 1, "engine": self.engine},
        }


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


CPU = {"device": "cpu"}
CASES: dict[str, Case] = {
    "single gpt fp32": Case("single", "gpt", 1),
    "single resnet18 fp32": Case("single", "resnet18", 1),
    "single cnn bf16": Case("single", "cnn", 1, BF16),
    "ddp gpt bf16": Case("ddp", "gpt", 2, BF16),
    "ddp resnet18 fp32": Case("ddp", "resnet18"),
    "horovod gpt fp32": Case("horovod", "gpt"),
    "horovod cnn fp32": Case("horovod", "cnn"),
    "zero1 llama fp32": Case("deepspeed", "llama", 2, zero(1)),
    "zero2 gpt bf16": Case("deepspeed", "gpt", 2, zero(2) | BF16, 2),
    "zero2 resnet18 fp32": Case("deepspeed", "resnet18", 2, zero(2)),
    "zero3 llama fp32": Case("deepspeed", "llama", 2, zero(3)),
    "zero3 gpt bf16": Case("deepspeed", "gpt", 2, zero(3) | BF16),
    "zero3+cpu gpt fp32": Case("deepspeed", "gpt", 2, zero(3, offload_optimizer=CPU, offload_param=CPU)),
    "fsdp gpt fp32": Case("fsdp", "gpt"),
    "fsdp llama bf16": Case("fsdp", "llama", 2, BF16),
    "pipeline gpt fp32": Case("deepspeed", "gpt", 2, {"pipeline": {"stages": 2}}, 4),
    "tensor gpt fp32": Case("deepspeed", "gpt", 2, zero(1) | {"tensor_parallel": {"autotp_size": 2}}),
    "tensor llama bf16": Case("deepspeed", "llama", 2, zero(1) | BF16 | {"tensor_parallel": {"autotp_size": 2}}),
}


@dataclass(frozen=True)
class Comparison:
    """Bytes beyond the base of a process, predicted and measured."""

    name: str
    base: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        base, guess, peak = (size / 2**20 for size in (self.base, self.predicted, self.measured))
        return f"{self.name:22} {base:6,.0f} {guess:10,.0f} {peak:9,.0f} {self.error:+6.0%}"


def measure(names: Sequence[str], folder: Path, steps: int = STEPS) -> Iterator[Comparison]:
    """Trains each case."""
    text = folder / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 1500)
    for name in names:
        print(f"training {name}", file=sys.stderr, flush=True)
        (folder / f"{name}.json").write_text(json.dumps(CASES[name].file(text, steps)))
        directory = folder / name
        subprocess_runs.train(folder / f"{name}.json", CASES[name].ranks, directory)
        summary = read_summary(directory)
        base = summary["base_bytes"]
        yield Comparison(name, base, predicted(directory, summary), max(summary["peak_memory_bytes"]) - base)


def predicted(directory: Path, summary: Mapping[str, Any]) -> float:
    """Bytes of the fullest rank of a finished run beyond its base."""
    config = load(directory / "config.json")
    model = traced(config, tasks.build(config.settings.task, config.settings.seed))
    device = Device("any", float("inf"), on_cpu=summary["device"] != "cuda")
    return predict(config, summary["engine"], model, device, summary["world_size"]).memory.total


def verdict(rows: Sequence[Comparison]) -> tuple[str, bool]:
    """Returns the median and the worst error, and whether they are within the bounds."""
    errors = [abs(row.error) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    return f"memory: median error {median:.0%}, worst {worst:.0%}", median <= MEDIAN_ERROR and worst <= WORST_ERROR


def main() -> int:
    """Prints the table; 1 where an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}; default: all"
    )
    names = parser.parse_args().cases or list(CASES)
    print(f"{'':22} {'memory of a rank, MiB':>34}\n{'':22}   base  predicted  measured  error", flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="dsframe-predictions-") as folder:
        for row in measure(names, Path(folder)):
            rows.append(row)
            print(row, flush=True)
    text, good = verdict(rows)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
