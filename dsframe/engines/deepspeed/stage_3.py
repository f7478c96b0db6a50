"""Support for ZeRO stage 3: sharding in little memory, gathered access, and blocks gathered as one unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.engines.deepspeed.imports import (
    DeepSpeedZeroLeafModuleConfig,
    apply_zero_leaf_module_config,
)
from dsframe.errors import EngineError
from dsframe.model.gathered import LIBRARIES, Shards


class ZeroShards(Shards):
    """Parameters sharded by ``deepspeed.zero``. DeepSpeed reduces their gradients as any other."""

    def cuts(self, weight: Any) -> bool:
        """True if DeepSpeed has sharded the parameter."""
        return hasattr(weight, "ds_numel")

    def is_whole(self, weight: Any) -> bool:
        """True while it is gathered."""
        return bool(weight.numel() == weight.ds_numel) and weight.ds_status.name == "AVAILABLE"

    @contextmanager
    def gathering(self, weights: Sequence[Any]) -> Iterator[None]:
        """**Collective.** Gathers all weights at once; releases them afterwards."""
        missing = [weight for weight in weights if not self.is_whole(weight)]
        if missing:
            missing[0].all_gather(param_list=missing)
        try:
            yield
        finally:
            release(missing)

    def copies(self, weights: Sequence[Any]) -> list[Tensor]:
        """Returns copies of the gathered weights."""
        return [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def keep(self, weight: Any) -> None:
        """Writes the gathered weight to its shard, because another module with the same weight gathers it again."""
        shard = weight.ds_tensor
        flat, size = weight.detach().flatten(), shard.ds_numel
        piece = flat[weight.ds_process_group.rank() * size :][:size]
        shard.view(-1)[: piece.numel()].copy_(piece)

    def gradients(self, weights: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """**Collective.** Returns them unchanged; gathers the weights until the end of the backward pass."""
        missing = [weight for weight in weights if not self.is_whole(weight)]
        if missing:
            missing[0].all_gather(param_list=missing)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: release(missing))
        return list(gradients)


def release(weights: Sequence[Any]) -> None:
    """**Collective.** Releases the gathered weights that no running module uses."""
    if gathered := [
        weight for weight in weights if weight.ds_status.name == "AVAILABLE" and not weight.ds_active_sub_modules
    ]:
        gathered[0].partition(param_list=gathered, has_been_updated=False)


SHARDS = ZeroShards()
LIBRARIES.append(SHARDS)


def copy_shard(parameter: Any, source: Any) -> None:
    """Copies a parameter's shard from another model that is sharded the same way."""
    parameter.ds_tensor.copy_(source.ds_tensor)
    if parameter.ds_status.name == "AVAILABLE":
        parameter.partition()  # the next forward pass gathers it again


class InTurn(nn.Module):
    """A model whose parameters are prepared one by one, each when it is iterated over."""

    def __init__(self, model: nn.Module, ready: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.model, self._ready = model, ready

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            self._ready(parameter)
            yield parameter


def prepare_leaf_modules(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Prepares the modules that DeepSpeed gathers as one unit: those marked before, and those of the file's
    ``section``, which ``initialize`` would mark too late. Raises EngineError if it names none of the model's."""
    if not apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig(**section)) and section:
        classes = Counter(type(module).__name__ for module in model.modules() if module is not model)
        known = ", ".join(f"{name} ({count})" for name, count in classes.most_common())
        raise EngineError(f"zero_optimization.leaf_module: this model has no module that it names; it has {known}")
