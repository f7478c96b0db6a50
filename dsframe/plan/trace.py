"""What one step of a model computes, keeps and exchanges, found by running it on torch's meta device: shapes without memory.

Each operation's floating-point operations and bytes are affine in the number of samples of a micro-batch (weights are read once,
activations once a sample), so two runs, of 2 and of 4 samples, give every size. Layers that are made by the same function and
take the same shapes are run once: a GPT of 96 blocks costs as much as one of one block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsframe.data.loader import as_source
from dsframe.engine import call
from dsframe.engines import precision
from dsframe.errors import TaskError
from dsframe.plan.model import Affine, Linear, Model, Segment, Work, autocast
from dsframe.plan.modes import Attention, Count, NoNumbers
from dsframe.tasks.layers import Tied, TiedLayer, check_ties, make
from dsframe.tasks.task import Task

if TYPE_CHECKING:
    from dsframe.config import Config

ROWS = (2, 4)
"""Samples of the two runs. Not 1: BatchNorm refuses a single value."""


def trace(task: Task, dtype: torch.dtype) -> Model:
    """The model of ``task`` with parameters of ``dtype``. Nothing is allocated.

    Raises TaskError where the model cannot run on the meta device: it reads numbers, as data-dependent branches do.
    """
    inputs, targets = example(task)
    width = task.hidden_size
    # Libraries that branch on numbers take another way while a compiler, which has none either, looks at them.
    compiling = mock.patch("torch.compiler.is_compiling", return_value=True)
    with torch.device("meta"), NoNumbers(), compiling, torch.random.fork_rng(devices=[]):
        try:
            layers = task.layers()
            if layers is None:
                stages: list[Stage] = [(None, task.model(), None)]
            else:
                stages = _stages(layers, task.seed)
            return _run(task, stages, inputs, targets, dtype, width, layered=layers is not None)
        except (RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split())
            raise TaskError(
                f"the model cannot be run without numbers (torch's meta device), so it cannot be planned: {text}"
            ) from error


def traced(config: Config, task: Task) -> Model:
    """The model in the number formats of a file."""
    known = trace(task, precision.parameter_dtype(config))
    if not config.deepspeed.torch_autocast.enabled:
        return known
    # the products' operands and results are 16 bits wide, and the weights are cast once a pass
    return autocast(known, trace(task, torch.bfloat16))


def example(task: Task) -> tuple[Any, Any]:
    """Shapes of one sample, as the task tells them, else from its training data."""
    told = task.example()
    return told if told is not None else as_source(task.train_data(), task.seed).batch(torch.tensor([0]), 0)


Stage = tuple[Any, nn.Module, int | None]
"""Key (equal: the same layer again), module, and the layer whose weight it uses."""


def _stages(layers: Sequence[Any], seed: int) -> list[Stage]:
    """What repeats is made once."""
    check_ties(layers)
    made: dict[int, nn.Module] = {}
    found: list[Stage] = []
    for index, layer in enumerate(layers):
        if isinstance(layer, Tied):
            owner = found[layer.layer][1]
            weight = owner.get_parameter(layer.weight)
            found.append((None, TiedLayer(layer, weight), layer.layer))
            continue
        if id(layer) not in made:
            made[id(layer)] = make(layer, index, seed)
        found.append((id(layer), made[id(layer)], None))
    return found


def _run(
    task: Task,
    stages: Sequence[Stage],
    inputs: Any,
    targets: Any,
    dtype: torch.dtype,
    width: int | None,
    *,
    layered: bool,
) -> Model:
    for _, module, _ in stages:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    flows = [_floats(_rows(inputs, rows), lambda tensor: tensor.to(dtype)) for rows in ROWS]
    size = Affine(
        0.0,
        float(
            sum(leaf.nbytes for leaf in tree_leaves((flows[0], _rows(targets, ROWS[0]))) if isinstance(leaf, Tensor))
            / ROWS[0]
        ),
    )
    segments: list[Segment] = []
    known: dict[Any, tuple[Segment, list[Any]]] = {}
    for key, module, owner in stages:
        name = (key, str(tree_map(_shape, flows[0])))
        if key is not None and name in known:
            segment, flows = known[name]
        else:
            runs = [_pass(module, flow, width) for flow in flows]
            segment, flows = _segment(module, runs, owner), [run.outputs for run in runs]
            known[name] = segment, flows
        segments.append(segment)
    ends = []
    for flow, rows in zip(flows, ROWS, strict=True):
        head = _Loss(task, _rows(targets, rows))
        ends.append(_pass(head, (flow,), width))
    loss = _segment(nn.Identity(), ends, None)
    return Model(tuple(segments), loss, layered, dtype.itemsize, size)


class _Loss(nn.Module):
    """The task's loss as a last layer; outputs in fp32, as every engine hands them on."""

    def __init__(self, task: Task, targets: Any) -> None:
        super().__init__()
        self._task, self._targets = task, targets

    def forward(self, outputs: Any) -> Tensor:
        return self._task.loss(_floats(outputs, lambda tensor: tensor.float()), self._targets)


@dataclass
class _Pass:
    outputs: Any
    forward: list[tuple[float, float, float]]
    backward: list[tuple[float, float, float]]
    ready: list[tuple[int, int]]
    saved: float
    saved_wide: float
    output: float
    scratch: float
    attentions: int
    heads: int


def _pass(module: nn.Module, inputs: Any, width: int | None) -> _Pass:
    """One forward and one backward pass."""
    inputs = _floats(inputs, lambda tensor: tensor.detach().requires_grad_())
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, tuple[Any, int, bool]] = {}
    ready: list[tuple[int, int]] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage, storage.nbytes(), bool(tensor.ndim) and tensor.shape[-1] == width
        return tensor

    def note(parameter: Tensor) -> None:
        ready.append((len(backward.operations), parameter.numel()))

    hooks = [
        p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for p in module.parameters()
        if p.requires_grad
    ]
    with (
        Attention() as attention,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Count(width) as forward,
    ):
        outputs = call(module, inputs)
    targets = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with Count(width) as backward:
        if targets:
            torch.autograd.backward(targets, [torch.empty_like(target) for target in targets])
    for hook in hooks:
        hook.remove()
    for parameter in module.parameters():
        parameter.grad = None
    sizes = [leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return _Pass(
        tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs),
        forward.operations,
        backward.operations,
        ready,
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
        forward=_work(first.forward, second.forward),
        backward=_work(first.backward, second.backward),
        ready=tuple(first.ready),
        saved=_affine(first.saved, second.saved),
        saved_wide=_affine(first.saved_wide, second.saved_wide),
        output=_affine(first.output, second.output),
        scratch=_affine(first.scratch, second.scratch),
        attentions=first.attentions,
        heads=first.heads,
        owner=owner,
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


def _work(first: list[tuple[float, float, float]], second: list[tuple[float, float, float]]) -> Work:
    if len(first) != len(second):
        raise TaskError(
            f"the model does {len(first)} operations for {ROWS[0]} samples and {len(second)} for {ROWS[1]}: it cannot be planned"
        )
    table = np.zeros((len(first), 5))
    for row, (one, two) in enumerate(zip(first, second, strict=True)):
        for column in (0, 1):
            found = _affine(one[column], two[column])
            table[row, 2 * column : 2 * column + 2] = found.fixed, found.each
        table[row, 4] = one[2]
    return Work(table)


def _affine(first: float, second: float) -> Affine:
    each = (second - first) / (ROWS[1] - ROWS[0])
    return Affine(first - each * ROWS[0], each)


def _rows(batch: Any, rows: int) -> Any:
    return tree_map(
        lambda leaf: (
            torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
        ),
        batch,
    )


def _floats(batch: Any, change: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch)


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
