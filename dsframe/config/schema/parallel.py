# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""How one model is split over processes: pipeline, tensor and expert parallelism.

Source: ``deepspeed/runtime/tensor_parallel/config.py``, ``module_inject/autotp_config.py``,
``module_inject/auto_ep_config.py``, ``runtime/config.py`` and ``runtime/pipe/engine.py`` of DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from dsframe.config.schema.base import Coerced, Count, Section, Size
from dsframe.config.schema.parameters import passed


@passed
class Pipeline(Section):
    """Pipeline parallelism. DeepSpeed ignores ``stages``, ``partition`` and ``seed_layers``; dsframe applies them."""

    stages: Count = 1
    """Number of pipeline stages. Must divide the world size. ``"auto"`` is 1."""
    partition: str = "parameters"
    """How layers are assigned to stages: ``parameters`` (``best`` is the same), ``uniform`` or ``type:REGEX``
    (classes)."""
    activation_checkpoint_interval: Size = 0
    """Layers between two activation checkpoints; the others are recomputed. 0: none."""


@passed
class LayerSpec(Section):
    """Which layers are sharded, and how."""

    folded: ClassVar[Mapping[str, str]] = {"partition_type": "lower"}


@passed
class PartitionConfig(Section):
    """Custom rules for tensor parallelism."""

    layer_specs: list[LayerSpec] = []
    """The rules; the first match applies."""


class TensorParallelGroup(Coerced):
    """Lower-level settings."""

    tp_size: Count = 1
    """Must agree with ``autotp_size``."""
    tp_grain_size: int = 1
    """Not used in training."""


@passed
class TensorParallel(Coerced):
    """Tensor parallelism for training (AutoTP). Ranks of one group must read the same batches."""

    autotp_size: Size = 0
    """Ranks that split each layer. 0: off. Must divide the world size and the number of heads."""
    tp: TensorParallelGroup = Field(default_factory=TensorParallelGroup.model_construct)
    """Lower-level settings."""
    partition_config: PartitionConfig | None = None
    """Custom rules, for models that DeepSpeed does not know."""
    preset_model: str | None = None
    """Rules of a known model: llama, bloom, chatglm, mixtral, deepseek_v2, qwen2, phi3."""


@passed
class ExpertParallel(Section):
    """AutoEP: distributes the experts of a mixture-of-experts model over ranks."""

    nullable: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on."""
    autoep_size: Count = 1
    """Ranks that hold one set of the experts."""
    preset_model: str | None = None
    """Name patterns of a known model."""
