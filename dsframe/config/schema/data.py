"""``data_efficiency`` and ``autotuning``.

Source: ``deepspeed/runtime/data_pipeline`` and ``deepspeed/autotuning`` of DeepSpeed 0.19.8. DeepSpeed reads both as
plain dictionaries and ignores keys that it does not know.
"""

from typing import Any, ClassVar, Literal

from dsframe.config.schema.base import Count, NonNegative, Section, Size


class DifficultySchedule(Section):
    """How difficulty grows."""

    nullable: ClassVar[bool] = True

    difficulty: list[int] | None = None
    """``fixed_discrete``: the difficulties."""
    max_step: list[int] | None = None
    """``fixed_discrete``: the last step of each but the last difficulty."""
    total_curriculum_step: Count | None = None
    """``fixed_linear`` and ``fixed_root``: steps until the largest difficulty."""
    difficulty_step: Count | None = None
    """``fixed_linear`` and ``fixed_root``: difficulty is a multiple of it."""
    root_degree: Count | None = None
    """``fixed_root``: degree of the root."""


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: str | None = None
    """File made by DeepSpeed's data analyser."""
    index_to_metric_path: str | None = None
    """File made by DeepSpeed's data analyser."""
    difficulty_type: Literal["value", "percentile"] | None = None
    """Difficulty as a value of the metric or as its percentile."""
    clustering_type: Literal["schedule_based", "single_cluster"] | None = None
    """How samples are grouped."""
    min_difficulty: NonNegative | None = None
    """Difficulty at the start."""
    max_difficulty: NonNegative | None = None
    """Difficulty at the end."""
    schedule_type: Literal["fixed_discrete", "fixed_linear", "fixed_root", "custom"] | None = None
    """How it grows."""
    schedule_config: DifficultySchedule | None = None
    """Numbers of the schedule."""


class CurriculumLearning(Section):
    """Easy samples first."""

    enabled: bool = False
    """Turns it on; ``data_sampling.enabled`` and ``data_efficiency.enabled`` must be true too."""
    data_cluster_path: str | None = None
    """Folder for the clusters of samples."""
    curriculum_metrics: dict[str, CurriculumMetric] | None = None
    """Name of a metric -> its settings. Required when enabled."""


class DynamicBatching(Section):
    """Batches of about as many tokens."""

    enabled: bool = False
    """Turns it on."""
    metrics_path: str | None = None
    """Folder with the lengths of the samples."""
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate follows the batch size."""
    min_batch_size: Count = 1
    """Least samples in a batch."""
    max_batch_size: Count | None = None
    """Most samples in a batch."""
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = "dataloader"
    """Order in which samples are packed."""
    max_tokens: Count | None = None
    """Most tokens in a batch. Required when enabled."""
    verbose: bool = False
    """Print the batches."""


class DataSampling(Section):
    """DeepSpeed's own sampler."""

    enabled: bool = False
    """Turns it on."""
    num_epochs: Count = 1000
    """Most epochs."""
    num_workers: Size = 0
    """Worker processes of the data loader."""
    pin_memory: bool = False
    """Page-locked batches."""
    curriculum_learning: CurriculumLearning | None = None
    """Easy samples first."""
    dynamic_batching: DynamicBatching | None = None
    """Batches of about as many tokens."""


class LtdScheduleNumbers(Section):
    """How many tokens are kept."""

    nullable: ClassVar[bool] = True

    require_steps: Count | None = None
    """Steps until all tokens are kept."""
    seq_per_step: Count | None = None
    """Growth is a multiple of it."""


class LtdSchedule(Section):
    """How the number of kept tokens grows."""

    nullable: ClassVar[bool] = True

    min_value: Count | None = None
    """Tokens kept at the start."""
    max_value: Count | None = None
    """Tokens kept at the end."""
    schedule_type: Literal["fixed_linear"] | None = None
    """How it grows."""
    schedule_config: LtdScheduleNumbers | None = None
    """Numbers of the schedule."""


class LayerTokenLr(Section):
    """A learning rate that follows the tokens each layer has seen."""

    nullable: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on. DeepSpeed 0.19.8 raises: not yet supported."""
    total_layer_tokens: Count | None = None
    """Tokens of the whole training."""
    warmup_type: str | None = None
    """Shape of the warm-up."""
    warmup_layer_tokens: Size | None = None
    """Tokens of warm-up."""


class RandomLtd(Section):
    """Random layerwise token dropping."""

    enabled: bool = False
    """Turns it on; ``data_routing.enabled`` and ``data_efficiency.enabled`` must be true too."""
    total_layer_num: Count | None = None
    """Layers of the model."""
    random_ltd_layer_num: Size | None = None
    """Layers that drop tokens."""
    random_ltd_layer_id: list[int] | None = None
    """Their indices."""
    model_mask_name: str | None = None
    """Name of the attention mask among forward's arguments."""
    model_type: Literal["encoder", "decoder"] | None = None
    """Kind of model."""
    hidden_state_order: str | None = None
    """``batch_seq_dim`` or ``seq_batch_dim``."""
    random_ltd_schedule: LtdSchedule | None = None
    """How the number of kept tokens grows."""
    global_batch_size: Count | None = None
    """Filled in by DeepSpeed."""
    micro_batch_size: Count | None = None
    """Filled in by DeepSpeed."""
    sample_idx: Any = None
    """Filled in by DeepSpeed."""
    attention_mask: Any = None
    """Filled in by DeepSpeed."""
    layer_token_lr_schedule: LayerTokenLr | None = None
    """Learning rate by tokens."""


class DataRouting(Section):
    """What each layer sees of a sample."""

    enabled: bool = False
    """Turns it on."""
    random_ltd: RandomLtd | None = None
    """Random layerwise token dropping."""


class DataEfficiency(Section):
    """DeepSpeed's data-efficiency library."""

    enabled: bool = False
    """Turns it on."""
    seed: int = 1234
    """Seed of the sampler."""
    data_sampling: DataSampling | None = None
    """Which samples, in which order."""
    data_routing: DataRouting | None = None
    """Which tokens each layer sees."""


class ModelInfo(Section):
    """What the tuner should know of the model."""

    nullable: ClassVar[bool] = True

    profile: bool = False
    """Find it by running the model."""
    num_params: Count | None = None
    """Parameters."""
    hidden_size: Count | None = None
    """Hidden size."""
    num_layers: Count | None = None
    """Layers."""


class Autotuning(Section):
    """Settings of ``deepspeed --autotuning``. Without that flag they have no effect."""

    enabled: bool = False
    """Turns it on."""
    fast: bool = True
    """Tune the micro-batch size only."""
    results_dir: str = "autotuning_results"
    """Folder of the results. Not empty."""
    exps_dir: str = "autotuning_exps"
    """Folder of the experiments. Not empty."""
    overwrite: bool = True
    """Replace earlier results."""
    start_profile_step: Size = 3
    """First step that is measured."""
    end_profile_step: Size = 5
    """Last step that is measured."""
    metric: Literal["throughput", "latency", "flops", "forward", "step"] = "throughput"
    """What is tuned."""
    metric_path: str | None = None
    """Where an experiment writes its metric."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """How the space is searched."""
    tuner_early_stopping: Size = 5
    """Experiments without progress before it stops."""
    tuner_num_trials: Size = 50
    """Most experiments."""
    arg_mappings: dict[str, str] | None = None
    """Keys of this file -> arguments of the program."""
    model_info: ModelInfo | None = None
    """What is known of the model."""
    model_info_path: str | None = None
    """Where the model's profile is kept."""
    mp_size: Count = 1
    """Ranks that share a model."""
    max_train_batch_size: Count | None = None
    """Largest global batch."""
    min_train_batch_size: Count = 1
    """Smallest global batch."""
    max_train_micro_batch_size_per_gpu: Count = 1024
    """Largest micro-batch."""
    min_train_micro_batch_size_per_gpu: Count = 1
    """Smallest micro-batch."""
    num_tuning_micro_batch_sizes: Count = 3
    """Micro-batch sizes that are tried."""
