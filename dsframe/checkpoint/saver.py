"""Writing: all ranks write one checkpoint together.

Every rank writes its share of the parameters, which it gets from those that hold it (``transfer``) or gathers (``portable``);
rank 0 makes the folder, writes what is small, and when all have said that their files are on the disk, the manifest, the rename
and the pointer. What one rank cannot write, all learn: then nothing is renamed, what was written is taken away, and the checkpoint
before stays as it is.

Training goes on as soon as the files are written, which is when the system has their bytes: a thread waits until they are on the
disk, and rank 0's then commits (``background``). Asynchronously, each rank copies its share, and threads write as well. At most
one checkpoint is under way: the next save waits for it, and says what went wrong with it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dsframe.checkpoint import generators, portable, staging, store
from dsframe.checkpoint.background import Writing
from dsframe.checkpoint.portable import PartWriter
from dsframe.checkpoint.store import Retention, Store
from dsframe.checkpoint.transfer import ShardWriter
from dsframe.cluster import process_group
from dsframe.cluster.exchange import all_gather_text, failures, same
from dsframe.config.resolve import epochs
from dsframe.errors import CheckpointError
from dsframe.model.state import ShardedParameters

if TYPE_CHECKING:
    from dsframe.engine import Engine
    from dsframe.model.state import EngineState


_LAST_SECONDS = 10.0


class Saver:
    """Writes a run's checkpoints. Every method but :meth:`due` and :meth:`path` is **collective**."""

    def __init__(
        self,
        engine: Engine,
        folder: Store,
        about: Mapping[str, Any],
        *,
        every_steps: Fraction | None,
        at_end: bool,
        retention: Retention,
        asynchronous: bool = False,
        sharded: bool = False,
        say: Callable[[str], None],
    ) -> None:
        """``about``: what the manifest tells of the run, beyond what changes from step to step; plain JSON values.
        ``sharded``: where ranks hold ranges of parameters, they stay as they lie."""
        self._engine, self._store, self._about = engine, folder, about
        self._every, self._at_end, self._retention, self._say = every_steps, at_end, retention, say
        self._sharded = sharded
        self._staging = staging.Staging() if asynchronous else None
        self._group: Any = None
        self._told = False
        self._writing: tuple[int, Writing] | None = None
        self._begun: int | None = None
        """The step whose folder this rank has made, to write into."""
        self._ratings: dict[int, Mapping[str, float]] = {}
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
        parameters = self._engine.state().parameters
        if not isinstance(parameters, ShardedParameters):
            return
        tensors = [tensor for shard in parameters.shards for tensor in shard.tensors.values()]
        self._staging.reserve(sum(tensor.size * tensor.dtype.itemsize + staging.ALIGN for tensor in tensors))

    def _begin(self, step: int) -> None:
        self.claim()
        self._begun = None
        self._store.begin(step)
        self._begun = step

    def save(self, step: int, *, loss: float | None, evaluation: Mapping[str, float]) -> float:
        """**Collective.** Saves a checkpoint after ``step``; returns the seconds that training stood still.

        Raises CheckpointError, on every rank, where one cannot write; the checkpoint before is still there.
        """
        began = time.perf_counter()
        self.settle()
        self._look_for_metric(evaluation)
        engine, world = self._engine, self._engine.plan.world
        begun = portable.catch_io_error(lambda: self._begin(step)) if world.is_main else ""
        self._check(step, begun)
        state = engine.state()
        folder = self._store.partial(step)
        writer, failure = self._write(state, folder)
        random = generators.capture(engine.plan.device)
        self._check(step, failure)
        manifest = self._manifest(state, step, loss, evaluation) | {"parameters": writer.parameters}
        if any("pieces" in entry for entry in writer.parameters.values()):
            manifest["format"] = store.SHARDED_FORMAT

        def commit(words: Sequence[Mapping[str, Any]]) -> None:
            rng_entry = store.write(folder / portable.RNG, json.dumps([word["random"] for word in words]).encode())
            every = {name: entry for word in words for name, entry in word["files"].items()}
            every[portable.RNG] = asdict(rng_entry)
            self._store.commit(step, {**manifest, "files": every})
            size = sum(entry["bytes"] for entry in every.values())
            how = " in the background" if self.asynchronous else ""
            seconds, removed = time.perf_counter() - began, self._prune()
            self._say(f"saved {self._store.path(step)}: {size / 1e6:,.1f} MB in {seconds:.2f} s{how}{removed}")

        commit_here = commit if world.is_main else None
        self._writing = step, Writing(writer, folder, world.rank, world.size, random, commit_here, self.sign_of_life)
        self.saved_step = step
        stall = time.perf_counter() - began
        if self.asynchronous:
            self._say(f"saving step {step}: training stood still for {stall:.2f} s")
        return stall

    def _write(self, state: EngineState, folder: Path) -> tuple[PartWriter | ShardWriter, str]:
        """**Collective.** Writes this rank's files, or copies what is to be in them. Returns also what went wrong, or ""."""
        world, buffers = self._engine.plan.world, self._buffers_file(state)
        if self._staging is not None:
            self._staging.begin()
        if not isinstance(state.parameters, ShardedParameters):
            return portable.write_state(
                state,
                folder,
                world.rank,
                world.size,
                buffers,
                sign_of_life=self.sign_of_life,
                staging=self._staging,
                sync=self.asynchronous,
            )
        writer = ShardWriter(
            self._engine, state.parameters.shards, folder, sharded=self._sharded, sync=self.asynchronous
        )
        if buffers and state.buffers:
            writer.add(buffers, portable.copied(state.buffers))
        if self._staging is None:
            return writer, portable.catch_io_error(lambda: writer.write(self.sign_of_life))
        if writer.exchanges and self._group is None:
            self._group = process_group.of_its_own()
        writer.keep(self._staging, self._group, self.sign_of_life)
        return writer, ""

    def _manifest(
        self, state: EngineState, step: int, loss: float | None, evaluation: Mapping[str, float]
    ) -> dict[str, Any]:
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

    def rate(self, step: int, evaluation: Mapping[str, float]) -> None:
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
                if failure := portable.catch_io_error(
                    lambda step=step, metrics=evaluation: self._store.rate(step, metrics)
                ):
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

    def close(self, *, hopeless: bool = False) -> None:
        """Not collective. Lets a checkpoint that is being written be finished, whatever else went wrong. ``hopeless``: not all
        ranks are there any more, so it is given up where it needs them."""
        if self._writing is not None:
            self._writing[1].finish(hopeless)
            self._writing = None

    def _buffers_file(self, state: EngineState) -> str | None:
        """**Collective.** Rank 0 writes its buffers, and every rank that has others writes those too."""
        digest, rank = portable.digest_of(state.buffers), self._engine.plan.world.rank
        digests = [] if same(self._engine, digest) else all_gather_text(self._engine, digest)
        if rank == 0:
            return portable.BUFFERS
        if not digests:
            return None
        return portable.buffers_name(rank) if digests[rank] != digests[0] else None

    def _look_for_metric(self, evaluation: Mapping[str, float]) -> None:
        metric = (self._retention.best or "").partition(":")[0]
        value = evaluation.get(metric, 0.0)
        if not math.isfinite(value) and not self._told:
            what = "NaN" if math.isnan(value) else "infinite"
            self._say(f"warning: keep_best: {metric} is {what} here, so this checkpoint cannot be the best")
            self._told = True

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
