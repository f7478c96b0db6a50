"""``dsframe plan``: memory, communication and time of a file on any number of processes, and which strategies fit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.config import DEFAULT_CONFIG, Config
from dsframe.config import load as load_config
from dsframe.config.read import secrets
from dsframe.config.resolve import memory
from dsframe.text import amount, columns
from dsframe.tools.commands import add_overrides, command
from dsframe.tools.plan import hardware as machines
from dsframe.tools.report.pictures import Axis, Bar, Bars, Chart, Line, write

if TYPE_CHECKING:
    from dsframe.tools.plan.choose import Strategy
    from dsframe.tools.plan.hardware import Hardware
    from dsframe.tools.plan.model import Model

_DRAWN = 7
"""Strategies in a picture, beside the file itself: more cannot be told apart."""
EPILOG = f"""\
Nothing is started and nothing allocated: the model runs on torch's meta device. Times are a roofline and rings at
{machines.COMPUTE_SHARE:.0%} of a device's peak and {machines.TRANSFER_SHARE:.0%} of its bandwidths, an assumption;
--calibrate replaces it by a measurement.
Memory is that of the rank that needs most, at the fullest moment. With --wide: "total" in a step, "set-up" before the first
one, "host" in either. A GB is 10 to the 9 bytes. "tight" has less than a tenth to spare.

exit codes: 0 the file as it is written fits; 1 it does not; others as in training
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command("plan", "What a run takes of each rank, before it starts, and which strategies fit.", EPILOG)
    add = result.add_argument
    add("--config", default=DEFAULT_CONFIG, metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", default="1", metavar="N[,N...]", help="processes of the run (default 1)")
    add_overrides(result)
    add("--hardware", metavar="NAME", help=f"{', '.join(machines.TABLE)}, or a JSON file (default a100)")
    add("--gpu-memory", metavar="80GB", help="memory of one device, instead of the hardware's")
    add("--calibrate", action="store_true", help="measure this machine for some seconds, and plan for it")
    add("--save-hardware", type=Path, metavar="FILE.json", help="write the hardware down, for --hardware")
    add("--rate", type=float, metavar="N", help="samples a second that one device is known to train")
    add("--parameters", type=float, metavar="N", help="only a number of parameters, such as 7.5e9, instead of the task")
    add("--all", action="store_true", help="every strategy, not the first ten")
    add("--wide", action="store_true", help="every column: what memory and time consist of, and memory of the host")
    add("--write", type=Path, metavar="DIR", help="write a ready file for every strategy that fits")
    add("--plot", type=Path, metavar="FILE.svg|png|pdf", help="memory and time over the number of processes")
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

    from dsframe.tools.plan import choose

    model, machine = _facts(config, options, max(counts))
    if limit is not None:
        machine = replace(machine, memory_bytes=float(limit))
    seconds_each = 1 / options.rate if options.rate else None
    report: dict[str, Any] = {
        "file": str(config.path),
        "parameters": model.parameters,
        "flops_per_sample": model.flops(1),
        "hardware": asdict(machine),
        "worlds": [],
    }
    found: list[tuple[int, Strategy, list[Strategy]]] = []
    for count in counts:
        own = choose.as_written(config, model, machine, count, seconds_each)
        found.append((count, own, choose.strategies(config, model, machine, count, seconds_each)))
    if options.format == "json":
        for count, own, others in found:
            each = [{"name": s.name} | s.prediction.to_json() for s in others]
            report["worlds"].append({"world_size": count, "as_written": own.prediction.to_json(), "strategies": each})
        print(json.dumps(report, indent=2))
    else:
        print(_text(config, model, machine, found, options))
    if options.write:
        _write(options.write, config, found)
    if options.plot:
        write(options.plot, pictures(found, machine))
    if options.save_hardware:
        machines.write(machine, options.save_hardware)
    return 0 if all(own.prediction.fits for _, own, _ in found) else 1


def _facts(config: Config, options: argparse.Namespace, processes: int) -> tuple[Model, Hardware]:
    """The model and the machine."""
    from dsframe import tasks
    from dsframe.engines import precision
    from dsframe.tools.plan import model as models
    from dsframe.tools.plan import trace

    machine = machines.find(options.hardware or "a100")
    if options.parameters:
        return models.bare(int(options.parameters), precision.parameter_dtype(config).itemsize), machine
    task = tasks.build(config.settings.task, config.settings.seed)
    model = trace.traced(config, task)
    if not options.calibrate:
        return model, machine
    from dsframe.tools.plan.calibrate import calibrate

    return model, calibrate(config, model, processes)


def _text(
    config: Config,
    model: Model,
    machine: Hardware,
    found: list[tuple[int, Strategy, list[Strategy]]],
    options: argparse.Namespace,
) -> str:
    lines = [f"{config.path}: {memory.count(model.parameters)} parameters, {amount(model.flops(1), 3)}FLOP a sample"]
    lines.append(str(machine))
    for count, own, others in found:
        batch = own.prediction.batch
        lines.append("")
        lines.append(f"{count:,} {'processes' if count > 1 else 'process'}, {batch.train_batch_size:,} samples a step")
        shown = others if options.all else others[:10]
        lines += _wide([own, *shown]) if options.wide else _table([own, *shown])
        if not any(strategy.prediction.fits for strategy in others):
            lines.append(_lack(others, machine))
        if len(shown) < len(others):
            lines.append(f"{len(others) - len(shown)} more with --all")
    return "\n".join(lines)


def _lack(others: Sequence[Strategy], machine: Hardware) -> str:
    """Why nothing fits, by what comes closest."""
    if not others:
        return "nothing fits: no strategy takes this batch on so many processes; choose a train_batch_size that they divide"
    closest = others[0]
    held = closest.prediction.memory
    text = f"nothing fits: {closest.name} comes closest"
    if held.peak > machine.memory_bytes:
        text += f", and needs {held.peak / 1e9:.3g} GB of a device's {machine.memory_bytes / 1e9:.3g}"
    if held.host_peak > machine.host_memory_bytes:
        text += f", and needs {held.host_peak / 1e9:.3g} GB of the {machine.host_memory_bytes / 1e9:.3g} GB of a process's host"
    return f"{text}; take more processes, larger devices, or offload to NVMe"


_SHORT = (",,GB,GB,ms,", ",fits,a rank,sent,a step,samples/s")
_HEADS = (
    ",,GB a rank:,,,,,,,,sent;,ms a step:,,,,",
    ",fits,params,grads,optim,activ,buffers,total,set-up,host,GB,compute,wait,bubble,update,samples/s",
)


def _named(strategy: Strategy) -> list[str]:
    """The strategy with its engine and its batch, and whether it fits."""
    p = strategy.prediction
    name = f"{strategy.name} ({p.engine}), {p.batch.micro_batch_size} x {p.batch.accumulation_steps}"
    return [name, "tight" if p.tight else "yes" if p.fits else "NO"]


def _table(strategies: Sequence[Strategy]) -> list[str]:
    """What decides: the fullest moment of a device, bytes sent in a step, a step's time and the rate."""
    rows = [head.split(",") for head in _SHORT]
    for strategy in strategies:
        p = strategy.prediction
        seconds = p.batch.train_batch_size / p.rate if p.rate else 0.0
        sizes = [f"{size / 1e9:.3g}" for size in (p.memory.peak, sum(p.sent.values()))]
        rows.append(
            [*_named(strategy), *sizes, f"{seconds * 1e3:,.4g}", f"{p.rate:{',.0f' if p.rate >= 1000 else '.4g'}}"]
        )
    return columns(rows, left=1)


def _wide(strategies: Sequence[Strategy]) -> list[str]:
    rows = [head.split(",") for head in _HEADS]
    for strategy in strategies:
        p = strategy.prediction
        held, time = p.memory, p.seconds
        sizes = (held.parameters, held.gradients, held.optimizer, held.activations, held.buffers + held.reserved)
        values = [
            f"{size / 1e9:.3g}" for size in (*sizes, held.total, held.setup, held.host_peak, sum(p.sent.values()))
        ]
        times = [f"{value * 1e3:,.4g}" for value in (time.compute, time.waiting, time.bubble, time.update)]
        rows.append([*_named(strategy), *values, *times, f"{p.rate:,.4g}"])
    return columns(rows, left=1)


def _write(folder: Path, config: Config, found: list[tuple[int, Strategy, list[Strategy]]]) -> None:
    """A file for every strategy that fits, best first."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = config.path.stem if config.path else "plan"
    written = 0
    for count, _, others in found:
        for rank, strategy in enumerate((s for s in others if s.prediction.fits), start=1):
            words = "-".join("".join(c if c.isalnum() else " " for c in strategy.name.lower()).split())
            path = folder / f"{stem}-np{count}-{rank:02}-{words}.json"
            path.write_text(json.dumps(secrets.without(dict(strategy.file)), indent=2) + "\n", encoding="utf-8")
            written += 1
    print(f"{written} files in {folder}", file=sys.stderr)


def pictures(found: Sequence[tuple[int, Strategy, Sequence[Strategy]]], hardware: Hardware) -> list[Chart] | list[Bars]:
    """Memory of a rank and seconds of a step: lines over the number of processes, bars where there is one number.

    ``found``: processes, the file as written, the strategies, best first.
    """
    names = {strategy.name: 0 for _, _, others in found for strategy in others}
    for _, _, others in found:
        for rank, strategy in enumerate(others):
            names[strategy.name] += max(0, 100 - rank)
    best = sorted(names, key=lambda name: -names[name])[:_DRAWN]
    chosen = {"as written": [(count, own) for count, own, _ in found]}
    for name in best:
        chosen[name] = [(count, one) for count, _, others in found for one in others if one.name == name]
    if len(found) == 1:
        return _at_one(found[0][0], {name: points[0][1] for name, points in chosen.items()}, hardware)
    across = Axis("processes", log=True, whole=True)
    held = [Line(n, [(c, s.prediction.memory.peak / 1e9) for c, s in points]) for n, points in chosen.items()]
    times = [Line(n, [(c, s.prediction.seconds.step) for c, s in points]) for n, points in chosen.items()]
    limit = (f"{hardware.name}: {hardware.memory_bytes / 1e9:g} GB", hardware.memory_bytes / 1e9)
    return [
        Chart("Memory of the fullest rank", across, Axis("GB", log=True), held, limit),
        Chart("Time of a step, predicted", across, Axis("seconds", log=True), times),
    ]


def _at_one(processes: int, chosen: Mapping[str, Strategy], hardware: Hardware) -> list[Bars]:
    """Bars, the same strategy in the same place of both pictures."""
    held, times = [], []
    for place, (name, strategy) in enumerate(chosen.items()):
        total, step = strategy.prediction.memory.peak / 1e9, strategy.prediction.seconds.step
        held.append(Bar(name, total, f"{total:,.3g} GB", place))
        times.append(Bar(name, step, f"{step:,.3g} s", place))
    many = f"{processes:,} process{'es' * (processes > 1)}"
    limit = hardware.memory_bytes / 1e9
    return [
        Bars(f"Memory of the fullest rank, {many}", f"GB; the rule is what {hardware.name} has", held, limit),
        Bars(f"Time of a step, {many}", "seconds, predicted", times),
    ]
