"""``dsframe import``: goes on with dsframe from a checkpoint that a program of its own saved with DeepSpeed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.cluster.world import World
from dsframe.config import Facts, load
from dsframe.errors import CheckpointError
from dsframe.run_dir.lock import RunLock
from dsframe.tools.commands import add_overrides, command

if TYPE_CHECKING:
    from torch import nn

    from dsframe.checkpoint.store import Store
    from dsframe.config import Config
    from dsframe.model.state import EngineState
    from dsframe.tasks.task import Task
    from dsframe.tools.deepspeed_files import DeepSpeedCheckpoint


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Convert a DeepSpeed checkpoint (ZeRO 0 to 3, weights and optimizer state) into dsframe's format."
    parser = command("import", about)
    add = parser.add_argument
    add("directory", type=Path, help="the folder given to save_checkpoint, or one checkpoint in it")
    add("--config", required=True, metavar="FILE", help="the file of the training to continue")
    add_overrides(parser, "one key of the file")
    add("--tag", help="name of the checkpoint (default: the one that the file latest names)")
    add("--run-dir", type=Path, help="directory of the run to continue (default: the file's, else runs/NAME-deepspeed)")
    add(
        "--trust",
        action="store_true",
        help="you trust the origin of the files: they are pickled (none of their code is run)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the checkpoint, says where and returns 0. Raises CheckpointError where it cannot be read or is of another model."""
    options = parser().parse_args(argv)
    if not options.trust:
        raise CheckpointError(
            f"{options.directory}: DeepSpeed's files are pickled, a format that can contain code; add --trust if you know "
            "who wrote them"
        )
    from dsframe import tasks

    config = load(options.config, overrides=options.overrides)
    task = tasks.build(config.settings.task, config.settings.seed)
    stem = config.path.stem if config.path else "run"
    run_dir = options.run_dir or Path(config.settings.run_dir or f"runs/{stem}-deepspeed")
    path = convert(options.directory, options.tag, config, task, run_dir)
    print(f"{path}: go on with --config {options.config} --run-dir {run_dir} --resume auto", file=sys.stderr)
    return 0


def convert(directory: Path, tag: str | None, config: Config, task: Task, run_dir: Path) -> Path:
    """Writes a DeepSpeed checkpoint as one of dsframe's into the checkpoints of ``run_dir``; returns where.

    One parameter is in memory at a time, beside what torch maps and, at stages 1 to 3, one flat tensor with its moments.
    Raises CheckpointError; WorldError where that run goes on, ConfigError where its directory cannot be made.
    """
    from dsframe.checkpoint import store
    from dsframe.checkpoint.byte_files import catch_io_error
    from dsframe.checkpoint.store import Store
    from dsframe.model import groups
    from dsframe.model.state import EngineState, aliases, compare, persistent_buffers
    from dsframe.tools import deepspeed_files

    task.seed = config.settings.seed
    checkpoint = deepspeed_files.read(deepspeed_files.find(directory, tag))
    model = task.model()
    asked = groups.settle_groups(config, task, model).asked
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    trained = {name: shape for name, shape in shapes.items() if trainable[name]} if checkpoint.shapes else {}
    compare(
        "parameter",
        trained,
        {name: tuple(shape) for name, shape in checkpoint.shapes.items() if trainable.get(name, True)},
    )
    folder = Store(run_dir / "checkpoints")
    manifest = {
        "format": store.FORMAT,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": checkpoint.step,
        "updates": checkpoint.updates,
        "loss_scale": asdict(checkpoint.loss_scale) if checkpoint.loss_scale else None,
        "learning_rate": checkpoint.learning_rate,
        "loss": None,
        "evaluation": {},
        "aliases": aliases(model),
        **_about(config, task, checkpoint),
    }
    manifest["course"].update(asked)
    buffers = _buffers(checkpoint, model, persistent_buffers(model))

    def state() -> EngineState:
        parameters = checkpoint.parameters(trainable, shapes)
        return EngineState(checkpoint.updates, checkpoint.loss_scale, buffers, aliases(model), parameters)

    with RunLock() as claim:
        claim.take(run_dir, World(), lambda line: print(line, file=sys.stderr))
        if failure := catch_io_error(lambda: folder.begin(checkpoint.step)):
            raise CheckpointError(failure)
        try:
            return _write(folder, state, manifest, shapes)
        except (OSError, CheckpointError) as error:
            folder.abandon(checkpoint.step)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{error.filename or folder.directory}: {error.strerror}") from None


def _write(
    folder: Store, state: Callable[[], EngineState], manifest: dict[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Path:
    """Writes the checkpoint, which has begun. Raises OSError, CheckpointError."""
    from dsframe.checkpoint.saver import write_small
    from dsframe.checkpoint.writer import Writer
    from dsframe.cluster.exchange import Alone
    from dsframe.model.state import compare

    partial = folder.partial(manifest["step"])
    writer = Writer(Alone(), state(), partial)
    laid_out = writer.manifest["parameters"].items()
    saved = {name: entry["tensors"]["weight"]["shape"] for name, entry in laid_out}
    compare("parameter", {name: shapes[name] for name in saved}, saved)
    if failure := writer.take(state(), lambda: None):
        raise CheckpointError(failure)
    writer.flush(lambda: None)
    files = write_small(partial, writer, [{"runs": writer.runs}], {})
    return folder.commit(manifest["step"], {**manifest, **writer.manifest, "files": files})


def _buffers(checkpoint: DeepSpeedCheckpoint, model: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in wanted if name not in checkpoint.module]
    if missing:
        raise CheckpointError(f"{checkpoint.path} has no buffer {missing[0]}, which the model has")
    return {name: checkpoint.module[name].clone() for name in wanted}


def _about(config: Config, task: Task, checkpoint: DeepSpeedCheckpoint) -> dict[str, Any]:
    from dsframe.checkpoint.changes import about
    from dsframe.data.loader import as_source
    from dsframe.data.sampler import Sampler
    from dsframe.model import optimizers
    from dsframe.tasks import preparation
    from dsframe.tasks.given import given

    settings = config.settings
    preparation.alone(task, lambda line: print(f"dsframe: {line}", file=sys.stderr))
    samples, batch = (
        len(as_source(given(task, "train_data"), settings.seed, task.collate, streams=True)),
        config.batch(checkpoint.ranks),
    )
    sampler = Sampler(samples, batch.train_batch_size, settings.seed, drop_last=config.deepspeed.dataloader_drop_last)
    steps = settings.steps or sampler.total_steps(settings.epochs or 1)
    facts = Facts(checkpoint.ranks, steps, sampler.epoch_steps)
    config = config.resolve(facts)
    manifest = about(
        config,
        task,
        optimizers.read(config),
        batch,
        samples=samples,
        world_size=checkpoint.ranks,
        engine="deepspeed",
        package=None,
    )
    manifest["versions"]["deepspeed"] = checkpoint.version
    return manifest
