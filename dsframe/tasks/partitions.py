"""Tensor-parallel partitions for transformers models for which the library has none that DeepSpeed understands. A
mixture's attention is sharded; each rank has complete experts, which transformers shards in ways of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATTENTION = [
    {"patterns": [r".*\.self_attn\.[qkv]_proj\.(weight|bias)$"], "partition_type": "column"},
    {"patterns": [r".*\.self_attn\.(o|out)_proj\.weight$"], "partition_type": "row"},
]
_NORMS_OF_HEADS = {
    "patterns": [r".*\.self_attn\.[qk]_norm\.weight$"],
    "partition_type": "skip",
    "grad_allreduce": True,  # each rank has its own heads' part of the gradient
}
_DENSE = [
    {"patterns": [r".*\.fc1\.(weight|bias)$"], "partition_type": "column"},
    {"patterns": [r".*\.fc2\.weight$"], "partition_type": "row"},
]
BY_MODEL_TYPE: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"layer_specs": _ATTENTION},
    "qwen3_moe": {"layer_specs": [*_ATTENTION, _NORMS_OF_HEADS]},
    "opt": {"layer_specs": [*_ATTENTION, *_DENSE]},
}
"""``model_type`` -> ``Task.partition_config``."""
