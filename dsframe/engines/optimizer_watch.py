"""Checks a user's optimizer: what no engine can run, and state that no checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsframe.errors import TaskError
from dsframe.host import generators
from dsframe.model.optimizers import OptimizerSpec
from dsframe.values import copied, same


def build(spec: OptimizerSpec, parameters: list[Any], *, shards: bool = False) -> torch.optim.Optimizer:
    """Builds the optimizer, and watches the first step of a user's one. ``shards``: ranks update parts of parameters.

    Raises TaskError if the optimizer needs more than a call of ``step()``, and the errors of ``spec.build``.
    """
    if not spec.is_custom:
        return spec.build(parameters)
    _refuse_closure(spec)
    optimizer = spec.build(parameters)
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise TaskError(
            f"{type(optimizer).__name__} has other weights for evaluations (its train() and eval()), which no engine exchanges; "
            'choose another optimizer, and "ema" for an average of the weights'
        )
    _watch_first_step(optimizer, spec.kept_outside, shards)
    return optimizer


def _refuse_closure(spec: OptimizerSpec) -> None:
    """Raises TaskError for an optimizer that computes the loss itself, as L-BFGS and sharpness-aware minimisation do."""
    number = torch.nn.Parameter(torch.ones(1))
    number.grad = torch.ones(1)
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        return number.sum()

    optimizer: Any = None
    with torch.random.fork_rng(devices=[]), suppress(Exception):  # some optimizers need the model's own parameters
        optimizer = spec.build([number])
        try:
            optimizer.step()
        except NotImplementedError:  # it has a first and a second step
            calls = 1
        except Exception:
            optimizer.step(closure)
    if calls:
        name = type(optimizer).__name__
        raise TaskError(
            f"{name} computes the loss again in its step (closure), and an engine computes it once for each update; choose another "
            "optimizer"
        )


def _watch_first_step(optimizer: torch.optim.Optimizer, kept_outside: set[str], shards: bool) -> None:
    """Adds to ``kept_outside`` the names of values that the first step changes and no checkpoint has. The step raises
    TaskError if it draws random numbers and there are several ranks."""
    before: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    device = next(weight.device for group in optimizer.param_groups for weight in group["params"])
    depth = 0

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1  # a step may call its base class's step
        if depth == 1:
            before.update(_values(optimizer))
            drawn.update(generators.capture(device))

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth:
            return
        if drawn != generators.capture(device) and dist.is_initialized() and dist.get_world_size() > 1:
            raise TaskError(
                f"{type(optimizer).__name__} draws random numbers in its step(), different ones on each rank: whole weights "
                "would drift apart, and weights in shards would depend on the number of ranks; train on one process"
            )
        for name, value in _values(optimizer).items():
            created = name not in before and isinstance(value, (int, float, torch.Tensor))
            if created or not same(before.get(name), value):
                kept_outside.add(name)
        kept_outside.update(_not_saved(optimizer, shards))
        for hook in hooks:
            hook.remove()

    hooks = (optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end))


def _values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    of_groups = {f"param_groups[{n}][{key!r}]": value for n, group in enumerate(groups) for key, value in group.items()}
    # Attributes of every torch optimizer, and those that torch's schedulers set.
    torch_attributes = vars(torch.optim.SGD([torch.empty(0)])).keys() | {"_opt_called", "_step_count"}
    user_attributes = {name: value for name, value in vars(optimizer).items() if name not in torch_attributes}
    return {name: copied(value) for name, value in {**of_groups, **user_attributes}.items()}


def _not_saved(optimizer: torch.optim.Optimizer, shards: bool) -> Iterator[str]:
    """Yields names of the state that checkpoints do not have: they hold numbers, and tensors in the weights' dtype.
    Raises TaskError for tensors that cannot be sharded."""
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            if value is None or isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim):
                continue
            if not isinstance(value, Tensor):
                yield f"state[...][{key!r}] ({type(value).__name__})"
            elif value.dtype != weight.dtype:
                yield f"state[...][{key!r}] ({str(value.dtype).removeprefix('torch.')})"
            elif shards and value.shape != weight.shape:
                shapes = f"of shape {list(value.shape)} about {list(weight.shape)}"
                raise TaskError(
                    f"{type(optimizer).__name__} keeps state[...][{key!r}] {shapes}, and ranks hold shards, which only tensors of "
                    "a parameter's shape have: choose an engine with whole weights on each rank (ddp, horovod, or ZeRO-0)"
                )
