"""The top level of the file: every key that DeepSpeed 0.19.8 reads, with its default.

Source: ``deepspeed/runtime/config.py`` and ``constants.py``; the keys by tracing accesses of ``DeepSpeedConfig``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Positive, Section
from dsframe.config.schema.monitor import TensorBoard, Timers, Wandb
from dsframe.config.schema.optimizer import Optimizer
from dsframe.config.schema.parallel import ExpertParallel, Pipeline, TensorParallel
from dsframe.config.schema.parameters import passed
from dsframe.config.schema.precision import Bf16, CommunicationType, DataTypes, Fp16, TorchAutocast
from dsframe.config.schema.scheduler import Scheduler
from dsframe.config.schema.system import ActivationCheckpointing, Aio, Checkpoint, Compile
from dsframe.config.schema.zero import Zero

LogLevel = Literal["debug", "info", "warning", "error", "critical"]


@passed
class Scalars(Section):
    """The keys at the top level that are not sections."""

    train_batch_size: Count | None = None
    """Samples in one optimizer step, over all ranks: micro-batch size x accumulation steps x data-parallel ranks. One
    or two of the three keys suffice."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples in one forward and backward pass of one rank."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches of one rank in one optimizer step. ``"auto"`` is 1 unless the other two say otherwise."""
    log_level: LogLevel | None = None
    """Level of DeepSpeed's logger."""
    dataloader_drop_last: bool = False
    """Drop the last, incomplete batch of an epoch."""
    communication_data_type: CommunicationType | None = None
    """Data type in which gradients are reduced. Default: the model's."""
    gradient_predivide_factor: Positive = 1.0
    """Divide by this before the reduction, and by the rest after. No effect with ``prescale_gradients``."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Average or sum gradients over ranks. Stage 3 and DeepCompile refuse ``sum``."""
    gradient_clipping: NonNegative = 1.0
    """Largest global norm of the gradients. Since 0.19 DeepSpeed clips to 1.0 if the key is absent; 0 is off.
    ``"auto"`` is 1.0."""
    zero_allow_untested_optimizer: bool = False
    """Let ZeRO use optimizers other than Adam-like ones, such as SGD."""
    sequence_parallel_size: Count | None = None
    """Ranks that split each sequence along time (Ulysses). Among dsframe's tasks only "language" supports it."""
    data_parallel_size: Count | None = None
    """With ``sequence_parallel_size``: the shape of the device mesh."""

    folded: ClassVar[Mapping[str, str]] = {
        "communication_data_type": "lower",
        "seq_parallel_communication_data_type": "lower",
        "gradient_allreduce_op": "lower",
        "log_level": "lower",
    }


@passed
class DeepSpeed(Scalars):
    """The whole file without the ``dsframe`` section."""

    optimizer: Optimizer | None = None
    """The update rule."""
    scheduler: Scheduler | None = None
    """The learning-rate schedule."""
    fp16: Fp16 = Field(default_factory=Fp16.model_construct)
    """Training in float16."""
    bf16: Bf16 = Field(default_factory=Bf16.model_construct)
    """Training in bfloat16."""
    torch_autocast: TorchAutocast = Field(default_factory=TorchAutocast.model_construct)
    """Mixed precision by torch."""
    data_types: DataTypes = Field(default_factory=DataTypes.model_construct)
    """Number formats of single parts."""
    zero_optimization: Zero = Field(default_factory=Zero.model_construct)
    """ZeRO and offload."""
    activation_checkpointing: ActivationCheckpointing = Field(default_factory=ActivationCheckpointing.model_construct)
    """Recompute activations in the backward pass."""
    pipeline: Pipeline = Field(default_factory=Pipeline.model_construct)
    """Pipeline parallelism."""
    aio: Aio = Field(default_factory=Aio.model_construct)
    """Asynchronous I/O to NVMe."""
    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel.model_construct)
    """Tensor parallelism."""
    expert_parallel: ExpertParallel = Field(default_factory=ExpertParallel.model_construct)
    """Expert parallelism."""
    compile: Compile = Field(default_factory=Compile.model_construct)
    """DeepCompile."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct)
    """DeepSpeed's checkpoints."""
    datastates_ckpt: Any = False
    """DataStates checkpoints: any value but false turns them on. Needs the package ``datastates``."""
    tensorboard: TensorBoard = Field(default_factory=TensorBoard.model_construct)
    """TensorBoard."""
    wandb: Wandb = Field(default_factory=Wandb.model_construct)
    """Weights & Biases."""
    timers: Timers = Field(default_factory=Timers.model_construct)
    """Timers of the engine."""

    @property
    def copies_gradients_on_cpus(self) -> bool:
        """True if gradients are copied to one buffer before they are sent, on CPUs, where fragmentation does not
        matter.

        At stage 3 only without ``reduce_scatter``, when the buffer itself is sent. At stages 1 and 2 if the file says
        so, or if DeepSpeed 0.19.8 needs it or behaves differently without: 16 bits, offload, overlap, experts,
        pipelines. Without it a step of a GPT of 4.9 M parameters took 0.97 of the time (``benchmarks.compare``).
        """
        zero = self.zero_optimization
        if zero.stage == 3:
            return not zero.reduce_scatter
        written = "contiguous_gradients" in zero.model_fields_set
        short = self.fp16.enabled or self.bf16.enabled or self.on("torch_autocast")
        needed = short or zero.optimizer_device != "none" or bool(zero.overlap_comm) or self.on("expert_parallel")
        return zero.contiguous_gradients if written else needed or self.pipeline.stages > 1
