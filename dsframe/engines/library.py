"""DeepSpeed, imported in silence: the only place that does."""

from __future__ import annotations

import os
import warnings

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to find out

with warnings.catch_warnings():
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
    from deepspeed.runtime.utils import partition_balanced as partition_balanced
    from deepspeed.runtime.utils import partition_uniform as partition_uniform
    from deepspeed.runtime.zero.tiling import TiledLinear as TiledLinear
    from deepspeed.sequence.layer import DistributedAttention as DistributedAttention
    from deepspeed.utils import groups as groups
    from deepspeed.utils import logger as logger
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module as set_z3_leaf_module
