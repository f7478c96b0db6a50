# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""The ``dsframe`` section: what dsframe needs to know beyond DeepSpeed's own keys."""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from dsframe.config.schema.base import AUTO, Count, Every, ModuleName, Section
from dsframe.config.schema.optimizer import ModelOptimizer
from dsframe.config.schema.settings_checkpoints import Checkpoints
from dsframe.config.schema.settings_engines import Ddp, Fsdp
from dsframe.config.schema.settings_engines import Horovod as Horovod
from dsframe.config.schema.settings_images import ImageData as ImageData
from dsframe.config.schema.settings_model import Model
from dsframe.config.schema.settings_tasks import CausalLanguageModelTask as CausalLanguageModelTask
from dsframe.config.schema.settings_tasks import ImageClassificationTask as ImageClassificationTask
from dsframe.config.schema.settings_tasks import LanguageTask as LanguageTask
from dsframe.config.schema.settings_tasks import TextFiles as TextFiles
from dsframe.config.schema.settings_training import Adapter, Ema, ParameterGroup, Stop
from dsframe.engines.table import BUILT_IN, TABLE


def _check_engine_name(name: str) -> str:
    if name != AUTO and name not in TABLE:
        raise PydanticCustomError("unknown_engine", "no such engine")
    return name


EngineName = Annotated[
    str,
    AfterValidator(_check_engine_name),
    # For editors, which do not know the installed packages: names of external engines have a hyphen ("vendor-engine").
    WithJsonSchema({"anyOf": [{"enum": [AUTO, *BUILT_IN], "type": "string"}, {"pattern": "-", "type": "string"}]}),
]
"""An engine of dsframe or of an installed package; ``auto`` follows the launcher."""


class VisionTask(ImageData):
    """Image classification."""

    name: Literal["vision"] = "vision"
    """Kind of task."""
    model: str = "cnn"
    """``cnn``, a small convolutional network, or a torchvision classification model by name, such as ``resnet18``."""


class CustomTask(Section):
    """Your own task: a subclass of ``dsframe.Task``."""

    name: ModuleName
    """``package.module:Class``."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""


TASKS: Mapping[str, type[Section]] = {
    "vision": VisionTask,
    "language": LanguageTask,
    "causal-language-model": CausalLanguageModelTask,
    "image-classification": ImageClassificationTask,
}


def task_class(raw: Any) -> type[Section]:
    """Returns the section class for ``task`` by its name; ``vision`` if it has none."""
    name = raw.get("name", "vision") if isinstance(raw, Mapping) else getattr(raw, "name", "vision")
    return CustomTask if isinstance(name, str) and ":" in name else TASKS.get(str(name), VisionTask)


Task = Annotated[
    Annotated[VisionTask, Tag("VisionTask")]
    | Annotated[LanguageTask, Tag("LanguageTask")]
    | Annotated[CausalLanguageModelTask, Tag("CausalLanguageModelTask")]
    | Annotated[ImageClassificationTask, Tag("ImageClassificationTask")]
    | Annotated[CustomTask, Tag("CustomTask")],
    Discriminator(lambda raw: task_class(raw).__name__),
]


def _options_class(engine: Any) -> type[Section] | None:
    """Returns the section with the options of the given engine; None if it has none."""
    entry = TABLE.get(engine) if isinstance(engine, str) and engine != AUTO else None
    if entry is None or not entry.options:
        return None
    module, _, name = entry.options.partition(":")
    section: type[Section] = getattr(import_module(module), name)
    return section


class Settings(Section):
    """Everything about the run that DeepSpeed has no key for."""

    engine: EngineName = "auto"
    """``deepspeed``, ``horovod``, ``ddp``, ``fsdp``, ``single``, or an engine of an installed package (entry point
    group ``dsframe.engines``); ``auto`` follows the launcher."""
    engine_options: dict[str, Any] = {}
    """Options of an engine from such a package."""
    inherit: Literal["deepspeed", "torch"] = "deepspeed"
    """Defaults for clipping and the optimizer, on every engine: DeepSpeed's (clipping at 1.0, no weight decay, Adam is
    AdamW) or torch's (no clipping, AdamW decays by 0.01, Adam is Adam)."""
    fallback: Literal["allow", "error"] = "allow"
    """If the engine is not installed: use the next one and print which, or stop."""
    task: Task = Field(default_factory=VisionTask.model_construct)
    """Model, data, loss and metrics."""
    epochs: Count | None = None
    """Passes over the data. Not together with ``steps``; 1 when both are absent."""
    steps: Count | None = None
    """Optimizer steps. Not together with ``epochs``."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the weights, the order of samples and the augmentation."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the training samples in each epoch: shuffled by the seed, or as stored. Others: ``Task.order``."""
    deterministic: bool = False
    """Use only torch's deterministic algorithms, on every engine: on GPUs only this makes runs and resumed runs equal
    to the last bit. An operator without one raises an error that names it. Slower. The communication library decides
    the order of sums over ranks."""
    tf32: bool = False
    """On GPUs, compute fp32 matrix products and convolutions in TF32 (10 bits of mantissa), on every engine; if false,
    both in fp32, although torch's default for convolutions is TF32."""
    per_sample_randomness: bool = False
    """Draw the model's random numbers (dropout masks, noise) per sample, from the seed, the step and the sample's
    position in the global batch. The result is then independent of the number of ranks. Slower."""
    eval_every_steps: Every | None = None
    """Steps between evaluations. Default: at the end of each epoch. The end of training always evaluates."""
    eval_before_training: bool = False
    """Also evaluate before the first step of a new run: the metrics of step 0."""
    eval_samples: Count | None = None
    """Number of validation samples, from the first. Default: all."""
    eval_micro_batch_size: Count | None = None
    """Samples of one rank in an evaluation batch. Default: the training micro-batch size."""
    log_every_steps: Every = 10
    """Steps between two log lines."""
    run_dir: str | None = None
    """Folder of the run's results. Default: ``runs/NAME-ENGINE``, with the config file's name."""
    checkpoints: Checkpoints = Field(default_factory=Checkpoints.model_construct)
    """When the run saves its state, and what it keeps."""
    hooks: list[ModuleName] = []
    """Your own classes that are called during training, ``package.module:Class`` (``dsframe.Hooks``)."""
    adapter: Adapter | None = None
    """Trains an adapter (LoRA) instead of the model's weights."""
    ema: Ema | None = None
    """Keeps an average of the weights."""
    stop: Stop | None = None
    """Early stopping: ends training if a validation metric no longer improves."""
    threads_per_rank: Count | None = None
    """CPU threads of a rank. Default: OMP_NUM_THREADS, else the node's usable cores divided by its ranks."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If the loss or gradients are NaN or infinite: ``stop`` at the next logged step and report the first such step,
    rank and samples; or ``skip`` updates with non-finite gradients, which makes each step wait for the device.
    Overflows under fp16 loss scaling are skipped either way."""
    hang_timeout_seconds: Annotated[float, Field(ge=0)] = 300.0
    """Longest time without progress (a micro-batch, an evaluation batch, a parameter saved) before the run is ended and
    the missing rank named; three times as long until the first step has ended, and at least 15 minutes for setting up
    the engine, reading a checkpoint and the trial evaluation. 0: never."""
    parameter_groups: list[ParameterGroup] = []
    """Parameters with another weight decay or learning rate, and frozen parameters. A parameter may be in one group
    only. Refused with Muon, which makes its own groups. ``Task.parameter_groups`` does the same in code."""
    no_decay: Literal["none", "norms-and-biases"] = "none"
    """Parameters without weight decay, unless their group sets ``weight_decay``: ``norms-and-biases`` are those that
    Hugging Face's Trainer excludes (inside ``nn.LayerNorm``, or with ``bias``, ``layernorm``, ``rmsnorm``, or a part
    that is or ends in ``norm`` in the name)."""
    optimizers: dict[str, ModelOptimizer] = {}
    """Optimizers of a task with several models (``Task.models``), by model name; the other models use the file's
    ``optimizer``. The scheduler sets the rate of that one, and the others follow in proportion."""
    model: Model = Field(default_factory=Model.model_construct)
    """Switches that save memory or time."""
    horovod: Horovod = Field(default_factory=Horovod.model_construct)
    """Options of the Horovod engine."""
    ddp: Ddp = Field(default_factory=Ddp.model_construct)
    """Options of the DDP engine."""
    fsdp: Fsdp = Field(default_factory=Fsdp.model_construct)
    """Options of the FSDP engine."""
    pass_through: list[str] = []
    """Unknown keys to pass to DeepSpeed, dotted if nested."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> type[Section] | None:
        if key == "engine_options":
            return _options_class(raw.get("engine"))
        return task_class(raw[key]) if key == "task" else None
