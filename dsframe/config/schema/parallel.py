# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""How one model is split over processes: pipeline, tensor parallel, expert parallel, hybrid engine.

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
    """Pipeline parallelism. DeepSpeed parses ``stages``, ``partition`` and ``seed_layers`` and ignores them; dsframe
    honours them."""

    stages: Count = 1
    """Number of pipeline stages. Divides the world size. ``"auto"`` is 1."""
    partition: str = "parameters"
    """How layers are shared out: ``parameters``, ``uniform`` or ``type:REGEX`` (class names). ``best`` is
    ``parameters``."""
    activation_checkpoint_interval: Size = 0
    """Layers between two activation checkpoints, the rest is recomputed. 0: none."""


@passed
class LayerSpec(Section):
    """Which layers are cut, and how."""

    folded: ClassVar[Mapping[str, str]] = {"partition_type": "lower"}


@passed
class PartitionConfig(Section):
    """Tensor parallelism by rules of your own."""

    layer_specs: list[LayerSpec] = []
    """The rules; the first that matches counts."""


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
    """Ranks that share each layer. 0: off. Divides the world size and the number of heads."""
    tp: TensorParallelGroup = Field(default_factory=TensorParallelGroup.model_construct)
    """Lower-level settings."""
    partition_config: PartitionConfig | None = None
    """Rules of your own, for models that DeepSpeed does not know."""
    preset_model: str | None = None
    """Rules of a known model: llama, bloom, chatglm, mixtral, deepseek_v2, qwen2, phi3."""


@passed
class ExpertParallel(Section):
    """AutoEP: the experts of a mixture-of-experts model over several ranks."""

    nullable: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on."""
    autoep_size: Count = 1
    """Ranks that share the experts."""
    preset_model: str | None = None
    """Name patterns of a known model."""
