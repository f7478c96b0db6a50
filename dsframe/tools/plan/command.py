"""``dsframe plan``: predicts a run's memory on any number of processes, and lists strategies that fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsframe.config import Config, default_config
from dsframe.config import load as load_config
from dsframe.config.read import secrets
from dsframe.config.resolve import memory
from dsframe.text import columns
from dsframe.tools.commands import Argv, add_overrides, command

if TYPE_CHECKING:
    from dsframe.tools.plan.choose import Plan, Strategy
    from dsframe.tools.plan.device import Device
    from dsframe.tools.plan.model import Model

_SHOWN = 10
"""Strategies printed without --all."""
_COLUMNS = "fits,a rank,its host"
EPILOG = """\
The model runs on torch's meta device, so nothing is allocated. --format json has
parameters, gradients, optimizer state, activations and buffers apart.
GB (10 to the 9 bytes) are those of the rank that needs most: "a rank" on its device at the fullest
moment, "its host" in the memory of its node. "tight" has less than a tenth to spare.
Of the strategies that fit the simplest comes first.

exit codes: 0 the file as it is written fits; 1 it does not; others as in training
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "The memory that a run takes of each rank, before it starts, and which strategies fit."
    result = command("plan", about, EPILOG)
    add = result.add_argument
    add("--config", default=default_config(), metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", default="1", metavar="N[,N...]", help="processes of the run (default 1)")
    add_overrides(result)
    add("--gpu-memory", metavar="80GB", help="plan for GPUs of this size (default: this machine)")
    add("--parameters", type=number, metavar="N", help="only a number of parameters, such as 7B or 7.5e9")
    add("--all", action="store_true", help="every strategy, and why others are not possible")
    add("--format", choices=("text", "json"), default="text", help="json holds each strategy's file")
    return result


def number(text: str) -> float:
    """Returns 7e9 for ``7B``. Raises ValueError if it is not a number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    return float(text[:-1]) * unit if unit else float(text)


def main(argv: Argv = None) -> int:
    """Prints the plan; returns 0 if the original file fits on every number of processes, else 1."""
    options = parser().parse_args(argv)
    try:
        counts = [int(text) for text in options.processes.split(",")]
        limit = memory.parse(options.gpu_memory) if options.gpu_memory else None
    except ValueError as error:
        parser().error(str(error))
    if min(counts) < 1:
        parser().error("-np must be at least 1")
    config = load_config(options.config, overrides=options.overrides)

    from dsframe.tools.check import of_no_task
    from dsframe.tools.plan import choose, device

    model = _model(config, options.parameters)
    planned: list[tuple[Plan, Device]] = []
    for count in counts:
        of_rank = device.gpu(limit) if limit else device.this_machine(count)
        planned.append((choose.plan(config, model, of_rank, count), of_rank))
    if options.format == "json":
        worlds = [_json(plan) for plan, _ in planned]
        print(json.dumps({"file": str(config.path), "parameters": model.parameters, "worlds": worlds}, indent=2))
    else:
        print(f"{config.path}: {memory.count(model.parameters)} parameters")
        if not options.parameters and (note := of_no_task(config)):
            print(f"{config.path}: {note}")
        for plan, of_rank in planned:
            print("\n".join(_text(plan, of_rank, every=options.all)))
    return 0 if all(plan.fits for plan, _ in planned) else 1


def _model(config: Config, parameters: float | None) -> Model:
    from dsframe import tasks
    from dsframe.engines import precision
    from dsframe.tools.plan.model import Model, traced

    if parameters:
        return Model(int(parameters), precision.parameter_dtype(config).itemsize)
    return traced(config, tasks.build(config.settings.task, config.settings.seed))


def _json(plan: Plan) -> dict[str, object]:
    return {
        "world_size": plan.world_size,
        "as_written": plan.as_written.prediction.to_json(),
        "strategies": [
            {"name": each.name, "file": secrets.without(dict(each.file))} | each.prediction.to_json()
            for each in plan.strategies
        ],
        "refused": dict(plan.refused),
    }


def _text(plan: Plan, device: Device, *, every: bool) -> Iterator[str]:
    samples = plan.as_written.prediction.batch.train_batch_size
    processes = "process" if plan.world_size == 1 else "processes"
    yield f"\n{plan.world_size:,} {processes}, {samples:,} samples a step\n{device}"
    shown = plan.strategies if every else plan.strategies[:_SHOWN]
    yield from columns([["", *_COLUMNS.split(",")], *map(_row, [plan.as_written, *shown])], left=1)
    if not any(strategy.prediction.fits for strategy in (plan.as_written, *plan.strategies)):
        yield _lack(plan)
    if every or not plan.strategies:
        yield from (f"not possible: {name}: {reason}" for name, reason in plan.refused.items())
    elif len(shown) < len(plan.strategies):
        yield f"{len(plan.strategies) - len(shown)} more with --all"


def _row(strategy: Strategy) -> list[str]:
    p = strategy.prediction
    name = f"{strategy.name} ({p.engine}), {p.batch.micro_batch_size} x {p.batch.accumulation_steps}"
    fits = "tight" if p.tight else "yes" if p.fits else "NO"
    return [name, fits, *(f"{size / 1e9:.3g}" for size in (p.memory.total, p.memory.host))]


def _lack(plan: Plan) -> str:
    closest = min((plan.as_written, *plan.strategies), key=lambda each: each.prediction.fullness)
    text = (
        f"nothing fits: {closest.name} comes closest, and needs {closest.prediction.fullness:.1f} times what there is"
    )
    return f"{text}; take more processes, larger devices, or offload to NVMe"
