"""Writing: all ranks write one checkpoint together.

Every rank writes the ranges that it holds into the files of all (``writer``); rank 0 makes the folder, writes what is small,
and when all have said that what they write is on the disk, the manifest, the rename and the pointer. What one rank cannot
write, all learn: then nothing is renamed, what was written is taken away, and the checkpoint before stays as it is.

Training goes on as soon as the ranges are written, which is when the system has their bytes: a thread waits until they are on
the disk, and rank 0's then commits (``background``). Asynchronously, each rank copies them, and threads write as well. At most
one checkpoint is under way: the next save waits for it, and says what went wrong with it.
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
from dsframe.text import Json, Say

if TYPE_CHECKING:
    from dsframe.engine import Engine
    from dsframe.model.state import EngineState


ModelFiles = Callable[[Json, Say], dict[str, bytes]]
"""Of the manifest and rank 0's voice: name of a file -> content."""
_LAST_SECONDS = 10.0
_NOT_SHARED = f"{os.strerror(errno.ENOENT)}: rank 0 has made the folder on its host; every host needs it, shared (NFS)"


class Saver:
    """Writes a run's checkpoints. Every method but :meth:`due` and :meth:`path` is **collective**."""

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
        """Before a checkpoint is loaded, while buffers have the shapes that they were built with.

        ``about``: what the manifest tells of the run, beyond what changes from step to step; plain JSON values.
        ``model_files``: makes what lies beside the weights, for other programs."""
        self._make_model_files = model_files
        self._engine, self._store, self._about = engine, folder, about
        self._every, self._at_end, self._retention, self._say = every_steps, at_end, retention, say
        self._staging = staging.Staging() if asynchronous else None
        self._layout = Layout()
        self._built = {name: buffer.shape for name, buffer in engine.buffers().items()}
        """The shapes of this rank's buffers before the training."""
        self._model_files: dict[str, bytes] | None = None
        """What makes the folder one of transformers', from the first save on."""
        self._said = False
        self._writing: tuple[int, Writing] | None = None
        self._begun: int | None = None
        """The step whose folder this rank has made, to write into."""
        self._ratings: dict[int, Metrics] = {}
        """Evaluations of checkpoints that are still being written."""
        self.asynchronous = asynchronous
        """True if training goes on before the files are written."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this run wrote or went on from."""
        self.sign_of_life: Callable[[], None] = lambda: None
        """Called after each parameter: a large checkpoint may take longer than a hang is allowed to."""

        self.claim: Callable[[], None] = lambda: None
        """Called by rank 0 before each save. Raises CheckpointError where the run's directory is another run's."""

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of ``step`` is, or will be."""
        return self._store.path(step)

    def due(self, step: int, total_steps: int) -> bool:
        """True if a checkpoint is to be written after ``step``."""
        regular = self._every is not None and epochs.due(step, self._every)
        return step != self.saved_step and (regular or (self._at_end and step == total_steps))

    def prepare(self) -> None:
        """**Collective**, after the first step, which makes the optimizer's state: memory for copies is taken from the system."""
        if self._staging is None or self._every is None:
            return
        state = self._engine.state()
        if not isinstance(state.parameters, ShardedParameters):
            return
        writer = Writer(self._engine, state, self._store.directory, layout=self._layout)
        self._staging.reserve(writer.sizes, ahead=True)

    def _begin(self, step: int) -> None:
        self.claim()
        self._begun = None
        self._store.begin(step)
        self._begun = step

    def save(self, step: int, *, loss: float | None, evaluation: Metrics) -> float:
        """**Collective.** Saves a checkpoint after ``step``; returns the seconds that training stood still.

        Raises CheckpointError, on every rank, where one cannot write; the checkpoint before is still there.
        """
        began = time.perf_counter()
        self.settle()
        self._look_for_metric(evaluation)
        engine, world = self._engine, self._engine.plan.world
        begun = catch_io_error(lambda: self._begin(step)) if world.is_main else ""
        self._check(step, begun)
        folder = self._store.partial(step)
        self._check(step, "" if _appears(folder) else _NOT_SHARED)
        state = engine.state()
        writer = Writer(engine, state, folder, staging=self._staging, layout=self._layout)
        if not isinstance(state.parameters, ShardedParameters):
            state = replace(state, parameters=engine.state().parameters)  # laying out has used them up
        failure = writer.take(state, self.sign_of_life)
        shapes = {name: buffer.shape for name, buffer in engine.buffers().items()}
        resized = [name for name, shape in shapes.items() if self._built.get(name, shape) != shape]
        facts = {"random": generators.capture(engine.plan.device), "resized": resized}
        wrong = failures(engine, failure)
        if wrong:
            writer.close()
            self._give_up(step, wrong)
        manifest = self._manifest(state, step, loss, evaluation) | writer.manifest

        def commit(words: Sequence[Json]) -> None:
            if self._model_files is None:
                self._model_files = self._make_model_files(manifest, self._say)
            files = write_small(folder, writer, words, self._model_files)
            resized = sorted({name for word in words for name in word["resized"]})
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
            "evaluation": store.finite(evaluation),
            "aliases": dict(state.aliases),
            **{key: follower.state() for key, follower in plan.followers.items()},
            **self._about,
        }

    def rate(self, step: int, evaluation: Metrics) -> None:
        """**Collective.** The evaluation of a checkpoint that was saved before it, now that there is one.

        One that is still being written gets it when it is whole. A run that ends before evaluates again when it goes on.
        """
        self._look_for_metric(evaluation)
        if self._engine.plan.world.is_main and evaluation:
            self._ratings[step] = evaluation
        if self._writing is None:
            self._rate()

    def _rate(self) -> None:
        ratings, self._ratings = self._ratings, {}
        for step, evaluation in ratings.items():
            if self._store.path(step).is_dir():  # not where another run's was gone on from
                if failure := catch_io_error(partial(self._store.rate, step, evaluation)):
                    self._say(f"warning: the evaluation after step {step} cannot be added to its checkpoint: {failure}")
                self._prune()

    @property
    def failed(self) -> bool:
        """True if a checkpoint under way is known to have failed on this rank: :meth:`settle` says what, on all ranks."""
        return self._writing is not None and self._writing[1].failed

    def settle(self) -> None:
        """**Collective.** Waits until the checkpoint that is written in the background, if there is one, is complete.

        Raises CheckpointError, on every rank, where one could not write; the checkpoint before is still there.
        """
        if self._writing is None:
            return
        step, writing = self._writing
        self._writing = None
        writing.wait()
        wrong = failures(self._engine, writing.failure)
        writing.finish(hopeless=bool(wrong))
        if wrong:
            self._give_up(step, wrong)
        self._check(step, writing.outcome)
        self._rate()

    def outlast(self) -> None:
        """Not collective. Waits some seconds for the checkpoint that is being written: this rank's error shall not cost it."""
        if self._writing is None:
            return
        step, writing = self._writing
        until = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < until and not writing.failed and not self.path(step).is_dir():
            time.sleep(0.02)

    def close(self) -> None:
        """Not collective. Lets a checkpoint that is being written be finished, whatever else went wrong."""
        if self._writing is not None:
            self._writing[1].finish()
            self._writing = None

    def _look_for_metric(self, evaluation: Metrics) -> None:
        metric = (self._retention.best or "").partition(":")[0]
        value = evaluation.get(metric, 0.0)
        if not math.isfinite(value) and not self._said:
            what = "NaN" if math.isnan(value) else "infinite"
            self._say(f"warning: keep_best: {metric} is {what} here, so this checkpoint cannot be the best")
            self._said = True

    def _prune(self) -> str:
        try:
            removed = self._store.prune(self._retention)
        except OSError as error:  # the new checkpoint is safe; old ones that stay are no reason to stop training
            return f"; an old checkpoint cannot be removed: {error}"
        return f"; removed {', '.join(str(step) for step in removed)}" if removed else ""

    def _check(self, step: int, failure: str) -> None:
        """**Collective.** Raises CheckpointError on every rank where any rank failed. ``failure``: what went wrong here, or ""."""
        if wrong := failures(self._engine, failure):
            self._give_up(step, wrong)

    def _give_up(self, step: int, wrong: Sequence[str]) -> NoReturn:
        if self._begun == step:  # else the folder is another run's
            self._store.abandon(step)
        try:
            newest = self._store.newest_first()
            before = f"the last good one is {newest[0]}" if newest else "there is no earlier one"
        except OSError as error:  # the directory is away, which may be the very reason
            before = f"the folder with earlier ones cannot be read: {error.strerror}"
        raise CheckpointError(f"the checkpoint of step {step} cannot be written: {'; '.join(wrong)}; {before}")


def _appears(folder: Path) -> bool:
    """Returns whether a folder that rank 0 has made is there, or comes: over NFS a host may remember that it was not."""
    until = time.monotonic() + _LAST_SECONDS
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            list(folder.parent.iterdir())  # which asks the server anew
    return True


def write_small(folder: Path, writer: Writer, words: Sequence[Json], more: Mapping[str, bytes]) -> dict[str, Json]:
    """Writes what is not a tensor: generators, the index of several files of weights, and ``more`` files by name. Returns the
    manifest's entries of all files.

    ``words``: what each rank says that it has written. Raises OSError, and CheckpointError where that is not all.
    """
    entries = {
        name: combined(name, size, [run for word in words for run in word["runs"].get(name, ())])
        for name, size in writer.plan.sizes.items()
    }
    small = {RNG: json.dumps([word["random"] for word in words if "random" in word]).encode(), **more}
    if len(set(writer.plan.weights.values())) > 1:
        index = {"metadata": {}, "weight_map": writer.plan.weights}
        small["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    entries |= {name: write(folder / name, content) for name, content in small.items()}
    return {name: asdict(entry) for name, entry in entries.items()}
