"""Evaluates or predicts with a checkpoint's weights, on any engine and number of processes; loads a plain module.

No optimizer state is read. Evaluations use the same code and engine as training. Predictions are in the order of the
samples, each sample once. A file of predictions gets its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dsframe import tasks
from dsframe.checkpoint import changes, store
from dsframe.checkpoint.byte_files import sync_folder
from dsframe.checkpoint.reader import Checkpoint
from dsframe.cluster.exchange import failures
from dsframe.data.datasets import DatasetSource
from dsframe.errors import CheckpointError, DataError, TaskError
from dsframe.guard.watchdog import Watchdog
from dsframe.host.restored import restored
from dsframe.job import make_engine, prepare
from dsframe.model import adapter, ema, extra_state
from dsframe.model.persistent import make_room
from dsframe.model.state import ParameterState, SavedView
from dsframe.tasks.data_sets import seeded
from dsframe.text import Json, Say, without_nonfinite
from dsframe.training import predictions
from dsframe.training.evaluation import Evaluation

if TYPE_CHECKING:
    from dsframe.cluster.world import World
    from dsframe.config.value import Config
    from dsframe.data.loader import EvaluationBatch
    from dsframe.engine import Engine
    from dsframe.job import Job, Run
    from dsframe.tasks.task import Task


def evaluated_averages(checkpoint: Checkpoint) -> bool:
    """True if the run evaluated the averages of the weights ("ema" with "evaluate") and the checkpoint has them."""
    written = checkpoint.manifest.get("run", {}).get("config", {}).get("dsframe", {}).get("ema") or {}
    return bool(written.get("evaluate")) and checkpoint.keeps(ema.KEY)


class Weights(SavedView):
    """A checkpoint without optimizer state: the weights, or their averages in their place."""

    def __init__(self, checkpoint: Checkpoint, *, averages: bool | None = None) -> None:
        """``averages``: None for what the run evaluated. Raises CheckpointError if the checkpoint has no averages."""
        super().__init__(checkpoint)
        self._averages = evaluated_averages(checkpoint) if averages is None else averages
        if averages and not checkpoint.keeps(ema.KEY):
            raise CheckpointError(f'{checkpoint.path} has no averages: its training had no "ema"; leave out --average')

    def seen(self, parameter: ParameterState) -> ParameterState:
        """Returns the parameter without optimizer state; a frozen one has no average."""
        weight = parameter.moments.get(ema.KEY, parameter.weight) if self._averages else parameter.weight
        return ParameterState(parameter.name, weight, {}, {})


def evaluate(run: Run, world: World, path: Path, *, averages: bool | None = None) -> dict[str, float]:
    """**Collective.** Returns the task's metrics over its evaluation data. Raises TaskError, CheckpointError.

    ``averages``: take the averages of the weights in their place; None: what the run evaluated.
    """
    with _loaded(run, world, path, averages=averages) as (job, engine, watchdog):
        if not job.work.evaluation:
            raise TaskError(f"{type(run.task).__name__} has no eval_data, so there is nothing to evaluate")
        metrics = Evaluation(engine, job.work.evaluation, watchdog.beat, job.say).run()
        assert metrics is not None
        return metrics


def predict(run: Run, world: World, path: Path, out: Path, *, averages: bool | None = None) -> int:
    """**Collective.** Writes :meth:`Task.predictions` of :meth:`Task.predict_data` to ``out``; returns their number.

    ``out``: a ``.jsonl`` file in a folder that all ranks share. ``averages``: as for :func:`evaluate`. Raises DataError
    if ``out`` exists or cannot be written.
    """
    if out.suffix != ".jsonl":
        raise DataError(f"{out}: predictions are written as .jsonl; choose this ending")
    with _loaded(run, world, path, averages=averages) as (job, engine, watchdog):
        loader = job.work.evaluation.get("")
        if job.plan.batch.sequence_parallel_size > 1:
            raise TaskError(
                "predict: not possible with sequence parallelism, where a rank has a slice of each row; choose another engine"
            )
        if loader is None:
            raise TaskError(
                f"{type(run.task).__name__} has neither predict_data nor eval_data, so there are no samples"
            )
        loader.limit(len(loader.source))  # "eval_samples" applies to evaluations only
        predictions.take_inputs_alone(loader.source)
        if isinstance(loader.source, DatasetSource) and loader.source.collate:
            loader.source.refuse_other_order()
        parts = [out.with_name(f".{out.name}.{rank:05}.partial") for rank in range(world.size)]
        _together(engine, lambda: _begin(out) if world.is_main else None)

        def finish() -> None:
            if missing := [part for part in parts if not part.exists()]:
                raise DataError(f"{missing[0]} is not on this host; give --out a folder that all hosts share")
            with contextlib.ExitStack() as files:
                each = [(json.loads(line) for line in files.enter_context(part.open())) for part in parts]
                _write_jsonl(out, (row for _, row in heapq.merge(*each, key=lambda pair: pair[0])), job.say)

        try:
            padded = _together(engine, lambda: _write_own(job, engine, watchdog, parts[world.rank]))
            if failures(engine, "padded" if padded else ""):
                job.say(
                    "note: predicted rows include padding, as much as their batch has; cut them in Task.predictions(outputs, "
                    "targets), for example by targets != -100"
                )
            _together(engine, lambda: finish() if world.is_main else None)
        finally:
            parts[world.rank].unlink(missing_ok=True)
        return loader.samples


@restored()
def load_model(
    path: str | Path, task: Task | None = None, *, averages: bool | None = None, best: bool = False
) -> nn.Module:
    """Returns a checkpoint's model on the CPU, in evaluation mode: the task's, with the saved weights and buffers.

    ``path``: a checkpoint, or a run's directory (its newest complete one, or with ``best`` the best one by
    "keep_best"). ``task``: required if a script passed its own; otherwise it is built from the run's ``config.json``.
    ``averages``: take the averages of the weights ("ema") in their place; None: what the run evaluated.

    ``model()`` draws what it drew in training; the generators are restored. Raises CheckpointError, TaskError.
    """
    from dsframe.config import load

    folder = store.complete(Path(path), best=best)
    checkpoint = Checkpoint(folder)
    adapted = "adapter" in checkpoint.manifest
    config = load(store.config_of(folder)) if adapted or task is None else None
    seed = checkpoint.manifest.get("training", {}).get("seed", 0)
    with seeded(seed):  # the seed of the training
        if task is None:
            assert config is not None
            task = tasks.build(config.settings.task, seed)
        before, task.seed = task.seed, seed
        try:
            model = task.model()
        finally:
            task.seed = before
        base = _adapted(config, model, checkpoint) if adapted and config is not None else set()
    weights = Weights(checkpoint, averages=averages)
    state = {name: weights.parameter(name).weight for name in weights.shapes} | dict(weights.buffers())
    state = {name: extra_state.unpacked(name, tensor) for name, tensor in state.items()}
    state |= {alias: state[name] for alias, name in checkpoint.manifest["aliases"].items()}
    make_room(model, checkpoint.buffers(), checkpoint.resized)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} belongs to another model: {error}") from None
    missing_parameters = [name for name in missing if name in dict(model.named_parameters()) and name not in base]
    if missing_parameters or unexpected:
        raise CheckpointError(f"{folder} belongs to another model: {', '.join([*missing_parameters, *unexpected][:5])}")
    checkpoint.close()
    return model.eval()


def load_adapted(path: Path, *, averages: bool | None = None) -> tuple[nn.Module, nn.Module]:
    """Returns a checkpoint's model with its adapter, as :func:`load_model`, and the base model, built again."""
    from dsframe.config import load

    settings = load(store.config_of(path)).settings
    model = load_model(path, averages=averages)
    with seeded(settings.seed):
        return model, tasks.build(settings.task, settings.seed).model().eval()


def _adapted(config: Config, model: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Adds the training's adapter to ``model``; returns all names of the base's parameters.

    Raises CheckpointError if the base differs.
    """
    changes.compare_adapters(checkpoint.manifest, adapter.add(config, model))
    adapter.compare(checkpoint.manifest, adapter.digest_of(model), checkpoint.path)
    base = set(map(id, adapter.base_of(model).values()))
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in base}


@contextlib.contextmanager
def _loaded(run: Run, world: World, path: Path, *, averages: bool | None) -> Iterator[tuple[Job, Engine, Watchdog]]:
    """**Collective.** Yields the job and the engine of the run's file, with the checkpoint's weights."""
    job = prepare(run, world)
    watchdog = Watchdog(world, run.config.settings.hang_timeout_seconds)
    engine, _ = make_engine(job, watchdog, trains=False)
    with watchdog:
        checkpoint = Checkpoint(path)
        changes.compare_classes(checkpoint.manifest, run.task.class_names)
        if engine.built.adapter is not None:
            changes.compare_adapters(checkpoint.manifest, engine.built.adapter.peft)
            adapter.compare(checkpoint.manifest, engine.built.adapter.digest, path)
        engine.load_state(Weights(checkpoint, averages=averages))
        run.task.context.step = checkpoint.step
        checkpoint.close()
        try:
            yield job, engine, watchdog
        finally:
            job.progress.close()
    engine.close()


def _together(engine: Engine, action: Any) -> Any:
    """**Collective.** Calls ``action`` and returns its result. If one rank fails, all raise DataError or TaskError."""
    result, failure = None, ""
    error_class: type[DataError] | type[TaskError] = DataError
    try:
        result = action()
    except (DataError, TaskError, OSError) as error:
        error_class, failure = (TaskError if isinstance(error, TaskError) else DataError), str(error)
    if wrong := failures(engine, failure):
        raise error_class("; ".join(wrong))
    return result


def _begin(out: Path) -> None:
    """Raises DataError if ``out`` cannot be written, and removes partial files of a killed run."""
    if out.exists():
        raise DataError(f"{out} exists already; remove it, or choose another name")
    if not out.parent.is_dir():
        raise DataError(f"{out}: there is no folder {out.parent}")
    for old in out.parent.glob(f".{out.name}.*partial"):
        old.unlink()


def _write_own(job: Job, engine: Engine, watchdog: Watchdog, path: Path) -> bool:
    """**Collective.** Writes this rank's rows, each with its sample number, in order. Returns whether some include
    padding that the task has not removed. Raises TaskError."""
    task, padded = engine.plan.task, False
    with path.open("w", encoding="utf-8") as file:

        def take(batch: EvaluationBatch, outputs: Any, targets: Any) -> dict[str, Any]:
            nonlocal padded
            rows = predictions.rows_of(task, outputs, targets, len(batch.samples))
            padded = padded or predictions.padded(task, batch.batch[0], outputs, targets)
            for index, row in zip(batch.samples, rows, strict=True):
                file.write(json.dumps([index, row]) + "\n")
            return {}

        Evaluation(engine, job.work.evaluation, watchdog.beat, job.say).each("", take)
        file.flush()
        os.fsync(file.fileno())
    return padded


def _write_jsonl(out: Path, rows: Iterator[Json], say: Say) -> None:
    """Writes ``out``; the file gets its name when it is complete. ``say`` is told of NaN and infinity."""
    partial, replaced = out.with_name(f".{out.name}.partial"), []
    try:
        with partial.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                try:
                    line = json.dumps(row, allow_nan=False)
                except ValueError:
                    replaced.append(number)
                    line = json.dumps(without_nonfinite(row))
                file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(out)
        sync_folder(out.parent)
    finally:
        partial.unlink(missing_ok=True)
    if replaced:
        say(
            f"note: {len(replaced):,} rows have NaN or infinity, the first is row {replaced[0]}; JSON has neither, so null is "
            "written in their place"
        )
