"""Tests whether a model that AutoTP has split still computes the same as the whole model.

AutoTP replaces the layers that a pattern matches by its own, which only take over the weights: the effect of a subclass
of ``nn.Linear``, a hook or a parametrization is lost. It divides attributes such as ``d_model`` and ``hidden_size``. If
a whole weight is used between split ones, each rank has a part of its gradient. Source: deepspeed 0.19.8,
``module_inject/auto_tp.py`` (_replace_with_config, update_mp_params) and ``layers.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.cluster.process_group import gathered
from dsframe.engines.deepspeed.replaced import OwnParts, replacing
from dsframe.engines.deepspeed.state_tensor import Cut, note_of
from dsframe.errors import EngineError
from dsframe.model.build import small_copy
from dsframe.model.forward import call
from dsframe.model.gathered import LIBRARIES
from dsframe.model.micro_batch import Inputs
from dsframe.model.persistent import load_buffers, saved_parameters
from dsframe.model.state import SavedState
from dsframe.model.user_state import Generators
from dsframe.values import tensors_of

_LEAVE = "leave it out of partition_config, or train without tensor_parallel"
_DIVIDED = (
    "DeepSpeed shards what partition_config matches, and divides attributes such as d_model and hidden_size around it: correct the "
    "patterns, or train without tensor_parallel"
)
_PARTIAL = (
    'a weight that is whole between sharded layers needs {"partition_type": "skip", "grad_allreduce": true} in partition_config; a '
    "layer that is used twice, or on a transposed tensor, cannot be sharded"
)


class TensorShards(OwnParts):
    """Parameters that AutoTP has split."""

    never_whole = f"use weight_decay for a penalty, {_LEAVE}"

    def cuts(self, weight: Any) -> bool:
        """True if AutoTP has split the parameter."""
        return note_of(weight) is not None


LIBRARIES.insert(0, TensorShards())  # first: stage 3 shards a split weight again


def whole_layers(model: nn.Module) -> AbstractContextManager[None]:
    """Encloses AutoTP's work on ``model``. Raises EngineError for layers that it cannot replace."""
    return replacing(model, "tensor_parallel", _is_plain, _LEAVE)


def _is_plain(layer: nn.Module) -> bool:
    standard_forward = type(layer).forward in (nn.Linear.forward, nn.Embedding.forward)
    return standard_forward and "weight" in layer._parameters and not layer._modules


class Trial:
    """A copy of the whole model, which is compared with the split one."""

    def __init__(self, whole: nn.Module) -> None:
        self._whole = whole

    @classmethod
    def of(cls, whole: nn.Module) -> Trial | None:
        """Returns None if a copy would need much memory, or cannot be made."""
        copied = small_copy(whole, whole)
        return None if copied is None else cls(copied)

    def load(self, saved: SavedState) -> None:
        """Loads the weights that the model loads into the copy."""
        for name, weight in saved_parameters(self._whole):
            weight.data.copy_(saved.parameter(name).weight)
        load_buffers(self._whole, saved)

    def __call__(self, model: nn.Module, inputs: Inputs, cut: Mapping[str, Cut], rank: int) -> None:
        """**Collective.** Raises EngineError if outputs in evaluation mode, or their gradients, differ."""
        dtype = next(parameter.dtype for parameter in model.parameters())
        device = next((leaf.device for leaf in tensors_of(inputs)), torch.device("cpu"))
        for parameter in self._whole.to(device).parameters():
            parameter.data = parameter.data.to(dtype)
        try:
            wanted = _outputs(self._whole, inputs)
        except Exception:  # a model that cannot be called yet reports that itself
            return
        modes = {module: module.training for module in model.modules()}
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            self._compare(model, inputs, wanted, cut, rank)
        finally:
            for module, mode in modes.items():
                module.training = mode
            for buffer, kept in buffers:
                buffer.data.copy_(kept)

    def _compare(
        self, model: nn.Module, inputs: Inputs, whole: list[Tensor], cut: Mapping[str, Cut], rank: int
    ) -> None:
        name, exact = type(self._whole).__name__, next(model.parameters()).dtype == torch.float32
        try:
            split = _outputs(model, inputs)
        except RuntimeError as error:
            raise EngineError(f"tensor_parallel: a sharded {name} cannot be computed ({error}): {_DIVIDED}") from error
        noise = 1e-3 if exact else 0.1
        # A key-value cache is split. If a loss uses it, the loss differs between ranks.
        pairs = [pair for pair in zip(split, whole, strict=False) if pair[0].shape == pair[1].shape]
        if (whole and not pairs) or not all(_close(*pair, noise) for pair in pairs):
            raise EngineError(
                f"tensor_parallel: a sharded {name} computes other outputs than the whole one. {_DIVIDED}"
            )
        if not pairs:
            return
        of_cut, of_whole = _gradients(model, split, whole), _gradients(self._whole, whole, split)
        norm = float(torch.stack([gradient.float().norm() for gradient in of_whole.values()]).norm())
        for key, gradient in of_cut.items():
            expected = of_whole[key]
            if key in cut:
                expected = cut[key].share(expected, rank, gradient.shape)
            if not _close(gradient, expected, noise, 0.1 * noise * norm):
                raise EngineError(
                    f"tensor_parallel: {key} of a sharded {name} gets another gradient than of the whole one: {_PARTIAL}"
                )


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Returns the outputs of ``model`` in evaluation mode that have gradients."""
    generators = Generators([])
    given = tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), inputs)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        outputs = call(model.eval(), given)
    generators.put_back(process=True)
    return [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]


def _gradients(model: nn.Module, outputs: Sequence[Tensor], others: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of a sum over those ``outputs`` that have the shapes of ``others``."""
    draw, total = torch.Generator().manual_seed(0), torch.zeros(())
    with torch.enable_grad():  # the first batch may be one of an evaluation
        for output, other in zip(outputs, others, strict=False):
            if output.shape == other.shape:
                total = (
                    total + (output.float() * torch.randn(output.shape, generator=draw).to(output.device)).sum().cpu()
                )
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(weights, gradients, strict=True))


def _close(actual: Tensor, expected: Tensor, noise: float, least: float = 1e-6) -> bool:
    difference, size = (float(tensor.detach().float().norm()) for tensor in (actual - expected, expected))
    return not difference > noise * size + least  # NaN is reported elsewhere


class WholeGradients:
    """First-step gradients of weights that each rank has whole. They are equal on ranks that split layers, unless such
    a weight is used between split ones. Also for models too large for a :class:`Trial`."""

    def __init__(self, model: nn.Module, cut: Mapping[str, Cut], device: torch.device) -> None:
        """Created after DeepSpeed, whose hooks sum the gradients that a file names."""
        weights = {name: w for name, w in model.named_parameters() if w.requires_grad and name not in cut}
        self._device = device
        self._norms = {name: torch.zeros((), device=device) for name in weights}
        self._hooks = [weight.register_hook(partial(self._note, name)) for name, weight in weights.items()]  # type: ignore[no-untyped-call]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._norms[name] = self._norms[name] + gradient.float().norm()

    def refuse_different(self, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        """**Collective.** Raises EngineError if the ranks of ``group`` have different gradients."""
        for hook in self._hooks:
            hook.remove()
        mine = torch.stack([torch.zeros((), device=self._device), *self._norms.values()])
        norms = gathered(mine, group)
        noise = 1e-4 if dtype == torch.float32 else 1e-2
        apart = torch.stack([norm - norms[0] for norm in norms]).abs().amax(0)
        wrong = apart > noise * (norms[0] + 0.1 * norms[0].norm())  # NaN is reported elsewhere
        if names := [name for name, other in zip(self._norms, wrong.tolist()[1:], strict=True) if other]:
            raise EngineError(
                f"tensor_parallel: {names[0]}, which each rank has whole, gets another gradient on each: {_PARTIAL}"
            )


def refuse_different(loss: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """**Collective.** Raises EngineError if ranks that split layers, and have the same samples, have different losses."""
    losses = gathered(loss, group)
    noise = 1e-5 if dtype == torch.float32 else 1e-3
    if not torch.allclose(torch.stack(losses), losses[0], rtol=noise, atol=0.0, equal_nan=True):
        raise EngineError(
            "tensor_parallel: the ranks that share layers compute different losses "
            f"({', '.join(f'{loss:.8g}' for loss in losses)}) from the same samples: model or loss uses weights, "
            "activations or random numbers of which each rank has its part, or asks for its rank; leave these layers out "
            "of partition_config, or train without tensor_parallel"
        )
