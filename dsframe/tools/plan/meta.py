"""Models on torch's meta device, which have shapes but no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses
from torch.overrides import TorchFunctionMode

from dsframe.errors import TaskError
from dsframe.model import adapter, groups
from dsframe.tasks.meta import map_floats
from dsframe.tasks.task import Task, loss_and_terms

if TYPE_CHECKING:
    from dsframe.config.value import Config


class Attention(TorchFunctionMode):
    """Runs attention by a kernel without a matrix of scores, as CPUs and GPUs do; the meta device's would keep one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        query, key, value = (given[name] for name in ("query", "key", "value"))
        if key.shape[-3] != query.shape[-3]:  # grouped queries
            key, value = (t.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for t in (key, value))
        mask = given.get("attn_mask")
        mask = mask.to(query.dtype) if mask is not None else None
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, bool(given.get("is_causal")), attn_mask=mask)[0]


class Loss(nn.Module):
    """A task's loss as a last layer; outputs are converted to fp32, as on every engine."""

    def __init__(self, task: Task, targets: Any) -> None:
        super().__init__()
        self._task, self._targets = task, targets

    def forward(self, outputs: Any) -> Tensor:
        """Returns the loss of ``outputs``."""
        loss: Tensor = loss_and_terms(
            self._task.loss(map_floats(outputs, lambda tensor: tensor.float()), self._targets)
        )[0]
        return loss


def model_of(task: Task, dtype: torch.dtype, config: Config | None = None) -> nn.Module:
    """Returns the model with parameters of ``dtype``, with adapter and frozen parameters as in ``config``.

    Raises TaskError if the task has several models, ConfigError and TaskError as ``groups.settle_groups``.
    """
    if task.models():
        raise TaskError(
            f"{type(task).__name__} has several models (models()), whose steps have no prediction; plan each by itself"
        )
    model = task.model()
    if config is not None and config.settings.adapter is not None:
        adapter.add(config, model)
    if config is not None:
        groups.settle_groups(config, task, model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
