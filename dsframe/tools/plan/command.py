"""``dsframe plan``: memory and communication of a file on any number of processes, and which strategies fit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.config import DEFAULT_CONFIG, Config
from dsframe.config import load as load_config
from dsframe.config.read import secrets
from dsframe.config.resolve import memory
from dsframe.text import amount, columns
from dsframe.tools.commands import add_overrides, command

if TYPE_CHECKING:
    from dsframe.tools.plan.choose import Plan, Strategy
    from dsframe.tools.plan.device import Device
    from dsframe.tools.plan.model import Model

_SHOWN = 10
"""Strategies that are printed without --all."""
EPILOG = """\
No training is started and nothing allocated: the model runs on torch's meta device.
Memory is that of the rank that needs most, at the fullest moment. With --wide: "total" in a step, "set-up" before the first
one, "host" in either. A GB is 10 to the 9 bytes. "tight" has less than a tenth to spare. Of the strategies that fit the
simplest comes first.

exit codes: 0 the file as it is written fits; 1 it does not; others as in training
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command(
        "plan", "The memory that a run takes of each rank, before it starts, and which strategies fit.", EPILOG
    )
    add = result.add_argument
    add("--config", default=DEFAULT_CONFIG, metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", default="1", metavar="N[,N...]", help="processes of the run (default 1)")
    add_overrides(result)
    add("--gpu-memory", metavar="80GB", help="plan for GPUs of this size (default: this machine)")
    add("--parameters", type=float, metavar="N", help="only a number of parameters, such as 7.5e9, instead of the task")
    add("--all", action="store_true", help="every strategy, and why others are not possible")
    add("--wide", action="store_true", help="every column: what memory consists of, and memory of the host")
    add("--write", type=Path, metavar="DIR", help="write a ready file for every strategy that fits")
    add("--format", choices=("text", "json"), default="text")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; 0 where the file fits as it is on every number of processes, else 1."""
    options = parser().parse_args(argv)
    try:
        counts = [int(text) for text in options.processes.split(",")]
        limit = memory.parse(options.gpu_memory) if options.gpu_memory else None
    except ValueError as error:
        parser().error(str(error))
    if min(counts) < 1:
        parser().error("-np must be at least 1")
    config = load_config(options.config, overrides=options.overrides)

    from dsframe.tools.plan import choose, device

    model = _model(config, options)
    engine = choose.engine_of(config)
    devices = [device.this_machine(engine, count) if limit is None else device.gpu(limit) for count in counts]
    plans = [choose.plan(config, model, each, count) for count, each in zip(counts, devices, strict=True)]
    if options.format == "json":
        print(_json(config, model, plans, devices))
    else:
        print(_text(config, model, plans, devices, options))
    if options.write:
        _write(options.write, config, plans)
    return 0 if all(plan.as_written.prediction.fits for plan in plans) else 1


def _model(config: Config, options: argparse.Namespace) -> Model:
    from dsframe import tasks
    from dsframe.engines import precision
    from dsframe.tools.plan.model import bare
    from dsframe.tools.plan.trace import traced

    if options.parameters:
        return bare(int(options.parameters), precision.parameter_dtype(config).itemsize)
    return traced(config, tasks.build(config.settings.task, config.settings.seed))


def _json(config: Config, model: Model, plans: Sequence[Plan], devices: Sequence[Device]) -> str:
    worlds = [
        {
            "world_size": plan.world_size,
            "device": {name: None if value == float("inf") else value for name, value in asdict(device).items()},
            "as_written": plan.as_written.prediction.to_json(),
            "strategies": [{"name": each.name} | each.prediction.to_json() for each in plan.strategies],
            "refused": dict(plan.refused),
        }
        for plan, device in zip(plans, devices, strict=True)
    ]
    report = {"file": str(config.path), "parameters": model.parameters, "flops_per_sample": model.flops(1)}
    return json.dumps(report | {"worlds": worlds}, indent=2)


def _text(
    config: Config, model: Model, plans: Sequence[Plan], devices: Sequence[Device], options: argparse.Namespace
) -> str:
    lines = [f"{config.path}: {memory.count(model.parameters)} parameters, {amount(model.flops(1), 3)}FLOP a sample"]
    for plan, device in zip(plans, devices, strict=True):
        samples = plan.as_written.prediction.batch.train_batch_size
        processes = "process" if plan.world_size == 1 else "processes"
        lines += ["", f"{plan.world_size:,} {processes}, {samples:,} samples a step", str(device)]
        shown = plan.strategies if options.all else plan.strategies[:_SHOWN]
        lines += (_wide if options.wide else _table)([plan.as_written, *shown])
        if not any(strategy.prediction.fits for strategy in (plan.as_written, *plan.strategies)):
            lines.append(_lack(plan, device))
        if options.all or not plan.strategies:
            lines += [f"not possible: {name}: {reason}" for name, reason in plan.refused.items()]
        elif len(shown) < len(plan.strategies):
            lines.append(f"{len(plan.strategies) - len(shown)} more with --all")
    return "\n".join(lines)


def _lack(plan: Plan, device: Device) -> str:
    """Why nothing fits, by what comes closest."""
    closest = min((plan.as_written, *plan.strategies), key=lambda strategy: strategy.prediction.fullness)
    held = closest.prediction.memory
    text = f"nothing fits: {closest.name} comes closest"
    if held.peak > device.memory_bytes:
        text += f", and needs {held.peak / 1e9:.3g} GB of a device's {device.memory_bytes / 1e9:.3g}"
    if held.host_peak > device.host_memory_bytes:
        text += f", and needs {held.host_peak / 1e9:.3g} GB of the {device.host_memory_bytes / 1e9:.3g} GB of a process's host"
    return f"{text}; take more processes, larger devices, or offload to NVMe"


_SHORT = (",,GB,GB of,GB", ",fits,a rank,its host,sent")
_HEADS = (
    ",,GB a rank:,,,,,,,,sent",
    ",fits,params,grads,optim,activ,buffers,total,set-up,host,GB",
)


def _named(strategy: Strategy) -> list[str]:
    """The strategy with its engine and its batch, and whether it fits."""
    p = strategy.prediction
    name = f"{strategy.name} ({p.engine}), {p.batch.micro_batch_size} x {p.batch.accumulation_steps}"
    return [name, "tight" if p.tight else "yes" if p.fits else "NO"]


def _table(strategies: Sequence[Strategy]) -> list[str]:
    """What decides: the fullest moment of a device and of its host, and bytes sent in a step."""
    rows = [head.split(",") for head in _SHORT]
    for strategy in strategies:
        p = strategy.prediction
        sizes = (p.memory.peak, p.memory.host_peak, sum(p.sent.values()))
        rows.append([*_named(strategy), *(f"{size / 1e9:.3g}" for size in sizes)])
    return columns(rows, left=1)


def _wide(strategies: Sequence[Strategy]) -> list[str]:
    rows = [head.split(",") for head in _HEADS]
    for strategy in strategies:
        held = strategy.prediction.memory
        sizes = (held.parameters, held.gradients, held.optimizer, held.activations, held.buffers + held.base)
        moments = (held.total, held.setup, held.host_peak, sum(strategy.prediction.sent.values()))
        rows.append([*_named(strategy), *(f"{size / 1e9:.3g}" for size in (*sizes, *moments))])
    return columns(rows, left=1)


def _write(folder: Path, config: Config, plans: Sequence[Plan]) -> None:
    """A file for every strategy that fits, best first."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = config.path.stem if config.path else "plan"
    written = 0
    for plan in plans:
        fitting = [strategy for strategy in plan.strategies if strategy.prediction.fits]
        for rank, strategy in enumerate(fitting, start=1):
            words = "-".join("".join(c if c.isalnum() else " " for c in strategy.name.lower()).split())
            path = folder / f"{stem}-np{plan.world_size}-{rank:02}-{words}.json"
            path.write_text(json.dumps(secrets.without(dict(strategy.file)), indent=2) + "\n", encoding="utf-8")
            written += 1
    print(f"{written} files in {folder}", file=sys.stderr)
