"""Horovod's elastic mode: processes come and go under ``horovodrun --min-np``, and training continues in those that stay.

``horovod.torch.elastic`` says when: a collective fails because a process is gone, or its driver has found other hosts. Then the
ring is made anew, and every process builds its engine for the new size around the last commit, a copy of the whole state in
each one's memory, and for a moment two: the old one goes when the new one is whole, or a failure in between would lose both.
Processes that are new get it from one that has it. Data are read once in a process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.torch.elastic import run
from torch import Tensor

from dsframe.checkpoint.memory_checkpoint import Commit
from dsframe.checkpoint.resume import Start
from dsframe.cluster import world as worlds
from dsframe.cluster.process_group import device_of
from dsframe.cluster.world import World
from dsframe.engines.horovod.environment import settle_environment
from dsframe.model.state import EngineState, LossScaleState, ParameterState, Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsframe.config import Config
    from dsframe.engine import Engine

Result = TypeVar("Result")


class HostCommits(State):  # type: ignore[misc]  # Horovod has no types
    """The last commit of this process, and Horovod's questions about it."""

    def __init__(self, every_steps: int) -> None:
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self.last: Commit | None = None
        self._every = every_steps

    def due(self, step: int) -> bool:
        """Every so many steps."""
        return step % self._every == 0

    def keep(self, engine: Engine, start: Start) -> None:
        """**Collective.** Copies the state while the copy before is still held.

        Raises Horovod's HostsUpdatedInterrupt where the driver has found other hosts.
        """
        self.last = Commit(start, Snapshot(engine.state()))
        self.check_host_updates()

    def restore(self) -> None:
        """Does nothing: the next engine is built around ``last``."""

    def reset(self) -> None:
        """The old engine goes before the new one comes: its hooks and its optimizer hold each other."""
        gc.collect()

    def sync(self) -> None:
        """**Collective.** Everybody has the newest commit that anybody has."""
        step = -1 if self.last is None else self.last.start.step
        steps: list[int] = hvd.allgather_object(step, name="dsframe.steps")
        newest = max(steps)
        if min(steps) != newest:
            self.last = _sent(self.last, steps.index(newest), step == newest)


@dataclass(frozen=True)
class _Outline:
    """A commit without its tensors."""

    start: Start
    updates: int
    loss_scale: LossScaleState | None
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, tuple[Mapping[str, tuple[int, ...]], Mapping[str, float]]]
    """Name -> (shape of the weight, under "", and of each of the optimizer's tensors; its numbers)."""


def _sent(commit: Commit | None, root: int, has: bool) -> Commit:
    """**Collective.** The commit of rank ``root``, tensor by tensor: Gloo sends no objects of 2 GiB."""
    outline, tensors = None, {}
    if commit is not None and has:
        parts = {name: commit.state.parameter(name) for name in commit.state.shapes}
        tensors = {
            f"{name}/{key}": t
            for name, parameter in parts.items()
            for key, t in {"": parameter.weight, **parameter.moments}.items()
        }
        shapes = {
            name: (
                {key: tuple(t.shape) for key, t in {"": parameter.weight, **parameter.moments}.items()},
                dict(parameter.scalars),
            )
            for name, parameter in parts.items()
        }
        state = commit.state
        outline = _Outline(commit.start, state.updates, state.loss_scale, dict(state.buffers()), shapes)
    received: _Outline = hvd.broadcast_object(outline, root, name="dsframe.commit")
    if not tensors:
        tensors = {
            f"{name}/{key}": torch.empty(shape)
            for name, (shapes_of, _) in received.parameters.items()
            for key, shape in shapes_of.items()
        }
    hvd.broadcast_parameters(tensors, root)
    if commit is not None and has:
        return commit
    parameters = [
        ParameterState(name, tensors[f"{name}/"], {key: tensors[f"{name}/{key}"] for key in shapes_of if key}, scalars)
        for name, (shapes_of, scalars) in received.parameters.items()
    ]
    return Commit(
        received.start, Snapshot(EngineState(received.updates, received.loss_scale, received.buffers, {}, parameters))
    )


def train(attempt: Callable[[World, HostCommits], Result], config: Config) -> Result:
    """**Collective** from inside. Calls ``attempt(world, commits)`` for each set of processes, until one comes to the end.

    ``attempt`` builds everything for the world it is given, from the last commit where there is one.
    """
    here = worlds.here()
    # Before Horovod starts, also in processes that come later.
    settle_environment(config.settings.horovod, here, device_of(here), running=hvd.is_initialized())
    hvd.init()

    @run  # type: ignore[untyped-decorator]
    def again(commits: HostCommits) -> Result:
        # The environment keeps what was so when this process was started (measured, 0.28.1).
        ranks_and_sizes = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())
        return attempt(World(*ranks_and_sizes, launcher="horovodrun", elastic=True), commits)

    result: Result = again(HostCommits(config.settings.horovod.commit_every_steps))
    return result
