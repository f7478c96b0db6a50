"""Saving: all ranks write one checkpoint together.

Every rank writes the ranges that it holds into shared files (``writer``); rank 0 creates the folder and writes small
files. When all ranks report that their data are on the disk, it writes the manifest, renames the folder and updates the
pointer. If one rank fails, all ranks learn of it, the files are removed, and the previous checkpoint is unchanged.

Training continues as soon as the ranges are in the page cache: a thread waits until they are on the disk, and rank 0's
thread commits (``background``). Asynchronous saves copy the ranges, and the threads write them too. At most one
checkpoint is in progress: the next save waits for it and reports its errors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dsframe.checkpoint import staging, store
from dsframe.checkpoint.background import Writing
from dsframe.checkpoint.byte_files import catch_io_error, combined, write
from dsframe.checkpoint.layout import Layout
from dsframe.checkpoint.reader import RNG
from dsframe.checkpoint.store import Retention, Store
from dsframe.checkpoint.writer import Writer
from dsframe.cluster.exchange import failures
from dsframe.config.resolve import epochs
from dsframe.errors import CheckpointError
from dsframe.host import generators
from dsframe.model.state import ShardedParameters
from dsframe.results import Metrics
from dsframe.text import Json, Say, without_nonfinite

if TYPE_CHECKING:
    from dsframe.engine import Engine
    from dsframe.model.state import EngineState


ModelFiles = Callable[[Json, Say], dict[str, bytes]]
"""Function of the manifest and of a function that prints -> files by name."""
_LAST_SECONDS = 10.0
_NOT_SHARED = f"{os.strerror(errno.ENOENT)}: rank 0 has made the folder on its host; every host needs it, shared (NFS)"


class Saver:
    """Writes a run's checkpoints. Every method except :meth:`due` and :meth:`path` is **collective**."""

    def __init__(
        self,
        engine: Engine,
        folder: Store,
        about: Json,
        *,
        every_steps: Fraction | None,
        at_end: bool,
        retention: Retention,
        asynchronous: bool = False,
        model_files: ModelFiles = lambda *_: {},
        say: Say,
    ) -> None:
        """Create it before a checkpoint is loaded, while buffers have their initial shapes.

        ``about``: entries of the manifest that are the same at each step. ``model_files``: creates files for other
        programs.
        """
        self._make_model_files = model_files
        self._engine, self._store, self._about = engine, folder, about
        self._every, self._at_end, self._retention, self._say = every_steps, at_end, retention, say
        self._staging = staging.Staging() if asynchronous else None
        self._layout = Layout()
        self._built = {name: buffer.shape for name, buffer in engine.buffers().items()}
        """Initial shapes of this rank's buffers."""
        self._model_files: dict[str, bytes] | None = None
        """Files that make the folder readable by transformers; set at the first save."""
        self._warned = False
        self._writing: tuple[int, Writing] | None = None
        self._begun_step: int | None = None
        """The step for which this rank has created the folder."""
        self._ratings: dict[int, Metrics] = {}
        """Evaluations of checkpoints that are still being written."""
        self.asynchronous = asynchronous
        """True if training continues before the files are written."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this run wrote or resumed from."""
        self.sign_of_life: Callable[[], None] = lambda: None
        """Called after each parameter: writing a large checkpoint may take longer than the hang timeout."""

        self.claim: Callable[[], None] = lambda: None
        """Called by rank 0 before each save. Raises CheckpointError if another run has taken the run's directory."""

    def path(self, step: int) -> Path:
        """Returns the path of the checkpoint of ``step``, whether it exists or not."""
        return self._store.path(step)

    def due(self, step: int, total_steps: int) -> bool:
        """True if a checkpoint must be written after ``step``."""
        regular = self._every is not None and epochs.due(step, self._every)
        return step != self.saved_step and (regular or (self._at_end and step == total_steps))

    def prepare(self) -> None:
        """**Collective.** Reserves memory for copies. Called after the first step, which creates the optimizer's state."""
        if self._staging is None or self._every is None:
            return
        state = self._engine.state()
        if not isinstance(state.parameters, ShardedParameters):
            return
        writer = Writer(self._engine, state, self._store.directory, layout=self._layout)
        self._staging.reserve(writer.sizes, ahead=True)

    def _begin(self, step: int) -> None:
        self.claim()
        self._store.begin(step)
        self._begun_step = step

    def save(self, step: int, *, loss: float | None, evaluation: Metrics) -> float:
        """**Collective.** Saves a checkpoint after ``step``; returns the seconds that training stood still.

        Raises CheckpointError, on every rank, if one rank cannot write; the previous checkpoint is unchanged.
        """
        began = time.perf_counter()
        self.settle()
        self._look_for_metric(evaluation)
        engine, world = self._engine, self._engine.plan.world
        begin_error = catch_io_error(lambda: self._begin(step)) if world.is_main else ""
        self._check(step, begin_error)
        folder = self._store.partial(step)
        self._check(step, "" if _appears(folder) else _NOT_SHARED)
        state = engine.state()
        writer = Writer(engine, state, folder, staging=self._staging, layout=self._layout)
        if not isinstance(state.parameters, ShardedParameters):
            state = replace(state, parameters=engine.state().parameters)  # the layout has consumed them
        failure = writer.take(state, self.sign_of_life)
        shapes = {name: buffer.shape for name, buffer in engine.buffers().items()}
        resized = [name for name, shape in shapes.items() if self._built.get(name, shape) != shape]
        facts = {"random": generators.capture(engine.plan.device), "resized": resized}
        wrong = failures(engine, failure)
        if wrong:
            writer.close()
            self._give_up(step, wrong)
        manifest = self._manifest(state, step, loss, evaluation) | writer.manifest

        def commit(reports: Sequence[Json]) -> None:
            if self._model_files is None:
                self._model_files = self._make_model_files(manifest, self._say)
            files = write_small(folder, writer, reports, self._model_files)
            resized = sorted({name for report in reports for name in report["resized"]})
            self._store.commit(step, {**manifest, "files": files, "resized": resized})
            size = sum(entry["bytes"] for entry in files.values())
            how = " in the background" if self.asynchronous else ""
            seconds, removed = time.perf_counter() - began, self._prune()
            self._say(f"saved {self._store.path(step)}: {size / 1e6:,.1f} MB in {seconds:.2f} s{how}{removed}")

        commit_here = commit if world.is_main else None
        self._writing = step, Writing(writer, folder, world.rank, world.size, facts, commit_here, self.sign_of_life)
        self.saved_step = step
        stall = time.perf_counter() - began
        if self.asynchronous:
            self._say(f"saving step {step}: training stood still for {stall:.2f} s")
        return stall

    def _manifest(self, state: EngineState, step: int, loss: float | None, evaluation: Metrics) -> Json:
        plan = self._engine.plan
        return {
            "format": store.FORMAT,
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "step": step,
            "updates": state.updates,
            "loss_scale": asdict(state.loss_scale) if state.loss_scale else None,
            "learning_rate": plan.schedule(state.updates).learning_rate,
            "loss": loss,
            "evaluation": without_nonfinite(evaluation),
            "aliases": dict(state.aliases),
            **{key: follower.state() for key, follower in plan.followers.items()},
            **self._about,
        }

    def rate(self, step: int, evaluation: Metrics) -> None:
        """**Collective.** Adds an evaluation to the checkpoint of ``step``, at once or when it has been written.

        If the run ends before, it evaluates again when it resumes.
        """
        self._look_for_metric(evaluation)
        if self._engine.plan.world.is_main and evaluation:
            self._ratings[step] = evaluation
        if self._writing is None:
            self._rate()

    def _rate(self) -> None:
        ratings, self._ratings = self._ratings, {}
        for step, evaluation in ratings.items():
            if self._store.path(step).is_dir():  # absent if the run continued from another run's checkpoint
                if failure := catch_io_error(partial(self._store.rate, step, evaluation)):
                    self._say(f"warning: the evaluation after step {step} cannot be added to its checkpoint: {failure}")
                self._prune()

    @property
    def failed(self) -> bool:
        """True if this rank knows that a save in progress has failed; :meth:`settle` raises the error on all ranks."""
        return self._writing is not None and self._writing[1].failed

    def settle(self) -> None:
        """**Collective.** Waits until the checkpoint in progress, if there is one, is complete.

        Raises CheckpointError, on every rank, if one rank could not write; the previous checkpoint is unchanged.
        """
        if self._writing is None:
            return
        step, writing = self._writing
        self._writing = None
        writing.wait()
        wrong = failures(self._engine, writing.failure)
        writing.finish(other_rank_failed=bool(wrong))
        if wrong:
            self._give_up(step, wrong)
        self._check(step, writing.outcome)
        self._rate()

    def wait_briefly(self) -> None:
        """Not collective. Called when this rank ends with an error: waits some seconds for the checkpoint in progress."""
        if self._writing is None:
            return
        step, writing = self._writing
        until = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < until and not writing.failed and not self.path(step).is_dir():
            time.sleep(0.02)

    def close(self) -> None:
        """Not collective. Waits until the checkpoint in progress is finished, whatever else failed."""
        if self._writing is not None:
            self._writing[1].finish()
            self._writing = None

    def _look_for_metric(self, evaluation: Metrics) -> None:
        metric = (self._retention.best or "").partition(":")[0]
        value = evaluation.get(metric, 0.0)
        if not math.isfinite(value) and not self._warned:
            what = "NaN" if math.isnan(value) else "infinite"
            self._say(f"warning: keep_best: {metric} is {what} here, so this checkpoint cannot be the best")
            self._warned = True

    def _prune(self) -> str:
        try:
            removed = self._store.prune(self._retention)
        except OSError as error:  # the new checkpoint is safe; training need not stop for old ones
            return f"; an old checkpoint cannot be removed: {error}"
        return f"; removed {', '.join(str(step) for step in removed)}" if removed else ""

    def _check(self, step: int, failure: str) -> None:
        """**Collective.** Raises CheckpointError on every rank if any failed. ``failure``: this rank's error, or ""."""
        if wrong := failures(self._engine, failure):
            self._give_up(step, wrong)

    def _give_up(self, step: int, wrong: Sequence[str]) -> NoReturn:
        if self._begun_step == step:  # otherwise the folder belongs to another run
            self._store.abandon(step)
        try:
            newest = self._store.newest_first()
            before = f"the last good one is {newest[0]}" if newest else "there is no earlier one"
        except OSError as error:  # the folder may be the reason for the failure
            before = f"the folder with earlier ones cannot be read: {error.strerror}"
        raise CheckpointError(f"the checkpoint of step {step} cannot be written: {'; '.join(wrong)}; {before}")


def _appears(folder: Path) -> bool:
    """Waits until a folder that rank 0 has created is visible; over NFS a node may have cached that it was missing."""
    until = time.monotonic() + _LAST_SECONDS
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            list(folder.parent.iterdir())  # asks the server again
    return True


def write_small(folder: Path, writer: Writer, reports: Sequence[Json], more: Mapping[str, bytes]) -> dict[str, Json]:
    """Writes the files without tensors: generators, the index of several weight files, and the files ``more``.

    Returns the manifest's entries of all files. ``reports``: each rank's report of what it has written. Raises OSError,
    and CheckpointError if something is missing.
    """
    entries = {
        name: combined(name, size, [run for report in reports for run in report["runs"].get(name, ())])
        for name, size in writer.plan.sizes.items()
    }
    small = {RNG: json.dumps([report["random"] for report in reports if "random" in report]).encode(), **more}
    if len(set(writer.plan.weights.values())) > 1:
        index = {"metadata": {}, "weight_map": writer.plan.weights}
        small["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    entries |= {name: write(folder / name, content) for name, content in small.items()}
    return {name: asdict(entry) for name, entry in entries.items()}
