"""Resuming: chooses a checkpoint, verifies it, checks that it belongs to this training, and continues exactly there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.checkpoint import store
from dsframe.checkpoint.byte_files import catch_io_error
from dsframe.checkpoint.changes import differences, new_batch, step_now
from dsframe.checkpoint.preflight import damaged_files, preflight
from dsframe.checkpoint.reader import Checkpoint
from dsframe.checkpoint.store import Store
from dsframe.cluster.exchange import all_gather_json, failures
from dsframe.errors import CheckpointError, ConfigError, Problem
from dsframe.host import generators
from dsframe.model import ema
from dsframe.model.schedules import notes
from dsframe.model.state import ParameterState, SavedState, SavedView
from dsframe.tasks.average_of import AverageOf
from dsframe.text import Json, Say

if TYPE_CHECKING:
    from dsframe.config.value import Config
    from dsframe.engine import Engine


@dataclass(frozen=True)
class Start:
    """The point where training begins."""

    step: int = 0
    """Number of completed global batches."""
    loss: float | None = None
    """The training loss of that step."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """The evaluation after that step, if there was one."""
    in_place: bool = False
    """True if the checkpoint is the run's own, so that its metrics record continues too."""


def refuse(config: Config, wanted: str, *, evaluates: bool) -> None:
    """Checks, before any setup, what depends on the disk or the task. Raises CheckpointError, ConfigError."""
    if config.settings.checkpoints.keep_best and not evaluates:
        message = "the task has no eval_data, so no checkpoint can be the best"
        where = "dsframe.checkpoints.keep_best"
        raise ConfigError([Problem("error", where, message, "remove it, or give the task eval_data", code="keep-best")])
    if wanted not in ("auto", "best", "never"):
        try:
            store.locate(Path(wanted))
        except CheckpointError as error:
            raise CheckpointError(f"--resume must be auto, best, never or a checkpoint: {error}") from None


def begin(
    engine: Engine,
    wanted: str,
    folder: Store,
    mine: Json,
    total_steps: int,
    say: Say,
    sign_of_life: Callable[[], None] = lambda: None,
) -> Start:
    """**Collective.** Continues from a checkpoint, or archives earlier checkpoints and starts from the beginning.

    ``wanted``: "never", "auto" (the newest complete one in ``folder``, else the beginning), "best" (the best one there
    by "keep_best"), or a path to a checkpoint or a folder with some. Damaged ones found by "auto" or in a folder are
    renamed and reported with ``say``, and the one before is taken. ``sign_of_life`` is called after each file and each
    parameter. Raises CheckpointError if there is nothing to continue from, only another training's checkpoint, or one
    that some ranks cannot read (then nothing is renamed), and if the run could not be saved.
    """
    preflight(engine, folder.directory)
    remove_unfinished(engine, folder, say)
    if wanted == "never":
        archive_earlier(engine, folder, None, say)
        return Start()
    path = _choose(engine, wanted, folder, say, sign_of_life)
    if path is None:
        say(f"--resume auto: no checkpoint in {folder.directory}; training starts from the beginning")
        return Start()
    same_ranks = store.read_manifest(path)["run"]["world_size"] == engine.plan.world.size
    checkpoint = Checkpoint(path, engine.plan.world.rank if same_ranks else 0)
    for line in differences(checkpoint.manifest, mine):
        say(f"resuming with a change: {line}")
    # In place also if the checkpoint is reached by a link, from the run's folder or to it.
    in_place = folder.directory.resolve() in (path.parent.resolve(), path.resolve().parent)
    step = _first_step(checkpoint, mine, total_steps, in_place=in_place)
    saved: SavedState = _Watched(checkpoint, sign_of_life)
    teachers = any(isinstance(made, AverageOf) for made in engine.plan.task.models().values())
    if checkpoint.keeps(ema.KEY) != (teachers or engine.plan.config.settings.ema is not None):
        how = "is dropped" if checkpoint.keeps(ema.KEY) else "begins with the loaded weights"
        say(f"resuming with a change: dsframe.ema; the average of the weights {how}")
        saved = _WithoutAverages(saved)
    engine.load_state(saved)
    _restore_generators(engine, checkpoint)
    manifest = checkpoint.manifest
    for key, follower in engine.plan.followers.items():
        if manifest.get(key):
            follower.restore(manifest[key])
            follower.observed = step if follower.observed == checkpoint.step else follower.observed
    plan, done = engine.plan, checkpoint.updates
    for line in notes(plan.config, plan.schedule, done + total_steps - step, done) if new_batch(manifest, mine) else ():
        say(f"resuming with a change: {line}")
    before, now = manifest["learning_rate"], plan.schedule(done).learning_rate
    if abs(before - now) > 1e-9 * abs(before):
        line = f"the learning rate continues at {now:.6g}; with the saved settings it would be {before:.6g}"
        say(f"resuming with a change: {line}")
    checkpoint.close()
    archive_earlier(engine, folder, step if in_place else None, say)
    run = manifest["run"]
    say(f"continuing after step {step} from {path}, written by {run['engine']} on {run['world_size']} rank(s)")
    evaluation = {name: math.nan if value is None else value for name, value in manifest["evaluation"].items()}
    return Start(step, manifest["loss"], evaluation, in_place)


def _first_step(checkpoint: Checkpoint, mine: Json, total_steps: int, *, in_place: bool) -> int:
    """Returns the step of this run after which training continues. Raises CheckpointError if there is no such step."""
    step = step_now(checkpoint.manifest, mine)
    if new_batch(checkpoint.manifest, mine) and in_place:
        raise CheckpointError(
            f"train_batch_size has changed, so step {checkpoint.step} of {checkpoint.path} is now step {step}. This run's record "
            "and checkpoints would count steps in two ways; train on in another directory: --run-dir NEW --resume PATH"
        )
    if step > total_steps:
        raise CheckpointError(
            f"{checkpoint.path} was saved after step {step}, but the run ends at step {total_steps}; raise steps or epochs"
        )
    return step


class _Watched(SavedView):
    """A checkpoint that reports to the watchdog with each parameter, because reading a large one takes long."""

    def __init__(self, saved: Checkpoint, sign_of_life: Callable[[], None]) -> None:
        super().__init__(saved)
        self._sign_of_life = sign_of_life

    def seen(self, parameter: ParameterState) -> ParameterState:
        self._sign_of_life()
        return parameter


class _WithoutAverages(SavedView):
    """A saved state without averages, which a training without "ema" would otherwise keep and save forever."""

    def seen(self, parameter: ParameterState) -> ParameterState:
        moments = {key: value for key, value in parameter.moments.items() if key != ema.KEY}
        return ParameterState(parameter.name, parameter.weight, moments, parameter.scalars)


def _choose(engine: Engine, wanted: str, folder: Store, say: Say, sign_of_life: Callable[[], None]) -> Path | None:
    """**Collective.** Returns the newest complete checkpoint; each rank verifies its share of the files.

    Damaged ones are set aside only when a complete one is found; otherwise every later start reports the same error.
    """
    main = engine.plan.world.is_main
    candidates: list[Path] = []
    failure, foreign = "", {}
    if main:
        try:
            if wanted == "auto":
                candidates = folder.newest_first()
            else:
                best = wanted == "best"
                candidates = store.locate(folder.directory if best else Path(wanted), best=best)
            foreign = {str(path): text for path in candidates if (text := _of_another_format(path))}
            failure = "" if candidates else _never_whole(folder)
        except (CheckpointError, OSError) as error:
            failure = str(error)
    known = {"failure": failure, "paths": [str(path) for path in candidates], "foreign": foreign}
    choice = all_gather_json(engine, known)[0]
    if choice["failure"]:
        raise CheckpointError(choice["failure"])
    paths = [Path(path) for path in choice["paths"]]
    damaged: dict[Path, str] = {}
    for path in paths:
        if str(path) in choice["foreign"]:
            raise CheckpointError(choice["foreign"][str(path)])  # complete: neither usable here, nor to be set aside
        if wrong := damaged_files(engine, path, sign_of_life):
            damaged[path] = "; ".join(wrong)
            continue
        for old, text in damaged.items() if main else ():
            moved = None
            with suppress(OSError):
                moved = folder.set_aside(old)
            say(f"warning: {old} is damaged and not used ({text}); it is now {moved or 'still there'}")
        return path
    if wanted != "auto" and len(paths) == 1:
        raise CheckpointError(f"{paths[0]} is damaged: {damaged[paths[0]]}")
    if paths:
        each = "; ".join(f"{path.name}: {text}" for path, text in damaged.items())
        raise CheckpointError(
            f"all checkpoints in {paths[0].parent} are damaged ({each}); to start over: --resume never"
        )
    return None


def _never_whole(folder: Store) -> str:
    """Returns a message if all checkpoints of a run are damaged: it must not start over without being asked to."""
    if not (damaged := folder.damaged()):
        return ""
    return f"all checkpoints in {folder.directory} are damaged ({', '.join(damaged)}); to start over: --resume never"


def _of_another_format(path: Path) -> str:
    try:
        store.read_manifest(path)
    except store.OtherFormatError as error:
        return str(error)
    except CheckpointError:
        pass  # damaged, reported when it is verified
    return ""


def remove_unfinished(engine: Engine, folder: Store, say: Say) -> None:
    """Removes unfinished saves, on rank 0."""
    if engine.plan.world.is_main:
        with suppress(OSError):
            if removed := folder.remove_unfinished():
                say(f"removed unfinished saves in {folder.directory}: {', '.join(removed)}")


def archive_earlier(engine: Engine, folder: Store, after: int | None, say: Say) -> None:
    """**Collective.** Archives the checkpoints of the run's folder, or only those of steps after ``after``."""

    def archive() -> None:
        if moved := folder.archive_earlier(after):
            say(f"{'earlier' if after is None else 'later'} checkpoints of {folder.directory} are now in {moved}")

    failure = catch_io_error(archive) if engine.plan.world.is_main else ""
    if wrong := failures(engine, failure):
        raise CheckpointError("; ".join(wrong))


def _restore_generators(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restores each rank's random generators; new ranks are seeded from seed, rank and step.

    Ranks that share samples take the group's first rank's; otherwise their dropout would differ.
    """
    kept = checkpoint.generators()
    plan = engine.plan
    rank = plan.world.rank - plan.world.rank % plan.batch.sharing
    if rank < len(kept):
        generators.restore(kept[rank], plan.device)
    else:
        generators.seed(plan.seed + 1 + plan.data_rank + 1_000_003 * checkpoint.step)
