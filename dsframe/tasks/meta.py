"""Runs tasks on torch's meta device: shapes without memory and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dsframe.data.datasets import as_source
from dsframe.errors import TaskError
from dsframe.tasks import preparation
from dsframe.tasks.data_sets import given
from dsframe.tasks.task import Task
from dsframe.text import one_line

_RANDOM = {"normal_", "uniform_", "trunc_normal_", "bernoulli_", "random_"}


class NoNumbers(TorchFunctionMode):
    """Skips random initialization, which torch does in Python on the meta device, in seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _RANDOM and args and isinstance(args[0], Tensor):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def meta_device() -> Iterator[None]:
    """Creates and runs everything inside the context without memory. Raises TaskError if a model needs values."""
    # Libraries that branch on values take another path while compiling, where there are none either.
    compiling = mock.patch("torch.compiler.is_compiling", return_value=True)
    with torch.device("meta"), NoNumbers(), compiling, torch.random.fork_rng(devices=[]):
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            text = one_line(error)
            raise TaskError(
                f"the model cannot be run without numbers (torch's meta device), so it cannot be planned: {text}"
            ) from error


def example(task: Task, *, prepared: bool = False) -> tuple[Any, Any]:
    """Returns one sample, for its shapes: ``Task.example``, or training data, which a run has ``prepared``."""
    example = task.example()
    if example is not None:
        return example
    if not prepared:
        preparation.alone(task, lambda line: None)
    return as_source(given(task, "train_data"), task.seed, task.collate, streams=True).batch(torch.tensor([0]), 0)


def with_rows(batch: Any, rows: int) -> Any:
    """Returns ``batch`` with ``rows`` samples, on the meta device."""

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return tree_map(resized, batch)


def map_floats(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies ``change`` to every floating-point tensor."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch)
