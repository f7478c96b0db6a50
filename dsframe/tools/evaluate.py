"""``dsframe evaluate`` and ``dsframe predict``: metrics or predictions of a checkpoint, on any engine.

With several processes, under any launcher: ``torchrun --nproc-per-node=2 -m dsframe.tools.evaluate CHECKPOINT``, and
``-m dsframe.tools.evaluate predict CHECKPOINT --out FILE``.
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.cluster import world as worlds
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.engines import TABLE
from dsframe.errors import ConfigError, DataError, DsframeError, TaskError
from dsframe.host import supervise
from dsframe.run import choose, prepared
from dsframe.run_dir.record import read_metrics
from dsframe.text import without_nonfinite
from dsframe.tools.commands import Argv, add_average, add_overrides, command
from dsframe.train import crash, leave, leave_at_once

if TYPE_CHECKING:
    from dsframe.config import Config
    from dsframe.tasks.task import Task


def main(argv: Argv = None) -> int:
    """Prints the metrics as one line of JSON, also to ``--out``, and returns 0. An error ends the process."""
    return _main("evaluate", argv)


def predict(argv: Argv = None) -> int:
    """Writes predictions and returns 0. An error ends the process with its exit code."""
    return _main("predict", argv)


def parser() -> argparse.ArgumentParser:
    """The command line of ``dsframe evaluate``."""
    return _parser("evaluate")


def predict_parser() -> argparse.ArgumentParser:
    """The command line of ``dsframe predict``."""
    return _parser("predict")


def _parser(name: str) -> argparse.ArgumentParser:
    descriptions = {
        "evaluate": "Evaluate a checkpoint.",
        "predict": "Write a checkpoint's predictions, in the order of the samples.",
    }
    parser = command(name, descriptions[name])
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest complete one)")
    add("--best", action="store_true", help="of a run's directory the best one (keep_best)")
    add("--config", help="the file, which says engine, task and data (default: that of the run)")
    add_overrides(parser, "one key of it")
    add("--engine", help="short for --set dsframe.engine=...")
    add_average(parser)
    needed = "file to write, .jsonl"
    add(
        "--out",
        type=Path,
        required=name == "predict",
        help=needed if name == "predict" else "JSON file for the metrics",
    )
    add("--verbose", action="store_true", help="let the libraries say everything, and show tracebacks")
    add("--quiet", action="store_true", help="say nothing but the result")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _options(name: str, argv: Argv) -> argparse.Namespace:
    options = _parser(name).parse_args(argv)
    if options.engine:
        options.overrides.append(f"dsframe.engine={options.engine}")
    return options


def _main(name: str, argv: Argv) -> int:
    options = _options(name, argv)
    world = World()
    try:
        world = worlds.here()
        if world.launcher != "python":
            supervise.die_with_parent()
        _run(name, options, world)
    except DsframeError as error:
        leave(error, world, verbose=options.verbose)
    except KeyboardInterrupt:
        leave_at_once(130)
    except Exception as error:
        crash(error, world, verbose=options.verbose)
    return 0


def _run(name: str, options: argparse.Namespace, world: World) -> None:
    from dsframe.checkpoint import store

    file = options.config or store.config_of(store.locate(options.checkpoint, best=options.best)[0])
    if options.config is None and not any(text.startswith("dsframe.task") for text in options.overrides):
        _refuse_script(Path(file).parent)
    config = _fitting(file, options.overrides, world)
    with prepared(config, None, world, verbose=options.verbose, quiet=options.quiet) as run:
        from dsframe import inference

        path = store.complete(options.checkpoint, best=options.best)
        if name == "predict":
            read, task = run.data, run.task
            run = replace(run, data=cache(lambda: (read()[0], _to_predict(task))))
            rows = inference.predict(run, world, path, options.out, averages=options.average)
            if world.is_main:
                print(f"dsframe: {rows:,} rows of {path}: {options.out}", file=sys.stderr)
            return
        metrics = inference.evaluate(run, world, path, averages=options.average)
    if world.is_main:
        found = {"checkpoint": str(path), "step": store.step_of(path), "metrics": metrics}
        line = json.dumps(without_nonfinite(found), allow_nan=False)
        print(line, flush=True)
        if options.out:
            options.out.write_text(line + "\n", encoding="utf-8")


def _to_predict(task: Task) -> Any:
    """Returns the data to predict. Raises TaskError if there are several sets."""
    from dsframe.tasks.data_sets import given

    chosen = given(task, "predict_data")
    if isinstance(chosen, dict):
        raise TaskError(f"predict: {type(task).__name__} has several sets; return one from predict_data()")
    return chosen


def _refuse_script(directory: Path) -> None:
    """Raises TaskError if a script gave the run its task, because the run's file does not name the script."""
    with suppress(DataError):
        module, name = "", ""
        for line in read_metrics(directory)[:1]:
            module, _, name = (line.get("run", {}).get("script_task") or "").partition(":")
        if module:
            module_name = "SCRIPT" if module == "__main__" else module
            raise TaskError(
                f"the task of this run, {name}, came from a script, which the run's file does not name; write "
                f"--set dsframe.task.name={module_name}:{name} (SCRIPT: the script's name without .py)"
            )


def _fitting(file: Path | str, overrides: Sequence[str], world: World) -> Config:
    """Returns the configuration, with another batch if the file's does not fit the world size; it is not trained
    with."""
    overrides = [*overrides, "dsframe.hooks=[]"]
    config = load(file, overrides=overrides)
    replicas = TABLE[choose(config, world)[0]].replicas
    try:
        config.batch(world.size, replicas=replicas)
    except ConfigError:
        written = config.deepspeed.train_micro_batch_size_per_gpu or config.deepspeed.train_batch_size
        micro = written if isinstance(written, int) else 1
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1}
        sharing = 1 if replicas else config.deepspeed.pipeline.stages * config.deepspeed.tensor_parallel.autotp_size
        sizes["train_batch_size"] = micro * max(1, world.size // sharing)
        config = load(file, overrides=[*overrides, *(f"{key}={value}" for key, value in sizes.items())])
    return config


if __name__ == "__main__":
    wants = sys.argv[1:]
    done = predict(wants[1:]) if wants[:1] == ["predict"] else main(wants)
    atexit._run_exitfuncs()
    leave_at_once(done)
