"""The only module that imports DeepSpeed: silently, and features' modules only if a file has the feature.

Processor time with deepspeed 0.19.8 and torch 2.13 on 2 cores of a Xeon at 2.5 GHz: 0.3 s (torch's import: 1.0 s),
which always includes the pipeline, AutoTP and all ZeRO stages. ``patches`` keeps mlflow out of it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch

from dsframe.engines.deepspeed.patches import without_mlflow

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it detected the accelerator

with warnings.catch_warnings(), without_mlflow():
    warnings.simplefilter("ignore")  # it uses deprecated parts of torch
    import deepspeed as deepspeed
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig as DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils import groups as groups
    from deepspeed.utils import logger as logger
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config as apply_zero_leaf_module_config
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module as set_z3_leaf_module
    from deepspeed.utils.z3_leaf_module import z3_leaf_module as z3_leaf_module

_BY_FEATURE = {
    "SUPPORTED_STYLES": "module_inject.tp_plan_converter",
    "_get_hf_tp_plan": "runtime.tensor_parallel.config",
    "configure_moe_param_groups": "moe.utils",
    "PipelineModule": "pipe",
    "TiedLayerSpec": "pipe",
    "PipeModelDataParallelTopology": "runtime.pipe.topology",
    "partition_balanced": "runtime.utils",
    "partition_uniform": "runtime.utils",
    "DistributedAttention": "sequence.layer",
}
"""Name -> its module in DeepSpeed, imported when a module of dsframe asks for it, for features if a file has them."""


def __getattr__(name: str) -> Any:
    if name not in _BY_FEATURE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"deepspeed.{_BY_FEATURE[name]}"), name)
