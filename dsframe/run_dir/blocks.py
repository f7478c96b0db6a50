"""The blocks of labelled lines at the start and end of a run: what will be trained, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.engines import precision
from dsframe.results import best_step
from dsframe.text import Json, clock, columns

if TYPE_CHECKING:
    import torch

    from dsframe.config.schema.scheduler import Scheduler
    from dsframe.config.value import Config
    from dsframe.engine import Engine
    from dsframe.model.parts import Part
    from dsframe.model.plan import Plan
    from dsframe.results import Summary
    from dsframe.tasks.task import Task

_WIDTH, _MOST_MODULES = 10, 10
_SHOWN = ("lr", "betas", "momentum", "weight_decay")


def lines(rows: Sequence[tuple[str, str]], *, colour: bool) -> list[str]:
    """Returns a line for each (label, value); labels are dim if the terminal has colours."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if colour else ("", "")
    return [f"  {dim}{label:<{_WIDTH}}{plain}  {value}" for label, value in rows if value]


def header(
    plan: Plan, engine: Engine, *, samples: int, held_out: int, steps: int | None, threads: int
) -> list[tuple[str, str]]:
    """Returns rows about the training, or with ``steps`` None the evaluation. ``samples``, ``held_out``: sizes of
    training and validation data; ``threads``: per process."""
    world, batch, task = plan.world, plan.batch, plan.task
    sizes = f"{batch.micro_batch_size} x {batch.accumulation_steps} x {batch.data_parallel_size}"
    rows = [
        ("model", ", ".join([type(task).__name__, *_parameters(engine.built.parts)])),
        *(("", line) for line in model_table(engine.built.parts)),
        ("data", f"{samples:,} samples" + (f", {held_out:,} to evaluate on" if held_out else ", no evaluation")),
        ("engine", engine.description),
        ("processes", f"{world.size} x {plan.device.type} under {world.launcher}, {threads} thread(s) each"),
        ("batch", f"{batch.train_batch_size} = {sizes} (micro-batch x accumulation x processes)"),
        ("precision", _precision(plan.config, plan.device)),
    ]
    if steps is None:
        return [row for row in rows if row[0] != "batch"]
    return [
        *rows,
        ("optimizer", _optimizer(plan)),
        ("schedule", _schedule(plan.config, plan.task)),
        ("training", f"{steps:,} steps"),
        ("results", str(plan.directory)),
    ]


def model_table(parts: Sequence[Part]) -> list[str]:
    """Returns a line for each part of a model: name, class, parameters, and how many are trained if not all are.

    Equal parts in a row share one line; a model of one part has no table.
    """
    rows = [list(alike) for _, alike in groupby(parts, key=lambda part: (part.kind, part.parameters, part.trained))]
    if len(rows) < 2:
        return []
    partly = any(part.parameters != part.trained for part in parts)
    table = [_module(alike, partly=partly) for alike in rows[:_MOST_MODULES]]
    hidden_rows = len(rows) - _MOST_MODULES
    return [*columns(table, left=2), *([f"and {hidden_rows} more"] if hidden_rows > 0 else [])]


def _module(alike: Sequence[Part], *, partly: bool) -> list[str]:
    first, count = alike[0], len(alike)
    cells = [first.name, first.kind]
    if count > 1:
        cells = [f"{first.name} to {alike[-1].name}", f"{count} x {first.kind}"]
    trained_text = f"{count * first.trained:,} trained" if first.trained else "frozen"
    return [*cells, f"{count * first.parameters:,}", *([trained_text] if partly else [])]


def _parameters(parts: Sequence[Part]) -> list[str]:
    if not parts:
        return []
    size, trained = sum(part.parameters for part in parts), sum(part.trained for part in parts)
    return [f"{size:,} parameters", *([f"{trained:,} of them trained"] if trained != size else [])]


def _precision(config: Config, device: torch.device) -> str:
    parameters = precision.parameter_dtype(config)
    name = str(parameters).removeprefix("torch.")
    cast = precision.autocast_dtype(config, device)
    if cast is not None:
        return f"{name}, products in {str(cast).removeprefix('torch.')} (autocast)"
    if not precision.is_short(parameters):
        return name
    kept = ", ".join(config.settings.model.keep_in_fp32)
    exceptions = f" but {kept}" if kept else ""
    return f"{name} for all parameters{exceptions}, with fp32 masters"


def _optimizer(plan: Plan) -> str:
    """Returns optimizer and clipping as they are, whether or not the file sets them."""
    spec, clipping = plan.optimizer, plan.config.deepspeed.gradient_clipping
    values = {**spec.arguments, "lr": spec.learning_rate}
    hyperparameters = [f"{key} {values[key]:g}" for key in _SHOWN if isinstance(values.get(key), int | float)]
    inherited = any(resolved.path == ("gradient_clipping",) for resolved in plan.config.inherited)
    clipped = f"gradients clipped to {clipping:g}" if clipping else "gradients not clipped"
    return f"{', '.join([spec.name, *hyperparameters])}; {clipped}{' (inherited)' if inherited else ''}"


def _schedule(config: Config, task: Task) -> str:
    scheduler = config.deepspeed.scheduler
    task_name = type(task).__name__
    decay = f", weight decay by {task_name}.weight_decay" if task.weight_decay(0) is not None else ""
    return (_schedule_of_file(scheduler) if task.schedule(0) is None else f"rate by {task_name}.schedule") + decay


def _schedule_of_file(scheduler: Scheduler | None) -> str:
    if scheduler is None:
        return "constant rate"
    params = dict(scheduler.params)
    if scheduler.type == "WarmupDecayLR":
        params.setdefault("warmup_max_lr", 1e-3)  # DeepSpeed's default, independent of the optimizer's rate
    counts = {key: value for key, value in params.items() if isinstance(value, int) and key.endswith(_COUNTS)}
    rates = {key: value for key, value in params.items() if isinstance(value, float) and key.endswith("_lr")}
    details = [f"{key} {value:g}" for key, value in rates.items()] + [
        f"{key} {value:,}" for key, value in counts.items()
    ]
    return ", ".join([scheduler.type, *details])


_COUNTS = ("_steps", "_iters", "T_max", "step_size")


def ending(summary: Summary, directory: Path, best: tuple[str, float, int] | None) -> list[tuple[str, str]]:
    """Returns rows with the results. ``best``: metric, value and step of the best evaluation."""
    peak = max(summary.peak_memory_bytes) / 2**20
    speed = f"{summary.steps:,} steps in {clock(summary.seconds)}, {summary.rate:,.0f} {summary.unit}/s"
    folder = directory / "checkpoints"
    checkpoint, pointer = folder / f"step-{summary.steps:08}", folder / "best"
    saved = folder / pointer.read_text().strip() if pointer.is_file() else None
    return [
        ("training", f"{speed}, peak {peak:,.0f} MiB a rank"),
        ("ended by", summary.stopped),
        ("loss", f"{summary.loss:.4f} in the last step"),
        ("evaluation", "  ".join(f"{name} {value:.4f}" for name, value in summary.metrics.items())),
        ("best", f"{best[0]} {best[1]:.4f} after step {best[2]:,}" if best else ""),
        ("best saved", str(saved) if saved else ""),
        ("checkpoint", str(checkpoint) if checkpoint.is_dir() else ""),
        ("next", f"dsframe report {directory}"),
    ]


def best_of(records: Sequence[Json], wanted: str | None) -> tuple[str, float, int] | None:
    """Returns metric, value and step of the best evaluation; None if there are fewer than two.

    ``wanted``: ``NAME:min`` or ``NAME:max``. None: the smallest loss, of the first data set that has one.
    """
    evaluations = {int(record["step"]): record["evaluation"] for record in records if record.get("evaluation")}
    names = dict.fromkeys(name for evaluation in evaluations.values() for name in evaluation)
    wanted = wanted or next((f"{name}:min" for name in names if name.rpartition("/")[2] == "loss"), "loss:min")
    step, name = best_step(evaluations, wanted), wanted.partition(":")[0]
    if step is None or sum(evaluation.get(name) is not None for evaluation in evaluations.values()) < 2:
        return None
    return name, float(evaluations[step][name]), step
