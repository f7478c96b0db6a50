"""What one step of a model computes, keeps and exchanges, found by running it on torch's meta device: shapes without memory.

Floating-point operations and bytes are affine in the number of samples of a micro-batch (weights are there once, activations
once a sample), so two runs, of 2 and of 4 samples, give every size. Layers that are made by the same function and
take the same shapes are run once: a GPT of 96 blocks costs as much as one of one block.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsframe.engines import precision
from dsframe.errors import TaskError
from dsframe.model import loss_head, switches
from dsframe.model.forward import TargetedInputs, call
from dsframe.observe.flops import OperationCounter
from dsframe.observe.meta import Attention, Loss, Stage, stages_of
from dsframe.tasks.meta import example, map_floats, meta_device, with_rows
from dsframe.tasks.task import Task
from dsframe.tools.plan.model import Affine, Linear, Model, Segment, autocast

if TYPE_CHECKING:
    from dsframe.config import Config

ROWS = (2, 4)
"""Samples of the two runs. Not 1: BatchNorm refuses a single value."""
_FREE = {"aten._unsafe_view.default", "aten.empty_like.default", "aten.empty.memory_format", "aten.detach_.default"}
"""Neither read nor write memory, beside the views."""


class OperationTable(OperationCounter):  # type: ignore[no-untyped-call]
    """Bytes that each operation reads and writes, views left out, and those of the largest result."""

    def __init__(self, sliced: tuple[int, int] | None = None) -> None:
        """``sliced``: a vocabulary, and of how many tokens logits are there at a time."""
        super().__init__()
        self.moved: list[float] = []
        self.largest = 0.0
        self._sliced = sliced

    def seen(self, func: Any, args: Any, kwargs: Any, out: Any, flops: float) -> None:
        if func.is_view or str(func) in _FREE:
            return
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        written = sum(result.nbytes for result in results)
        read = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.moved.append(float(read + written))
        self.largest = max(self.largest, float(sum(map(self._there, results))))

    def _there(self, result: Tensor) -> int:
        """Bytes of a result that are there at a time."""
        if self._sliced is None or not result.ndim or result.shape[-1] != self._sliced[0]:
            return result.nbytes
        return min(result.nbytes, self._sliced[0] * self._sliced[1] * result.itemsize)


def trace(task: Task, dtype: torch.dtype, config: Config | None = None) -> Model:
    """The model of ``task`` with parameters of ``dtype``, frozen as a ``config`` says. Nothing is allocated.

    Raises TaskError where the model cannot run on the meta device: it reads numbers, as data-dependent branches do.
    """
    inputs, targets = example(task)
    with meta_device():
        stages, layered = stages_of(task, dtype, config)
        switched = _Switched()
        if config is not None:
            sliced = _slice_loss(task, stages[-1][1], config, layered=layered)
            switched = _Switched(sliced, _chosen(stages, config, layered=layered))
        segments, loss, size = _run(task, stages, (inputs, targets), dtype, switched)
    return Model(segments, loss, layered, dtype.itemsize, size)


@dataclass(frozen=True)
class _Chosen:
    """The modules that the file's switches are about, by their names in the whole model."""

    names: Sequence[str]
    offloads: bool
    layered: bool

    def inside(self, index: int) -> tuple[str, ...]:
        """Names within stage ``index``; the stage itself is ""."""
        if not self.layered:
            return tuple(self.names)
        first = str(index)
        return tuple(
            name.removeprefix(first).removeprefix(".") for name in self.names if name.split(".", 1)[0] == first
        )


@dataclass(frozen=True)
class _Switched:
    """What the file's switches change of a pass."""

    sliced: tuple[int, int] | None = None
    """The vocabulary, and of how many tokens logits are there at a time."""
    chosen: _Chosen | None = None


def _chosen(stages: Sequence[Stage], config: Config, *, layered: bool) -> _Chosen | None:
    """None where nothing is switched, and where all blocks of a list of layers are recomputed, which the planner adds up itself."""
    wanted = config.settings.model
    again = wanted.recomputation
    blocks = again is not None and again.every == 1 and not any(set("*.") & set(one) for one in again.modules or ())
    if not wanted.offload_activations and (again is None or (layered and blocks)):
        return None
    if not layered:
        whole = stages[0][1]
    else:  # each stage by its number, though one that repeats is there once
        whole = nn.Module()
        for index, (_, module, _) in enumerate(stages):
            whole.add_module(str(index), copy.deepcopy(module))
    names = switches.offloaded(whole, config) if again is None else switches.recomputed(whole, config)
    return _Chosen(names, again is None, layered)


def _slice_loss(task: Task, last: nn.Module, config: Config, *, layered: bool) -> tuple[int, int] | None:
    """Makes the model's ``last`` stage compute the loss where the file asks for slices: the vocabulary, and a slice's tokens.

    One slice has all tokens here, so that any number of samples takes the same operations.
    """
    wanted = config.settings.model.loss_chunk_tokens
    head: Any = None if wanted is None else last if layered else task.head(last)
    if wanted is None or head is None:
        return None
    loss_head.switch(head, wanted)
    loss_head.listen(last, head)
    tokens, head.chunk_tokens = head.chunk_tokens, sys.maxsize
    return len(head.weight), tokens


def traced(config: Config, task: Task) -> Model:
    """The model in the number formats of a file."""
    known = trace(task, precision.parameter_dtype(config), config)
    if not config.deepspeed.torch_autocast.enabled:
        return known
    # the products' operands and results are 16 bits wide, and the weights are cast once a pass
    return autocast(known, trace(task, torch.bfloat16, config))


def _run(
    task: Task, stages: Sequence[Stage], sample: tuple[Any, Any], dtype: torch.dtype, switched: _Switched
) -> tuple[tuple[Segment, ...], Segment, Affine]:
    """The stages, the loss, and the bytes of a micro-batch."""
    (inputs, targets), width = sample, task.hidden_size
    sliced, chosen = switched.sliced, switched.chosen
    flows = [map_floats(with_rows(inputs, rows), lambda tensor: tensor.to(dtype)) for rows in ROWS]
    size = Affine(
        0.0,
        float(
            sum(
                leaf.nbytes for leaf in tree_leaves((flows[0], with_rows(targets, ROWS[0]))) if isinstance(leaf, Tensor)
            )
            / ROWS[0]
        ),
    )
    segments: list[Segment] = []
    known: dict[Any, tuple[Segment, list[Any]]] = {}
    for index, (key, module, owner) in enumerate(stages):
        parts = chosen.inside(index) if chosen else ()
        if sliced and module is stages[-1][1]:
            flows = [TargetedInputs(flow, with_rows(targets, rows)) for flow, rows in zip(flows, ROWS, strict=True)]
        name = (key, parts, str(tree_map(_shape, flows[0])))
        if key is not None and name in known:
            segment, flows = known[name]
        else:
            runs = [_pass(module, flow, width, sliced) for flow in flows]
            segment = _segment(module, runs, owner)
            if chosen and parts:
                segment = _switched(segment, module, parts, flows, chosen)
            flows = [run.outputs for run in runs]
            segment = replace(segment, sliced=sliced is not None)
            known[name] = segment, flows
        segments.append(segment)
    ends = []
    for flow, rows in zip(flows, ROWS, strict=True):
        head = Loss(task, with_rows(targets, rows))
        ends.append(_pass(head, (flow,), width))
    loss = _segment(nn.Identity(), ends, None)
    return tuple(segments), loss, size


def _switched(
    segment: Segment, module: nn.Module, parts: Sequence[str], flows: Sequence[Any], chosen: _Chosen
) -> Segment:
    """The segment with its ``parts`` switched, as a copy of it that is switched shows."""
    twin = copy.deepcopy(module)
    inside = [_SetAside(twin.get_submodule(name)) for name in parts]
    runs, inputs = [], []
    for flow in flows:
        runs.append(_pass(twin, flow, None))
        inputs.append(0.0 if chosen.offloads else float(sum(part.inputs for part in inside)))
    rest = _affine(runs[0].saved, runs[1].saved)
    own = _affine(inputs[0], inputs[1])
    gone, share = Affine(segment.saved.fixed - rest.fixed, segment.saved.each - rest.each), len(inside)
    return replace(
        segment,
        switched=True,
        saved=rest + own,
        saved_wide=rest + own,  # inputs of blocks, which tensor parallelism does not cut
        transient=Affine(gone.fixed / share, gone.each / share),
        away=gone if chosen.offloads else Affine(),
    )


class _SetAside:
    """A part of a model whose activations are not counted in a pass; its inputs' bytes in the last one."""

    def __init__(self, part: nn.Module) -> None:
        self.inputs, forward = 0, part.forward

        def hidden(*args: Any, **kwargs: Any) -> Any:
            self.inputs = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if _has_gradient(leaf))
            # Hooks of its own hide from those around them what is kept.
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                return forward(*args, **kwargs)

        part.forward = hidden


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class _Pass:
    outputs: Any
    flops: float
    moved: list[float]
    """Bytes that each operation of the forward pass reads and writes."""
    saved: float
    saved_wide: float
    output: float
    scratch: float
    attentions: int
    heads: int


def _pass(module: nn.Module, inputs: Any, width: int | None, sliced: tuple[int, int] | None = None) -> _Pass:
    """One forward and one backward pass."""
    inputs = map_floats(inputs, lambda tensor: tensor.detach().requires_grad_())
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, tuple[Any, int, bool]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage, storage.nbytes(), bool(tensor.ndim) and tensor.shape[-1] == width
        return tensor

    with (
        Attention() as attention,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        OperationTable(sliced) as forward,
    ):
        outputs = call(module, inputs)
    targets = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with OperationTable(sliced) as backward:
        if targets:
            torch.autograd.backward(targets, [torch.empty_like(target) for target in targets])
    for parameter in module.parameters():
        parameter.grad = None
    sizes = [leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return _Pass(
        tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs),
        forward.forward + backward.backward,
        forward.moved,
        float(sum(size for _, size, _ in kept.values())),
        float(sum(size for _, size, wide in kept.values() if wide)),
        float(sum(sizes)),
        max(forward.largest, backward.largest),
        attention.calls,
        attention.heads,
    )


def _segment(module: nn.Module, runs: Sequence[_Pass], owner: int | None) -> Segment:
    first, second = runs
    parameters, owns = list(module.parameters()), owner is None
    linears, alone = _linears(module)
    return Segment(
        parameters=sum(p.numel() for p in parameters if p.requires_grad) if owns else 0,
        frozen=sum(p.numel() for p in parameters if not p.requires_grad) if owns else 0,
        shared=0 if owns else sum(p.numel() for p in parameters),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        largest=max((_own(m) for name, m in module.named_modules() if name not in alone), default=0),
        linears=linears,
        flops=_affine(first.flops, second.flops),
        moved=_moved(first.moved, second.moved),
        saved=_affine(first.saved, second.saved),
        saved_wide=_affine(first.saved_wide, second.saved_wide),
        output=_affine(first.output, second.output),
        scratch=_affine(first.scratch, second.scratch),
        attentions=first.attentions,
        heads=first.heads,
        owner=owner,
        experts=sum(
            p.numel()
            for name, p in module.named_parameters()
            if p.requires_grad and p.ndim == 3 and ".experts." in name
        ),
    )


def _linears(module: nn.Module) -> tuple[tuple[Linear, ...], set[str]]:
    """Those inside of the module, and the names of those whose weight no other module uses."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    there = {name: one for name, one in module.named_modules() if name and isinstance(one, nn.Linear)}
    alone = {name for name, one in there.items() if all(uses[id(parameter)] == 1 for parameter in one.parameters())}
    found = (Linear(name, _own(one), one.out_features if name in alone else 0) for name, one in there.items())
    return tuple(found), alone


def _own(module: nn.Module) -> int:
    """Elements of parameters that are this module's and no other's inside of it."""
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _moved(first: Sequence[float], second: Sequence[float]) -> float:
    if len(first) != len(second):
        raise TaskError(
            f"the model does {len(first)} operations for {ROWS[0]} samples and {len(second)} for "
            f"{ROWS[1]}: it cannot be planned"
        )
    each = (_affine(*pair).each for pair in zip(first, second, strict=True))
    return max(each, default=0.0)


def _affine(first: float, second: float) -> Affine:
    each = (second - first) / (ROWS[1] - ROWS[0])
    return Affine(first - each * ROWS[0], each)


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
