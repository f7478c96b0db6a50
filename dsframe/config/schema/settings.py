# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""The ``dsframe`` section: what dsframe needs to know beyond DeepSpeed's own keys."""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from dsframe.config.schema.base import AUTO, Count, Every, Positive, Section, Size
from dsframe.config.schema.optimizer import Optimizer
from dsframe.config.schema.settings_checkpoints import Checkpoints
from dsframe.config.schema.settings_model import Adapter, DeepSpeedEngine, Ema, LargeBatch, Model, ParameterGroup, Stop
from dsframe.config.schema.settings_report import Mlflow, Profile
from dsframe.engines.table import BUILT_IN, TABLE


def _known(name: str) -> str:
    if name != AUTO and name not in TABLE:
        raise PydanticCustomError("unknown_engine", "no such engine")
    return name


EngineName = Annotated[
    str,
    AfterValidator(_known),
    # For editors, which do not know what is installed: a name from outside is expected to have a hyphen, as "vendor-engine".
    WithJsonSchema({"anyOf": [{"enum": [AUTO, *BUILT_IN], "type": "string"}, {"pattern": "-", "type": "string"}]}),
]
"""An engine of dsframe's or of an installed package; ``auto`` follows the launcher."""


class ImageData(Section):
    """Images and their classes."""

    name: str = ""
    """Kind of task."""
    model: Any = None
    """The model."""
    dataset: Literal["fashion-mnist", "mnist", "cifar10", "image-folder", "image-shards", "synthetic"] = "fashion-mnist"
    """Where images come from. ``image-folder`` reads ``data_dir/train/CLASS/*`` and ``data_dir/val/CLASS/*``; ``image-shards``
    ``data_dir/train/*.tar`` and ``data_dir/val/*.tar``, as webdataset writes them: of each sample an image and ``cls``."""
    data_dir: str | None = None
    """Folder of the data. Default: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    augment: bool = True
    """Random crop with padding and horizontal flip, in training only."""
    image_size: Count | None = None
    """Pixels of a side, for ``image-folder``, ``image-shards`` and ``synthetic``."""
    classes: Count | None = None
    """Number of classes, for ``synthetic`` and ``image-shards``, which needs it."""
    samples: Count | None = None
    """Use only so many training samples: the first ones of a file, any ones of an ``image-folder``, always the same; not of
    ``image-shards``. Default: all."""
    workers: Size = 0
    """Processes that read images, for ``image-folder`` and ``image-shards``."""


class VisionTask(ImageData):
    """Image classification."""

    name: Literal["vision"] = "vision"
    """Kind of task."""
    model: str = "cnn"
    """``cnn``, a small convolutional network, or any classification model of torchvision by name, such as
    ``resnet18``."""


class LanguageTask(Section):
    """Language modelling over bytes with a GPT."""

    name: Literal["language"]
    """Kind of task."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads. Divides ``width``."""
    width: Count = 256
    """Hidden size."""
    context: Count = 128
    """Tokens in one sample; a token is a byte."""
    corpus: str = "stdlib"
    """``stdlib`` (the sources of Python's standard library), ``synthetic``, or text files: a path or a pattern."""
    data_dir: str | None = None
    """Folder in which tokens are cached. Default: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    samples: Count | None = None
    """Use only so many training samples. Default: all."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""


class MixturePart(Section):
    """Files of a mixture, and what share of the rows they give."""

    data: str | list[str]
    """Files or patterns, as for ``train``."""
    weight: Positive
    """Its share of the rows is this, divided by the sum of all weights."""
    name: str | None = None
    """Name in messages and logs. Default: the first pattern."""
    exhausted: Literal["repeats", "ends", "error"] = "repeats"
    """When all of its rows have been read: it ``repeats`` in a new order, it ``ends`` and the others share its place, or the
    training is refused before it begins (``error``)."""


class TextFiles(Section):
    """Text or conversations from files, tokenised once and then read from a memory-mapped file."""

    train: str | list[str] | None = None
    """Files or patterns, such as ``["a/*.jsonl", "b.parquet", "c/*.txt"]``: JSON lines (also ``.zst`` and ``.gz``), parquet, text
    (one document a file), or a folder that ``datasets.save_to_disk`` wrote. Not beside ``mixture``."""
    mixture: list[MixturePart] | None = None
    """In place of ``train``: several sets of files with weights. Which one gives a row follows from the seed and from the row's
    number in the training."""
    eval: str | list[str] | None = None
    """The held-out ones. Default: none, so there is no evaluation."""
    format: Literal["text", "conversations"] = "text"
    """``conversations``: rows have ``messages``, or ``prompt`` and ``completion``, and the answers alone are learned."""
    field: str = "text"
    """Column of the text, in JSON lines, parquet and saved folders."""
    packing: Literal["concatenate", "rows", "documents"] | None = None
    """``concatenate``: all documents joined, cut into rows of ``context`` tokens. ``rows``: one document a row, padded to the
    longest of its micro-batch. ``documents``: as many as fit into ``context``; they do not see each other. Default:
    ``concatenate`` for text, ``rows`` for conversations."""
    padding: Literal["micro-batch", "global-batch"] = "micro-batch"
    """With ``"packing": "rows"``: rows are padded to the longest one of the micro-batch, or of the global batch. With the latter
    the shapes of a step do not depend on the number of ranks."""
    chat_template: str | None = None
    """File with a chat template, in place of the tokenizer's own. It marks the answers by ``{% generation %}``."""


class CausalLanguageModelTask(Section):
    """Language modelling with a model of Hugging Face transformers (``AutoModelForCausalLM``). Nothing is downloaded."""

    name: Literal["causal-language-model"]
    """Kind of task."""
    model: dict[str, Any] | str
    """An object, ``{"model_type": "llama", "hidden_size": 64, ...}``: a new model with these settings of transformers'
    configuration class, its own defaults for the rest. Or a local folder with a model: its weights are the first ones."""
    fresh: bool = False
    """Take only the configuration from the folder, and draw new weights from the seed."""
    tokenizer: str | None = None
    """Local folder of a tokenizer. Default: the model folder's, where it has one, else a token is a byte."""
    context: Count = 128
    """Tokens in one sample."""
    corpus: str = "stdlib"
    """``stdlib`` (the sources of Python's standard library), ``synthetic``, or text files: a path or a pattern. Not beside
    ``data``."""
    data: TextFiles | None = None
    """Documents or conversations, instead of ``corpus``."""
    data_dir: str | None = None
    """Folder in which tokens are cached. Default: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    samples: Count | None = None
    """Use only so many training samples. Default: all."""


class ImageClassificationTask(ImageData):
    """Image classification with a model of Hugging Face transformers (``AutoModelForImageClassification``). Nothing is
    downloaded."""

    name: Literal["image-classification"]
    """Kind of task."""
    model: dict[str, Any] | str
    """An object, ``{"model_type": "vit", "hidden_size": 64, ...}``: a new model with these settings of transformers'
    configuration class, sized for the data set. Or a local folder with a model: its weights are the first ones, and the
    output layer is a new one where the classes differ."""
    fresh: bool = False
    """Take only the configuration from the folder, and draw new weights from the seed."""


class CustomTask(Section):
    """A task of your own: a subclass of ``dsframe.Task``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
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
    """The section class for a written ``task``: by its name, ``vision`` when there is none."""
    name = raw.get("name", "vision") if isinstance(raw, Mapping) else getattr(raw, "name", "vision")
    return CustomTask if isinstance(name, str) and ":" in name else TASKS.get(str(name), VisionTask)


def _task_tag(raw: Any) -> str:
    return task_class(raw).__name__


Task = Annotated[
    Annotated[VisionTask, Tag("VisionTask")]
    | Annotated[LanguageTask, Tag("LanguageTask")]
    | Annotated[CausalLanguageModelTask, Tag("CausalLanguageModelTask")]
    | Annotated[ImageClassificationTask, Tag("ImageClassificationTask")]
    | Annotated[CustomTask, Tag("CustomTask")],
    Discriminator(_task_tag),
]


class Horovod(Section):
    """Options of the Horovod engine."""

    op: Literal["average", "sum", "adasum"] | None = None
    """How gradients are combined. Default: by ``gradient_allreduce_op``."""
    compression: Literal["none", "fp16"] = "none"
    """Send gradients as they are or as fp16."""
    fusion_threshold_bytes: Size | None = None
    """Bytes of gradients that are reduced together. Default: HOROVOD_FUSION_THRESHOLD, else a quarter of all, but
    1 to 64 MiB."""
    cycle_time_milliseconds: Positive | None = None
    """Time between two rounds of reductions. Default: HOROVOD_CYCLE_TIME, else 5 ms on CPUs and Horovod's own 1 ms on GPUs."""
    autotune: bool = False
    """Let Horovod try threshold and cycle time out in the first steps and keep the fastest. From three ranks on, last bits may
    then differ from run to run, because what is reduced together depends on the moment. Refused where Horovod starts more than
    once in a process: in a second training, and where processes come and go."""
    groups: Size = 0
    """Gradients are reduced in so many groups of as many parameters. 0: by ``fusion_threshold_bytes``."""
    timeline: bool = False
    """Write when each tensor was negotiated, fused and reduced to ``timeline.json`` in the run's directory, for
    https://ui.perfetto.dev or chrome://tracing. Else as $HOROVOD_TIMELINE says."""
    timeline_mark_cycles: bool = False
    """Mark the rounds of reductions in it."""
    commit_every_steps: Count = 50
    """Under ``horovodrun --min-np``: steps between two copies of the state in each process's memory, which keeps the one before
    until the next is whole. So many steps at most are trained again when a process is lost, and hosts that were added join at the
    next copy."""


class Ddp(Section):
    """Options of the DDP engine."""

    bucket_cap_megabytes: Positive | None = None
    """Megabytes (2 to the 20 bytes) of gradients that are reduced together. Default: a quarter of all, 1 at least and 64 at
    most, so that most can leave while the backward pass still runs."""
    static_graph: bool = False
    """The model does the same at each step. From three ranks on, a run that goes on from a checkpoint adds up the gradients of its
    first steps in another order then, which changes last bits."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets: less memory."""
    find_unused_parameters: bool = False
    """DDP's own way with parameters that take no part in a loss: it reads the graph at each step. Without it they have zero
    gradients too, at less cost."""
    communication: Literal["none", "fp16", "bf16", "power_sgd"] = "none"
    """How gradients are sent: as they are; rounded to 16 bits and added up so (``fp16`` ends at 65,504); or by ``power_sgd``,
    as products of two narrow matrices, with what that leaves out added to the next step's (Vogels et al. 2019,
    arXiv 1905.13727)."""
    power_sgd_rank: Count = 1
    """Columns of the two matrices."""
    power_sgd_start_step: Annotated[int, Field(strict=True, ge=2)] = 1000
    """Steps before the first one that is compressed: gradients change most at the beginning."""


class Fsdp(Section):
    """Options of the FSDP engine."""

    wrap: list[str] = []
    """Classes of the model, by name. Each instance is gathered as one, and given up before the next. Default: the class that
    the model repeats, as for ``activation_checkpointing``, else the one that occurs most often in its lists of layers; of large
    models on CPUs parts of it, down to single layers, if it is large beside a rank's shard. What shares a parameter with another
    part of the model stays with the whole model."""
    sharding: Literal["full", "hybrid"] = "full"
    """``full``: shares for all ranks. ``hybrid``: shares within groups of ranks, and each group has a whole model."""
    shard_size: Count | None = None
    """Ranks of a group, for ``hybrid``. Divides the number of processes. Default: the ranks of a host."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: shares of weights, gradients and optimizer state live in the host's memory, where the update is made."""
    reshard_after_forward: bool = True
    """Give a unit up after its forward pass and gather it again for the backward pass: less memory, half as much again is
    sent."""
    accumulate: Literal["whole", "shards"] = "whole"
    """Gradients between micro-batches: ``whole`` on every rank and reduced once in a step, or reduced each time and kept in
    ``shards``: less memory, more is sent."""

    def splits(self, block: int, elements: int, ranks: int, *, on_cpu: bool) -> bool:
        """True if units smaller than the largest ``block`` are chosen for a model of so many ``elements``, where none are named.

        On CPUs, where collectives hide behind nothing and fewer, larger ones win little: of a model of 403 M parameters in 8
        blocks on 4 ranks, whole blocks and their gradients took 770 MiB beside a share of 1,536 (``benchmarks.sharded_memory``).
        """
        return not self.wrap and on_cpu and elements > 1 << 24 and block > elements // (8 * ranks)


def _options_class(engine: Any) -> type[Section] | None:
    """The section of the options of the engine that a file names; None where it has none."""
    entry = TABLE.get(engine) if isinstance(engine, str) and engine != AUTO else None
    if entry is None or not entry.options:
        return None
    module, _, name = entry.options.partition(":")
    found: type[Section] = getattr(import_module(module), name)
    return found


class Settings(Section):
    """Everything about the run that is not DeepSpeed's."""

    engine: EngineName = "auto"
    """Who trains: ``deepspeed``, ``horovod``, ``ddp``, ``fsdp``, ``single``, or an engine of an installed package (entry
    points of the group ``dsframe.engines``); ``auto`` is the launcher's own engine."""
    engine_options: dict[str, Any] = {}
    """Options of an engine from such a package, which names them."""
    inherit: Literal["deepspeed", "torch"] = "deepspeed"
    """Whose defaults hold for clipping and the optimizer where the file does not say, on every engine: DeepSpeed's (clipping at
    1.0, no weight decay, Adam is AdamW) or torch's (no clipping, AdamW decays by 0.01, Adam is Adam)."""
    fallback: Literal["allow", "error"] = "allow"
    """When the engine is not installed: take the next best and say so, or stop."""
    task: Task = Field(default_factory=VisionTask.model_construct)
    """Model, data, loss and metrics."""
    epochs: Count | None = None
    """Passes over the data. Not together with ``steps``; 1 when both are absent."""
    steps: Count | None = None
    """Optimizer steps. Not together with ``epochs``."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the weights, the order of samples and the augmentation."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the training samples in each epoch: shuffled from the seed, or as they lie. ``Task.order`` gives any other."""
    deterministic: bool = False
    """Take torch's deterministic algorithms alone, on every engine: on GPUs a run repeats itself, and goes on from a checkpoint, to
    the last bit only with them. An operator that has none raises an error that names it. Slower. Sums over ranks have the order of
    the library that makes them."""
    tf32: bool = False
    """On GPUs, compute fp32 matrix products and convolutions by TF32 (10 bits of mantissa), on every engine; else both in fp32,
    where torch's own default takes TF32 for convolutions. CPUs have none."""
    per_sample_randomness: bool = False
    """Draw what a model draws in training (dropout masks, noise) for each sample by itself, from the seed, the step and the
    sample's place in the global batch. Then the training does not depend on the number of ranks. Slower than torch's own."""
    eval_every_steps: Every | None = None
    """Steps between evaluations. Default: at each epoch's end. The end of training always evaluates."""
    eval_before_training: bool = False
    """Evaluate the model before the first step too, of a run that begins anew: the figures of step 0."""
    eval_samples: Count | None = None
    """Evaluate on the first so many of the held-out samples. Default: all."""
    eval_micro_batch_size: Count | None = None
    """Samples of one rank in an evaluation pass. Default: the training micro-batch size."""
    log_every_steps: Every = 10
    """Steps between two lines of progress."""
    mlflow: Mlflow = Field(default_factory=Mlflow.model_construct)
    """Figures to MLflow."""
    profile: Profile | None = None
    """Traces of some steps."""
    mfu: bool = False
    """Measure at start what all ranks together can do (products of large matrices in the training's number format, 0.2 s), and say
    which share of it the model's operations make: its model FLOPs utilization. What is computed again is not counted."""
    rank_output: Literal["prefix", "files", "plain"] = "prefix"
    """What ranks other than 0 print: from Python with ``[rank 3]`` before each line (horovodrun has its own mark); to the files
    ``output/rank3.log`` of the run's directory, libraries' own lines too; or as it is."""
    hardware: str | None = None
    """Machine for the predictions that ``dsframe report`` makes of a finished run: a name that ``dsframe plan --hardware`` knows,
    or a file written by ``dsframe plan --calibrate --save-hardware``. Default: by the GPU's name; on CPUs only memory is
    predicted."""
    measure_communication: bool = False
    """Count what the ranks send in a step and measure what that takes by itself, by one step more after the training, which its
    results do not see. ``dsframe compare`` sets it."""
    run_dir: str | None = None
    """Folder of the run's results. Default: ``runs/NAME-ENGINE`` after the config file's name."""
    checkpoints: Checkpoints = Field(default_factory=Checkpoints.model_construct)
    """When the run saves its state, and what it keeps."""
    hooks: list[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]] = []
    """Classes of your own that are called in the middle of the training, ``package.module:Class`` (``dsframe.Hooks``)."""
    adapter: Adapter | None = None
    """Trains an adapter (LoRA) instead of the model's own weights."""
    ema: Ema | None = None
    """Keeps an average of the weights."""
    stop: Stop | None = None
    """Ends the training where an evaluation's metric no longer gets better."""
    threads_per_rank: Count | None = None
    """CPU threads of a rank. Default: OMP_NUM_THREADS, else the host's usable cores shared among its ranks."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when loss or gradients are NaN or infinite: ``stop`` at the next logged step and say since when, on which rank and
    with which samples; or ``skip`` the updates whose gradients are not finite, for which each step waits for the device. Overflows
    under fp16 loss scaling are skipped either way."""
    hang_timeout_seconds: Annotated[float, Field(ge=0)] = 300.0
    """The longest time without a sign of life (a micro-batch, an evaluation batch, a parameter saved) before the run is ended
    and says which rank is missing; three times as long until the first step has ended, and at least 15 minutes for setting up the
    engine, reading a checkpoint and trying the evaluation. 0: wait for ever."""
    bind_cores: bool = False
    """Bind each rank to its share of the host's cores, under every launcher. Then ``threads_per_rank`` is that share's size
    where nothing else says so."""
    parameter_groups: list[ParameterGroup] = []
    """Parameters with a weight decay or a rate of their own, and frozen ones. One belongs to one group at most. Refused with Muon,
    MuP and ZenFlow, which make groups themselves. ``Task.parameter_groups`` gives the same from a program."""
    no_decay: Literal["none", "norms-and-biases"] = "none"
    """Parameters without weight decay, whatever group they are in, unless it has a ``weight_decay``: ``norms-and-biases``, those
    that Hugging Face's Trainer leaves out (inside ``nn.LayerNorm``, or with ``bias``, ``layernorm``, ``rmsnorm``, or a part that
    is or ends in ``norm`` in the name)."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Lower rates for the first layers, as for fine-tuning a vision transformer: of n repeated blocks the last one has this factor,
    each block before it once more, and what comes before the blocks n + 1 times; what comes after them has none. A group's
    ``lr_scale`` is multiplied with it. Default: 1."""
    optimizers: dict[str, Optimizer] = {}
    """Optimizers of a task's models where there are several (``Task.models``), by the models' names; those that have none here
    are trained by the file's ``optimizer``. A scheduler's rates are for that one, and the others' are in proportion."""
    large_batch: LargeBatch = Field(default_factory=LargeBatch.model_construct)
    """Scaling of the learning rate with the batch size."""
    model: Model = Field(default_factory=Model.model_construct)
    """Switches that save memory or time."""
    horovod: Horovod = Field(default_factory=Horovod.model_construct)
    """Options of the Horovod engine."""
    deepspeed: DeepSpeedEngine = Field(default_factory=DeepSpeedEngine.model_construct)
    """Options of the DeepSpeed engine that are no keys of DeepSpeed's."""
    ddp: Ddp = Field(default_factory=Ddp.model_construct)
    """Options of the DDP engine."""
    fsdp: Fsdp = Field(default_factory=Fsdp.model_construct)
    """Options of the FSDP engine."""
    pass_through: list[str] = []
    """Keys that this schema does not know and that DeepSpeed shall get all the same; dotted when nested."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> type[Section] | None:
        if key == "engine_options":
            return _options_class(raw.get("engine"))
        return task_class(raw[key]) if key == "task" else None
