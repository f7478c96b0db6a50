"""A checkpoint's weights: evaluated on any engine and any number of processes, and as a plain module.

No optimizer state is read. Evaluations are those of a training: the same code on the same engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from dsframe import tasks
from dsframe.checkpoint import changes, store
from dsframe.checkpoint.reader import Checkpoint
from dsframe.errors import CheckpointError, TaskError
from dsframe.guard.watchdog import Watchdog
from dsframe.host.restored import restored
from dsframe.job import make_engine, prepare
from dsframe.model import adapter, ema
from dsframe.model.state import ParameterState, SavedView
from dsframe.tasks.given import seeded
from dsframe.training.evaluation import Evaluation

if TYPE_CHECKING:
    from dsframe.cluster.world import World
    from dsframe.config.value import Config
    from dsframe.job import Run
    from dsframe.tasks.task import Task


def evaluated_averages(checkpoint: Checkpoint) -> bool:
    """Returns whether its run evaluated the averages of the weights: "ema" with "evaluate", and there are some."""
    written = checkpoint.manifest.get("run", {}).get("config", {}).get("dsframe", {}).get("ema") or {}
    return bool(written.get("evaluate")) and checkpoint.keeps(ema.KEY)


class Weights(SavedView):
    """A checkpoint without its optimizer: the weights, or their averages in the place of them."""

    def __init__(self, checkpoint: Checkpoint, *, averages: bool | None = None) -> None:
        """``averages``: None for what the run evaluated. Raises CheckpointError where there are no averages."""
        super().__init__(checkpoint)
        self._averages = evaluated_averages(checkpoint) if averages is None else averages
        if averages and not checkpoint.keeps(ema.KEY):
            raise CheckpointError(f'{checkpoint.path} has no averages: its training had no "ema"; leave out --average')

    def seen(self, parameter: ParameterState) -> ParameterState:
        """The parameter without the optimizer's state; a frozen one has no average."""
        weight = parameter.moments.get(ema.KEY, parameter.weight) if self._averages else parameter.weight
        return ParameterState(parameter.name, weight, {}, {})


def evaluate(run: Run, world: World, path: Path, *, averages: bool | None = None) -> dict[str, float]:
    """**Collective.** The task's metrics over its evaluation data. Raises TaskError where there are none, CheckpointError.

    ``averages``: of the weights in the place of them; None: what the run evaluated.
    """
    job = prepare(run, world)
    if not job.work.evaluation:
        raise TaskError(f"{type(run.task).__name__} has no eval_data, so there is nothing to evaluate")
    watchdog = Watchdog(world, run.config.settings.hang_timeout_seconds)
    engine, _ = make_engine(job, watchdog, trains=False)
    with watchdog:
        checkpoint = Checkpoint(path)
        changes.compare_classes(checkpoint.manifest, run.task.class_names)
        if engine.built.adapter is not None:
            changes.compare_adapters(checkpoint.manifest, engine.built.adapter.peft)
            adapter.compare(checkpoint.manifest, engine.built.adapter.digest, path)
        engine.load_state(Weights(checkpoint, averages=averages))
        checkpoint.close()
        try:
            metrics = Evaluation(engine, job.work.evaluation, watchdog.beat, job.say).run()
        finally:
            job.progress.close()
    engine.close()
    assert metrics is not None
    return metrics


@restored()
def load_model(
    path: str | Path, task: Task | None = None, *, averages: bool | None = None, best: bool = False
) -> nn.Module:
    """A checkpoint's model on the CPU, in evaluation mode: what the task builds, with the saved weights and buffers.

    ``path``: a checkpoint, or a run's directory (its newest complete one, or with ``best`` the best one by "keep_best").
    ``task``: needed where a script brought its own; else it is the one of the run's ``config.json``.
    ``averages``: of the weights ("ema") in the place of them; None: what the run evaluated.

    What ``model()`` draws is what the training drew; the random generators are put back. Raises CheckpointError, TaskError.
    """
    from dsframe.config import load

    folder = store.complete(Path(path), best=best)
    checkpoint = Checkpoint(folder)
    adapted = "adapter" in checkpoint.manifest
    config = load(store.config_of(folder)) if adapted or task is None else None
    seed = checkpoint.manifest.get("training", {}).get("seed", 0)
    with seeded(seed):  # as the training was
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
    state |= {alias: state[name] for alias, name in checkpoint.manifest["aliases"].items()}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} belongs to another model: {error}") from None
    lost = [name for name in missing if name in dict(model.named_parameters()) and name not in base]
    if lost or unexpected:
        raise CheckpointError(f"{folder} belongs to another model: {', '.join([*lost, *unexpected][:5])}")
    checkpoint.close()
    return model.eval()


def load_adapted(path: Path, *, averages: bool | None = None) -> tuple[nn.Module, nn.Module]:
    """A checkpoint's model with its adapter, as :func:`load_model`, and the model that it was trained beside, built again."""
    from dsframe.config import load

    settings = load(store.config_of(path)).settings
    model = load_model(path, averages=averages)
    with seeded(settings.seed):
        return model, tasks.build(settings.task, settings.seed).model().eval()


def _adapted(config: Config, model: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Puts the training's adapter into ``model``; returns the names of the base, under each of its names.

    Raises CheckpointError where this is another base.
    """
    changes.compare_adapters(checkpoint.manifest, adapter.add(config, model))
    adapter.compare(checkpoint.manifest, adapter.digest_of(model), checkpoint.path)
    base = set(map(id, adapter.base_of(model).values()))
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in base}
