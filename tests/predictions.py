"""What ``dsframe plan`` predicts beside what runs on this machine take: memory of a rank, seconds of a step.

    python -m tests.predictions [CASE ...] [--repeats N]       # prints the table (make predictions)

Each case is trained for a few steps as a user would train it, and its directory tells both. Memory is what the process
holds at its fullest beyond what it held before the engine was made (the interpreter, torch, DeepSpeed, the data: measured by
the run itself and taken off both sides), on the rank that needs most. Seconds are the mean of the steps after the first, beside
a calibration of this machine (``dsframe plan --calibrate``) for that model, number format and number of processes. On a machine
that others share its speed changes from one minute to the next: so the machine is calibrated anew, just before, for each of the
trainings, and medians of both are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsframe import tasks
from dsframe.config import load
from dsframe.run_dir.record import read_summary
from dsframe.tools import subprocess_runs
from dsframe.tools.plan import hardware
from dsframe.tools.plan.calibrate import calibrate
from dsframe.tools.plan.report_prediction import predicted
from dsframe.tools.plan.trace import traced

MEDIAN_MEMORY, WORST_MEMORY, WORST_SECONDS = 0.10, 0.25, 0.30
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
class Found:
    """Predicted and measured: bytes beyond the base, seconds of a step."""

    name: str
    base: float
    memory: tuple[float, float]
    seconds: tuple[float | None, float]

    @property
    def memory_error(self) -> float:
        return self.memory[0] / self.memory[1] - 1

    @property
    def seconds_error(self) -> float | None:
        """None where the machine was not calibrated."""
        guess, measured = self.seconds
        return None if guess is None else guess / measured - 1


def measure(
    names: Sequence[str], folder: Path, *, calibrated: bool = True, repeats: int = 1, steps: int = STEPS
) -> Iterator[Found]:
    """Calibrates and trains ``repeats`` times. Cases that one calibration serves come one after the other, in one turn."""
    text = folder / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 1500)
    together: dict[tuple[str, int, bool], list[str]] = {}
    for name in names:
        case = CASES[name]
        (folder / f"{name}.json").write_text(json.dumps(case.file(text, steps)))
        together.setdefault((case.model, case.ranks, "bf16" in case.changes), []).append(name)
    for group in together.values():
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in group}
        for turn in range(1, repeats + 1):
            overrides = _calibrated(group[0], folder) if calibrated else []
            for name in group:
                print(f"training {name}, {turn} of {repeats}", file=sys.stderr, flush=True)
                directory = folder / f"{name}-{turn}"
                subprocess_runs.train(folder / f"{name}.json", CASES[name].ranks, directory, overrides=overrides)
                summary = read_summary(directory)
                runs[name].append(summary | {"predicted": predicted(directory, summary)})
        for name in group:
            yield _found(name, runs[name])


def _calibrated(name: str, folder: Path) -> list[str]:
    """What a training of this case needs so that it knows how fast the machine is now."""
    print(f"calibrating for {name}", file=sys.stderr, flush=True)
    config, file = load(folder / f"{name}.json"), folder / "machine.json"
    model = traced(config, tasks.build(config.settings.task, config.settings.seed))
    hardware.write(calibrate(config, model, CASES[name].ranks), file)
    return [f"dsframe.hardware={file}"]


def _found(name: str, runs: Sequence[dict[str, Any]]) -> Found:
    guesses = [run["predicted"] for run in runs]
    for guess in guesses:
        if "problem" in guess:
            raise SystemExit(f"{name}: no prediction: {guess['problem']}")
    peak = statistics.median(max(run["peak_memory_bytes"]) - run["predicted"]["base_bytes"] for run in runs)
    memory = statistics.median(guess["memory_bytes"] - guess["base_bytes"] for guess in guesses)
    seconds = statistics.median(run["units_per_step"] / run["rate"] for run in runs)
    expected = [guess["seconds_per_step"] for guess in guesses if guess["seconds_per_step"] is not None]
    base = statistics.median(guess["base_bytes"] for guess in guesses)
    return Found(name, base, (memory, peak), (statistics.median(expected) if expected else None, seconds))


HEAD = f"""\
{"":22} {"memory of a rank, MiB":>35}   {"step, ms":>25}
{"":22} {"base":>6} {"predicted":>10} {"measured":>9} {"error":>6}   {"predicted":>9} {"measured":>8} {"error":>6}"""


def row(one: Found) -> str:
    """One line of the table."""
    base, guess, peak = (size / 2**20 for size in (one.base, *one.memory))
    line = f"{one.name:22} {base:6,.0f} {guess:10,.0f} {peak:9,.0f} {one.memory_error:+6.0%}"
    if one.seconds_error is None or one.seconds[0] is None:
        return line
    expected, measured = (1e3 * value for value in (one.seconds[0], one.seconds[1]))
    return f"{line}   {expected:9,.0f} {measured:8,.0f} {one.seconds_error:+6.0%}"


def verdict(found: Sequence[Found]) -> tuple[str, bool]:
    """The errors' medians and worst, and whether they are within the bounds."""
    memory = [abs(one.memory_error) for one in found]
    times = [abs(one.seconds_error) for one in found if one.seconds_error is not None]
    lines = [f"memory: median error {statistics.median(memory):.0%}, worst {max(memory):.0%}"]
    good = statistics.median(memory) <= MEDIAN_MEMORY and max(memory) <= WORST_MEMORY
    if times:
        lines.append(f"seconds of a step: median error {statistics.median(times):.0%}, worst {max(times):.0%}")
        good = good and max(times) <= WORST_SECONDS
    return "\n".join(lines), good


def main() -> int:
    """Prints the table; 1 where an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}; default: all"
    )
    parser.add_argument("--memory-only", action="store_true", help="no calibration, and no seconds")
    parser.add_argument(
        "--repeats", type=int, default=3, help="calibrations and trainings of each, whose medians count (default 3)"
    )
    given = parser.parse_args()
    found = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="dsframe-predictions-") as folder:
        names = given.cases or list(CASES)
        for one in measure(names, Path(folder), calibrated=not given.memory_only, repeats=given.repeats):
            found.append(one)
            print(row(one), flush=True)
    text, good = verdict(found)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
