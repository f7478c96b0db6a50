"""``flops_profiler``: what the model computes in one step, on every engine.

Counted are the operations that are run: products of matrices, convolutions and attention, as torch
dispatches them, in forward and backward pass, on this rank. (DeepSpeed's own profiler replaces torch's
functions, sees the forward pass only and prints nothing for pipelines.) Times are in the traces
(``dsframe.profile``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dsframe.observe.observer import Observer, ObserverContext
from dsframe.text import amount

if TYPE_CHECKING:
    from dsframe.config.schema.monitor import FlopsProfiler


def observer(context: ObserverContext) -> Observer | None:
    """Rank 0's profile; the others have none."""
    plan = context.plan
    if not plan.world.is_main:
        return None
    steps = plan.batch.accumulation_steps, context.done_steps, context.total_steps
    return FlopsProfile(plan.config.deepspeed.flops_profiler, *steps, context.say)


def flops_of(operator: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Of one call, two for a product and its sum; 0 of what is no product, convolution, attention."""
    name, aten = operator.overloadpacket, torch.ops.aten
    if name is aten._scaled_dot_product_flash_attention_for_cpu:  # which torch's own table lacks
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if name is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
    if name is aten.convolution_backward:  # torch 2.13 counts groups as if each saw all channels
        gradient, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        products = (inputs if transposed else gradient).numel() * weight[0].numel()
        return float(2 * products * (bool(wanted[0]) + bool(wanted[1])))
    count = flop_registry.get(name)
    return float(count(*args, **kwargs, out_val=out)) if count else 0.0


def in_backward() -> bool:
    """True while autograd runs."""
    return torch._C._current_graph_task_id() != -1


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of every operation while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = self.backward = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` and counts it, in the forward or in the backward pass."""
        out = func(*args, **(kwargs or {}))
        flops = flops_of(func, args, kwargs or {}, out)
        if in_backward():
            self.backward += flops
        else:
            self.forward += flops
        self.seen(func, args, kwargs or {}, out, flops)
        return out

    def seen(self, func: Any, args: Any, kwargs: Any, out: Any, flops: float) -> None:
        """For subclasses: what else is to be known of an operation."""


class FlopsProfile(Observer):
    """One rank's, of one step."""

    def __init__(
        self,
        section: FlopsProfiler,
        micro_batches: int,
        done_steps: int,
        last_step: int,
        say: Callable[[str], None],
    ) -> None:
        """``done_steps``: taken before the process's first. ``last_step``: counted from 1. ``say``:
        takes the report where the section names no file."""
        self._section, self._micro_batches, self._say = section, micro_batches, say
        self._step = done_steps + section.profile_step + 1  # DeepSpeed counts the steps before
        self._count = OperationCounter()
        if self._step > last_step:
            when = f"it would be of step {self._step}, and the run ends after step {last_step}"
            say(f"dsframe: no flops profile: {when}")

    @property
    def forward(self) -> float:
        """FLOPs of the step's forward passes on this rank."""
        return self._count.forward

    @property
    def backward(self) -> float:
        """FLOPs of the step's backward passes on this rank."""
        return self._count.backward

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if step != self._step:
            yield
            return
        with self._count:
            yield
        target = self._section.output_file
        try:
            if target:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                Path(target).write_text(self.text() + "\n", encoding="utf-8")
        except OSError as error:
            self._say(f"flops_profiler.output_file: {target}: {error.strerror}; the profile is here instead")
            target = None
        if not target:
            self._say(self.text())

    def text(self) -> str:
        """The report, for one micro-batch of this rank."""
        count = self._micro_batches
        forward, backward = self.forward / count, self.backward / count
        lines = [
            f"flops profile of rank 0, step {self._step}",
            f"  forward, a micro-batch     {amount(forward)}FLOP ({amount(forward / 2)}MAC)",
            f"  backward, a micro-batch    {amount(backward)}FLOP",
            f"  a step of {count:>3} micro-batches {amount(self.forward + self.backward)}FLOP",
        ]
        return "\n".join(lines)
