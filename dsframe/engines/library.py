"""DeepSpeed, imported in silence: the only place that does. And without what a training never uses.

Seconds of processor time, deepspeed 0.19.8 and torch 2.13 on the machine of the README: its own import 0.3 (torch's is 1.0);
mlflow, which its autotuner imports where it is installed, 1.7; ``@torch.compile`` on three functions of Muon, which every ZeRO
optimizer imports, and which imports torch's compiler, 0.8. Of these two the first is left out, the second waits for a call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to find out


@contextlib.contextmanager
def _as_if_missing(package: str) -> Iterator[None]:
    """Importing ``package`` raises ImportError, unless somebody has imported it already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # how Python writes it down
    try:
        yield
    finally:
        del sys.modules[package]


def _compile_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` as a decorator that costs nothing until the function is called."""

    @functools.wraps(function)
    def first(*arguments: Any, **keywords: Any) -> Any:
        return compiled()(*arguments, **keywords)

    compiled = functools.cache(lambda: torch.compile(function))
    return first


with warnings.catch_warnings(), _as_if_missing("mlflow"):
    warnings.simplefilter("ignore")  # its import touches deprecated corners of torch
    import deepspeed as deepspeed
    from deepspeed.module_inject.auto_tp import AutoTP as AutoTP
    from deepspeed.module_inject.layers import configure_tensor_parallel_runtime as configure_tensor_parallel_runtime
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES as SUPPORTED_STYLES
    from deepspeed.pipe import PipelineModule as PipelineModule
    from deepspeed.pipe import TiedLayerSpec as TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig as TPTrainingConfig
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan as _get_hf_tp_plan
    from deepspeed.runtime.utils import clip_grad_norm_ as clip_grad_norm_
    from deepspeed.runtime.utils import partition_balanced as partition_balanced
    from deepspeed.runtime.utils import partition_uniform as partition_uniform
    from deepspeed.runtime.zero import partition_parameters as partition_parameters
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3 as LinearFunctionForZeroStage3
    from deepspeed.runtime.zero.tiling import TiledLinear as TiledLinear
    from deepspeed.sequence.layer import DistributedAttention as DistributedAttention
    from deepspeed.utils import groups as groups
    from deepspeed.utils import logger as logger
    from deepspeed.utils import nvtx as nvtx
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module as set_z3_leaf_module

    with mock.patch("deepspeed.runtime.compiler.compile", return_value=_compile_when_called):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
