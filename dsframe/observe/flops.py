"""``flops_profiler``: what each module of the model computes in one step, and how long its forward pass takes; on every engine.

Counted are the operations that are run: products of matrices, convolutions and attention, as torch dispatches them, in forward
and backward pass, on this rank. (DeepSpeed's own profiler replaces torch's functions, sees the forward pass alone and prints
nothing for pipelines; of forward passes both count the same.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
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
    return FlopsProfile(plan.config.deepspeed.flops_profiler, *steps, plan.device, context.say)


def flops_of(operator: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Of one call, two for a product and its sum; 0 of all that is no product of matrices, convolution or attention."""
    name = operator.overloadpacket
    if name is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # which torch's own table lacks
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if name is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
    if name is torch.ops.aten.convolution_backward:  # torch's table counts groups as if each saw all channels (2.13)
        gradient, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        products = (inputs if transposed else gradient).numel() * weight[0].numel()
        return float(2 * products * (bool(wanted[0]) + bool(wanted[1])))
    count = flop_registry.get(name)
    return float(count(*args, **kwargs, out_val=out)) if count else 0.0


@dataclass
class _Part:
    """A module, with all in it."""

    name: str
    kind: str
    parameters: int
    seconds: float = 0.0
    flops: float = 0.0
    inner: list[_Part] = field(default_factory=list)

    @property
    def plain(self) -> str:
        """The name in the model itself; its class for the whole model."""
        name = re.sub(r"^(module(\.|$))+", "", self.name)
        return name or self.kind


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


def in_backward() -> bool:
    """Whether autograd runs now."""
    return torch._C._current_graph_task_id() != -1


class _ModuleCounter(OperationCounter):  # type: ignore[no-untyped-call]
    """FLOPs of the forward pass by module; ``inside``: the modules that run now."""

    def __init__(self, inside: list[_Part]) -> None:
        super().__init__()
        self._inside = inside

    def seen(self, func: Any, args: Any, kwargs: Any, out: Any, flops: float) -> None:
        if flops and not in_backward():
            for part in self._inside:
                part.flops += flops


class FlopsProfile(Observer):
    """One rank's. Times are of the step that the file names, counts of the one after it, because counting takes time itself."""

    def __init__(
        self,
        section: FlopsProfiler,
        micro_batches: int,
        done_steps: int,
        last_step: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        """``done_steps``: taken before the process's first. ``last_step``: counted from 1. ``say``: takes the
        report where the section names no file."""
        self._section, self._micro_batches, self._device, self._say = section, micro_batches, device, say
        self._timed = done_steps + section.profile_step + 1  # DeepSpeed counts the steps before
        if self._timed > last_step:
            say(
                f"dsframe: no flops profile: it would be of step {self._timed}, and the run ends after step {last_step}"
            )
        self._counted = min(self._timed + 1, max(last_step, self._timed))
        self._inside: list[_Part] = []
        self._parts: dict[int, _Part] = {}
        self._roots: list[_Part] = []
        self._step_seconds = 0.0
        self.forward = self.backward = 0.0
        """FLOPs of one step on this rank."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step not in (self._timed, self._counted):
            yield
            return
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._timing = step == self._timed
        count = _ModuleCounter(self._inside) if step == self._counted else None
        began = self._now()
        try:
            with count or nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        if self._timing:
            self._step_seconds = self._now() - began
        if count is not None:
            self.forward, self.backward = count.forward, count.backward
            self._write(self.text())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if in_backward():
            return  # computed again, for the backward pass
        part = self._parts.get(id(module))
        if part is None:
            part = self._parts[id(module)] = self._part(module)
        self._inside.append(part)
        if self._timing:
            part.seconds -= self._now()

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        part = self._parts.get(id(module))
        if in_backward() or part is None or part not in self._inside:
            return
        if self._timing:
            part.seconds += self._now()
        while self._inside.pop() is not part:  # modules that an error left are not open any more
            pass

    def _part(self, module: nn.Module) -> _Part:
        outer = self._inside[-1] if self._inside else None
        parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())
        part = _Part("", type(module).__name__, parameters)
        part.name = self._names(module).get(id(module), part.kind)
        (outer.inner if outer else self._roots).append(part)
        return part

    def _names(self, module: nn.Module) -> dict[int, str]:
        if not self._inside:
            self._known = {id(inner): name for name, inner in module.named_modules() if name}
        return self._known

    def _write(self, text: str) -> None:
        target = self._section.output_file
        if not target:
            self._say(text)
            return
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text + "\n", encoding="utf-8")

    def text(self) -> str:
        """The report, for one micro-batch of this rank."""
        count, section = self._micro_batches, self._section
        forward, seconds = self.forward / count, sum(part.seconds for part in self._roots) / count
        lines = [
            f"flops profile of rank 0: times of step {self._timed}, operations of step {self._counted}"
            + (" (counting is in the times)" if self._timed == self._counted else ""),
            f"  parameters of its modules  {sum(part.parameters for part in self._roots):,}",
            f"  forward, a micro-batch     {amount(forward)}FLOP ({amount(forward / 2)}MAC), {seconds * 1e3:.3g} ms, "
            f"{amount(_rate(forward, seconds))}FLOP/s",
            f"  backward, a micro-batch    {amount(self.backward / count)}FLOP",
            f"  a step of {count:>3} micro-batches {amount(self.forward + self.backward)}FLOP, {self._step_seconds * 1e3:.4g} ms, "
            f"{amount(_rate(self.forward + self.backward, self._step_seconds))}FLOP/s",
        ]
        parts = list(_walk([_unwrapped(root) for root in self._roots]))
        deepest = max((depth for depth, _ in parts), default=0)
        shown = deepest if section.module_depth < 0 else min(section.module_depth, deepest)
        for wanted in range(shown + 1):
            level = sorted((part for depth, part in parts if depth == wanted), key=lambda part: -part.flops)
            top = ", ".join(f"{part.plain} {amount(part.flops / count)}FLOP" for part in level[: section.top_modules])
            lines.append(f"  most at depth {wanted}: {top}")
        if section.detailed:
            lines.append(f"  {'module':<44} {'parameters':>12} {'forward FLOP':>13} {'share':>6} {'ms':>8}")
            for depth, part in parts:
                if depth <= shown:
                    name = f"{'  ' * depth}{part.plain.rpartition('.')[2]} ({part.kind})"
                    share = part.flops / self.forward if self.forward else 0.0
                    figures = f"{amount(part.flops / count):>12} {share:>7.1%} {part.seconds / count * 1e3:>8.3f}"
                    lines.append(f"  {name:<44} {part.parameters:>12,} {figures}")
        return "\n".join(lines)


def _unwrapped(root: _Part) -> _Part:
    """The model, without what engines wrap around it: depths mean the same on each."""
    while [part.name.rpartition(".")[2] for part in root.inner] == ["module"]:
        root = root.inner[0]
    return root


def _walk(parts: list[_Part], depth: int = 0) -> Iterator[tuple[int, _Part]]:
    for part in parts:
        yield depth, part
        yield from _walk(part.inner, depth + 1)


def _rate(flops: float, seconds: float) -> float:
    return flops / seconds if seconds > 0 else 0.0
