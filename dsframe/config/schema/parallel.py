# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""How one model is split over processes: pipeline, tensor parallel, expert parallel, hybrid engine.

Source: ``deepspeed/runtime/tensor_parallel/config.py``, ``module_inject/autotp_config.py``,
``module_inject/auto_ep_config.py``, ``runtime/config.py`` and ``runtime/pipe/engine.py`` of DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from dsframe.config.schema.base import Coerced, Count, Section, Size


class Pipeline(Section):
    """Pipeline parallelism. DeepSpeed parses ``stages``, ``partition`` and ``seed_layers`` and ignores them; dsframe
    honours them."""

    stages: Count = 1
    """Number of pipeline stages. Divides the world size. ``"auto"`` is 1."""
    partition: str = "parameters"
    """How layers are shared out: ``parameters``, ``uniform`` or ``type:REGEX`` (class names). ``best`` is
    ``parameters``."""
    seed_layers: bool = False
    """Seed each layer's dropout by its index. No engine accepts it. Weights never depend on the stages."""
    activation_checkpoint_interval: Size = 0
    """Layers between two activation checkpoints, the rest is recomputed. 0: none."""
    pipe_partitioned: bool = True
    """Send activations partitioned over tensor-parallel ranks."""
    grad_partitioned: bool = True
    """Send gradients partitioned over tensor-parallel ranks."""
    use_reentrant: bool = True
    """torch's reentrant checkpointing, which raises where the first stage's inputs are integers: dsframe always takes the
    other one."""


class LayerSpec(Section):
    """Which layers are cut, and how."""

    patterns: list[str] = []
    """Regular expressions for parameter names."""
    partition_type: Literal["column", "row", "skip"] = "column"
    """Cut the outputs, the inputs, or nothing."""
    shape: list[Any] | None = None
    """Shape in which a merged weight is seen, such as ``[2, -1]``."""
    partition_dim: int | None = None
    """Dimension of ``shape`` that is cut."""
    gather_output: bool = False
    """Gather a column layer's output."""
    grad_allreduce: bool = False
    """All-reduce the gradient of what is not cut."""
    model_types: list[str] | None = None
    """Only for these ``config.model_type``s."""

    folded: ClassVar[Mapping[str, str]] = {"partition_type": "lower"}


class PartitionConfig(Section):
    """Tensor parallelism by rules of your own."""

    tp_size: Count = 1
    """Replaced by ``autotp_size``."""
    use_default_specs: bool = True
    """Add the preset's rules."""
    strict_mode: bool = False
    """Raise when a layer matches no rule."""
    embedding_partition_dim: int = 1
    """Dimension of embeddings that is cut."""
    lm_head_patterns: list[str] = ["lm_head", "embed_out"]
    """Names of output layers."""
    layer_specs: list[LayerSpec] = []
    """The rules; the first that matches counts."""


class TensorParallelGroup(Coerced):
    """Lower-level settings."""

    tp_size: Count = 1
    """Must agree with ``autotp_size``."""
    tp_grain_size: int = 1
    """Not used in training."""


class TensorParallel(Coerced):
    """Tensor parallelism for training (AutoTP). Ranks of one group must read the same batches."""

    autotp_size: Size = 0
    """Ranks that share each layer. 0: off. Divides the world size and the number of heads."""
    tp_overlap_comm: bool = False
    """Communicate beside computation (all-reduce only)."""
    vocab_parallel_lm_head: bool | None = None
    """Cut the output layer by vocabulary. Default: what the model's own plan says."""
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    """Cross-entropy over a cut vocabulary."""
    tp: TensorParallelGroup = Field(default_factory=TensorParallelGroup.model_construct)
    """Lower-level settings."""
    injection_policy_tuple: list[Any] | None = None
    """Names of layers whose outputs are all-reduced."""
    partition_config: PartitionConfig | None = None
    """Rules of your own, for models that DeepSpeed does not know."""
    preset_model: str | None = None
    """Rules of a known model: llama, bloom, chatglm, mixtral, deepseek_v2, qwen2, phi3."""
    keep_module_on_host: bool = False
    """Leave the weights on the CPU when a checkpoint is loaded."""
    kernel_inject: bool = False
    """Inference kernels. Not for training."""
