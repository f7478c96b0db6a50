"""Checks that all ranks call the same modules in the same order.

An engine that gathers a module's weights when the module is called needs the same calls on all ranks. If calls differ,
ranks wait forever, a library ends the process, or weights of modules of equal size are exchanged silently. So each rank
keeps a list of its calls:

- In the first step, and when a call differs from the previous step, ranks meet in a store before anything is gathered.
- At the end of a step they compare a digest of the list, in a collective that runs while the step continues.
- If a step does not end, the watchdog compares the lists (:mod:`dsframe.guard.watchdog`).
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsframe.cluster.exchange import by_value, first_difference
from dsframe.engine import Engine
from dsframe.errors import TaskError

MOST_RANKS = 256
"""Largest number of ranks that meet in the store, which one process serves."""
MOST_MEETINGS = 20_000
"""Limit for models whose calls change in every step, on all ranks alike; later calls are not checked in the store."""
_PASS, _BACKWARD = 0, 1
_LOOK_SECONDS = 2.0
"""Time after which waiting ranks check whether the others called something else."""


@dataclass
class _Step:
    """A step whose comparison is in progress."""

    calls: list[int]
    gradients: list[int]
    sent: Tensor
    """The numbers to compare; on the CPU once ``arrived`` has completed."""
    work: Any = None
    arrived: Any = None
    """On a GPU, the event after which ``sent`` is valid."""


class NoCalls:
    """No-op replacement of :class:`CallOrder` for engines whose ranks need not call the same modules."""

    watches = False
    """False while no call gathers weights, so that ranks may call different modules."""

    def backward(self, loss: Tensor) -> None:
        """Notes that the backward pass from ``loss`` begins."""

    def compare(self) -> None:
        """Notes that a step has ended."""

    def check(self, *, waits: bool = True) -> None:
        """Raises TaskError if calls differed."""

    def close(self) -> None:
        """Restores the model."""


class CallOrder(NoCalls):
    """The calls of this rank, starting with the first micro-batch of a step."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """``modules``: those whose calls must be the same on all ranks, by name. ``parameters``: those that must have
        gradients on all ranks or on none."""
        self._engine, self._model, self._thread = engine, model, threading.get_ident()
        self._names = ["a forward pass", "a backward pass", *modules]
        self._parameters = list(parameters or ())
        self._numbers = {id(parameter): number for number, parameter in enumerate((parameters or {}).values())}
        self.log: list[str] | None = None
        """The calls of all models of a step in one order, if several models share it, each with a ``CallOrder``."""
        self.watches = True
        self._calls: list[int] = []
        self._gradients: list[int] = []
        self._passes = self._meetings = 0
        self._known: dict[bool, list[int]] = {}
        """The calls of the last step that was the same on all ranks, for training (True) and evaluation (False)."""
        self._under_way: list[_Step] = []
        self._store: Any = None
        self._stream: Any = None
        self._hooks: list[RemovableHandle] = []
        for number, parameter in enumerate((parameters or {}).values()):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._reduced, number))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        for number, module in [(_PASS, model), *enumerate(modules.values(), start=_BACKWARD + 1)]:
            self._hooks.append(module.register_forward_pre_hook(partial(self._called, number), prepend=True))

    def connect(self, store: Any) -> None:
        """``store``: a torch store shared by all ranks, over a separate connection."""
        if self._engine.plan.world.size <= MOST_RANKS:
            self._store = store

    def close(self) -> None:
        """Restores the model, because a task may pass it to the next engine."""
        for hook in self._hooks:
            hook.remove()

    # One step.

    def _called(self, number: int, *_: object) -> None:
        if not self.watches:
            return
        if threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1:  # not autograd's thread
            raise TaskError(
                f"{type(self._engine.plan.task).__name__}: {self._names[number]} is called in a thread of its own. "
                f"{self._engine.description} gathers a module's weights when it is called, and threads call in any order: call "
                "modules one after another, write whole_weights = True in the task, or take an engine that keeps whole weights on "
                "each rank"
            )
        position, known = len(self._calls), self._known.get(self._model.training, ())
        self._calls.append(number)
        if self.log is not None:
            self.log.append(self._names[number])
        if (position >= len(known) or known[position] != number) and self._store is not None:
            self._meet(number)

    def _reduced(self, number: int, *_: object) -> None:
        self._gradients.append(self._passes * len(self._parameters) + number)

    def backward(self, loss: Tensor) -> None:
        """Notes that the backward pass from ``loss`` begins. **Collective** in the first step. Raises TaskError if the
        ranks would compute gradients of different parameters."""
        self._called(_BACKWARD)
        self._passes += 1
        if True not in self._known and self._parameters:
            numbers = sorted(self._numbers[leaf] for leaf in _leaves(loss) if leaf in self._numbers)
            if difference := first_difference(self._engine, [self._gradient(number) for number in numbers]):
                raise TaskError(self._described(difference))

    def compare(self) -> None:
        """**Collective.** Starts the comparison and does not wait for it."""
        device = self._engine.plan.device
        numbers = [_digest(self._calls), _digest(sorted(self._gradients))]  # gradients arrive in any order
        both = [*numbers, *(-number for number in numbers)]
        # Pinned memory: otherwise the copy to the GPU blocks the host.
        sent = torch.tensor(both, dtype=torch.float64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self._under_way.append(_Step(self._calls, self._gradients, sent))
        self._calls, self._gradients, self._passes = [], [], 0
        step = self._under_way[-1]
        step.work = dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True)
        if device.type == "cuda":
            self._fetch(step)

    def _fetch(self, step: _Step) -> None:
        """Copies the numbers to the CPU on a separate stream, so that the step does not wait."""
        self._stream = self._stream or torch.cuda.Stream(step.sent.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            step.work.wait()
            step.sent.record_stream(self._stream)
            step.sent = torch.empty(4, dtype=torch.float64, pin_memory=True).copy_(step.sent, non_blocking=True)
            step.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.arrived.record(self._stream)

    def check(self, *, waits: bool = True) -> None:
        """**Collective.** Raises TaskError on all ranks if their calls differed. ``waits``: also in the last step;
        otherwise, on a GPU, all ranks check a step two steps later, so that none waits for the device."""
        while len(self._under_way) > (0 if waits else 2):
            step = self._under_way[0]
            if step.arrived is None:
                step.work.wait()
            else:
                step.arrived.synchronize()
            if not torch.equal(step.sent[:2], -step.sent[2:]):
                calls = [self._names[number] for number in step.calls]
                arrived = [self._gradient(number) for number in sorted(step.gradients)]
                raise TaskError(self._described(first_difference(self._engine, [*calls, *arrived])))
            self._known[_BACKWARD in step.calls] = step.calls
            del self._under_way[0]

    # Different calls.

    def _meet(self, number: int) -> None:
        """**Collective** through the store. Raises TaskError if other ranks are about to call something else."""
        self._meetings += 1
        if self._meetings > MOST_MEETINGS:
            return
        store, size, began = self._store, self._engine.plan.world.size, time.monotonic()
        key, looked, pause = f"meet/{self._meetings}/{number}", began, 1e-4
        if store.add(key, 1) == size:
            store.set(f"{key}/all", "")
            return
        while not store.check([f"{key}/all"]):
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                if difference := self.difference(store, f"meet/{self._meetings}"):
                    time.sleep(_LOOK_SECONDS)  # the other ranks read the store too
                    raise TaskError(difference)

    def difference(self, store: Any, moment: str) -> str:
        """Writes this rank's calls to ``store`` under ``moment``, a name that is the same on all ranks. Returns the
        message if all ranks have written theirs and they differ; else ""."""
        world = self._engine.plan.world
        prefix = f"calls/{moment}"
        store.set(f"{prefix}/{world.rank}", json.dumps(list(self._names_called())))
        keys = [f"{prefix}/{rank}" for rank in range(world.size)]
        if not store.check(keys):
            return ""
        for calls in zip(*(json.loads(store.get(key)) for key in keys), strict=False):
            if len(set(calls)) > 1:
                return self._described(calls)
        return ""

    def _names_called(self) -> Iterator[str]:
        if self.log is not None:
            yield from self.log[:]
            return
        for calls in (*(step.calls for step in self._under_way), self._calls):
            yield from (self._names[number] for number in calls[:])

    def _gradient(self, number: int) -> str:
        return f"a gradient of {self._parameters[number % len(self._parameters)]}"

    def _described(self, of_ranks: Sequence[str]) -> str:
        """Returns the message. ``of_ranks``: each rank's call at the first position where they differ, in rank order."""
        plan = self._engine.plan
        first = by_value([text or "nothing more" for text in of_ranks])
        return (
            f"{type(plan.task).__name__}: ranks call different modules of the model. The first difference: {first}. "
            f"{self._engine.description} gathers a module's weights from all ranks when it is called, so every rank has to call "
            "the same modules, and the same outputs have to take part in the loss. Call every branch on every rank and choose "
            "by torch.where, or take an engine that keeps whole weights on each rank"
        )


def _digest(numbers: Sequence[int]) -> float:
    """Returns an integer that a float64 represents exactly."""
    return float(zlib.crc32(array("I", numbers).tobytes()))


def _leaves(loss: Tensor) -> set[int]:
    """Returns the ids of the parameters that ``loss`` depends on."""
    leaves, seen, ahead = set[int](), set[Any](), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        ahead += [following for following, _ in node.next_functions]
    return leaves
