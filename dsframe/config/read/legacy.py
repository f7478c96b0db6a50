"""Spellings of the past: removed sections, deprecated keys, and keys of other tools, with what replaces them.

Sources: ``_REMOVED_TOP_LEVEL_CONFIG_KEYS`` and ``_REMOVED_ZERO_CONFIG_KEYS`` in ``deepspeed/runtime/config.py`` (0.19.8);
the fields marked deprecated in ``deepspeed/runtime/zero/config.py``; public configuration files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsframe.config.read.findings import Findings, Fix, show
from dsframe.config.read.reader import Path, inside

Keys = tuple[str, ...]
"""A path through objects only."""

REMOVED: Mapping[Path, str] = {
    ("amp",): 'use "fp16", "bf16" or "torch_autocast"',
    ("compression_training",): "remove it: the compression library was removed, and the model would train uncompressed",
    ("curriculum_learning",): "move it to data_efficiency.data_sampling.curriculum_learning",
    ("eigenvalue",): "remove it: it only served quantize_training, which was removed too",
    ("elasticity",): "set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps yourself",
    ("graph_harvesting",): "remove it",
    ("nebula",): "remove it: checkpoints would silently be written by torch.save",
    ("progressive_layer_drop",): "remove it",
    ("quantize_training",): "remove it: Mixture-of-Quantization was removed",
    ("sparse_attention",): "remove it; choose the attention kernel in the model",
    ("sparse_gradients",): "remove it: gradients of embeddings are dense on every engine",
    ("zero_optimization", "mics_shard_size"): "use zero_hpz_partition_size for a secondary partition",
    ("zero_optimization", "mics_hierarchical_params_gather"): "remove it: MiCS was removed",
    ("zero_optimization", "zeropp_loco_param"): "remove it: zero_quantized_gradients works without it",
}
"""Removed from DeepSpeed 0.19: the mere presence of the key raises, whatever its value."""

_ZERO = ("zero_optimization",)
RENAMED: Mapping[Keys, Keys] = {
    ("bfloat16",): ("bf16",),
    **{
        (*_ZERO, name): (*_ZERO, f"stage3_{name}")
        for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
            "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
            "use_all_reduce_for_fetch_params", "allgather_sequential",
        )
    },
    (*_ZERO, "stage3_gather_fp16_weights_on_model_save"): (*_ZERO, "stage3_gather_16bit_weights_on_model_save"),
    ("tensor_parallel", "tensor_parallel"): ("tensor_parallel", "tp"),
    ("tensor_parallel", "replace_with_kernel_inject"): ("tensor_parallel", "kernel_inject"),
    ("dsframe", "parameter_averaging"): ("dsframe", "engine_options"),
}  # fmt: skip
"""Old spelling that DeepSpeed still reads -> the spelling of today, with the same value."""

SYNONYMS: Mapping[Path, tuple[str, str]] = {
    ("fp32_allreduce",): ("removed from DeepSpeed, which ignores it", 'write "communication_data_type": "fp32"'),
    ("allreduce_always_fp32",): ("removed from DeepSpeed, which ignores it", 'write "communication_data_type": "fp32"'),
    ("disable_fused_adam",): ("unknown key, which DeepSpeed ignores", 'write "torch_adam": true in optimizer.params'),
    ("batch_size",): ("unknown key", 'write "train_batch_size" (all ranks) or "train_micro_batch_size_per_gpu"'),
    ("learning_rate",): ("unknown key", 'write "lr" in optimizer.params'),
    ("zero_stage",): ("unknown key", 'write "zero_optimization": {"stage": N}'),
    ("gpu_offload",): ("unknown key", 'write "offload_optimizer": {"device": "cpu"} under "zero_optimization"'),
    ("mixed_precision",): ("unknown key", 'write "bf16": {"enabled": true} or "fp16": {"enabled": true}'),
    ("backend",): ("unknown key, which DeepSpeed ignores", "remove it: the launcher or the program chooses the backend"),
    ("local_rank",): ("unknown key, which DeepSpeed ignores", "remove it: the launcher sets it"),
    ("gradient_checkpointing",): (
        "unknown key, which DeepSpeed ignores",
        "turn it on in the model; settings go to activation_checkpointing",
    ),
    ("pipeline_parallel_size",): ("unknown key, which DeepSpeed ignores", 'write "pipeline": {"stages": N}'),
    ("tensor_parallel_size",): ("unknown key, which DeepSpeed ignores", 'write "tensor_parallel": {"autotp_size": N}'),
    ("model_parallel_size",): ("unknown key, which DeepSpeed ignores", 'write "tensor_parallel": {"autotp_size": N}'),
    ("context_parallel_size",): (
        "unknown key: there is no ring attention here, because torch's has no kernel for CPUs",
        'write "sequence_parallel_size": N, which exchanges heads',
    ),
    ("expert_parallel_size",): (
        "unknown key, which DeepSpeed ignores", 'write "expert_parallel": {"enabled": true, "autoep_size": N}',
    ),
    ("optimizer", "params", "max_grad_norm"): (
        "not an argument of an optimizer: DeepSpeed raises",
        'write "gradient_clipping" at the top level',
    ),
    ("optimizer", "params", "momentum"): ("not an argument of this optimizer", "remove it, or choose SGD or Muon"),
    ("offload_optimizer_device",): (
        "unknown key, which DeepSpeed ignores", 'write "offload_optimizer": {"device": "cpu"} under "zero_optimization"',
    ),
    ("offload_param_device",): (
        "unknown key, which DeepSpeed ignores", 'write "offload_param": {"device": "cpu"} under "zero_optimization"',
    ),
    ("zero_optimization", "offload"): (
        "unknown key: DeepSpeed raises", 'write "offload_optimizer": {"device": "cpu"} or "offload_param"',
    ),
    ("fp16", "opt_level"): ("an option of Apex, which DeepSpeed no longer uses: it raises", "remove it"),
    **{
        ("dsframe", key): ("unknown key", remedy)
        for key, remedy in (
            ("batch_size", 'write "train_batch_size" (all ranks) at the top level'),
            ("learning_rate", 'write "lr" in optimizer.params'),
            ("precision", 'write "bf16": {"enabled": true} or "fp16": {"enabled": true} at the top level'),
            ("save_steps", 'write "checkpoints": {"every_steps": N}'),
            ("save_total_limit", 'write "checkpoints": {"keep_last": N}'),
            ("resume", "write --resume auto on the command line"),
            ("data", 'write "dataset" or "data_dir" in dsframe.task'),
            ("num_workers", 'write "workers" in dsframe.task'),
        )
    },
    **{
        ("bf16", key): ("bf16 has no loss scaling: DeepSpeed raises", "remove it")
        for key in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
                    "consecutive_hysteresis", "auto_cast", "opt_level")
    },
}  # fmt: skip
"""Keys that people write and that mean something else here: what is wrong, and the remedy."""

MEANT: Mapping[Path, str] = {
    ("zero",): "zero_optimization",
    ("micro_batch_size",): "train_micro_batch_size_per_gpu",
    ("per_device_train_batch_size",): "train_micro_batch_size_per_gpu",
    ("max_grad_norm",): "gradient_clipping",
    ("grad_clip",): "gradient_clipping",
    ("clip_grad",): "gradient_clipping",
    ("tensor_parallel", "tp_size"): "autotp_size",
    ("pipeline", "partition_method"): "partition",
    ("pipeline", "num_stages"): "stages",
    ("activation_checkpointing", "partitioned_activations"): "partition_activations",
    ("aio", "thread_count"): "intra_op_parallelism",
    **{
        (section, key): name
        for section in ("optimizer", "scheduler")
        for key, name in (("name", "type"), ("parameters", "params"), ("args", "params"), ("kwargs", "params"))
    },
    **{
        ("dsframe", key): name
        for name, keys in (
            ("epochs", ("num_epochs", "max_epochs", "num_train_epochs")),
            ("steps", ("num_steps", "max_steps", "train_steps", "max_train_steps")),
            ("log_every_steps", ("log_every", "log_every_n_steps", "log_interval", "logging_steps")),
            ("eval_every_steps", ("eval_every", "eval_interval", "eval_steps")),
            ("run_dir", ("out_dir", "output_dir", "default_root_dir")),
        )
        for key in keys
    },
    **{
        ("dsframe", "task", key): "samples"
        for key in ("max_samples", "num_samples", "train_samples", "max_train_samples")
    },
}
"""Names of other tools, and of the past, that DeepSpeed ignores -> the key of the same section that has their value."""


def modernise(raw: dict[str, Any], findings: Findings) -> None:
    """Replace deprecated forms in ``raw`` by today's, in place, and report each."""
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        _zero_switch(raw, zero, findings)
    for old, new in RENAMED.items():
        _rename(raw, old, new, findings)
    if isinstance(raw.get("zero_optimization"), dict):
        _cpu_offload(raw["zero_optimization"], findings)


def _zero_switch(raw: dict[str, Any], on: bool, findings: Findings) -> None:
    path: Path = ("zero_optimization",)
    modern: dict[str, Any] = {"stage": 1 if on else 0}
    if on and "allgather_size" in raw:
        modern["allgather_bucket_size"] = raw["allgather_size"]
        findings.moved(("allgather_size",), (*path, "allgather_bucket_size"))
        findings.fixes.append(Fix(("allgather_size",), ("allgather_size",), remove=True))
    raw.pop("allgather_size", None)
    raw["zero_optimization"] = modern
    message = f"{show(on)} is deprecated and means stage {modern['stage']}"
    findings.warning(path, message, f"write {show(modern)}", code="deprecated", at_value=True)
    findings.fixes.append(Fix(path, path, modern, replace=True))


def _rename(raw: dict[str, Any], old: Keys, new: Keys, findings: Findings) -> None:
    owner, before, after = inside(raw, old[:-1]), old[-1], new[-1]
    if not isinstance(owner, dict) or before not in owner:
        return
    if after in owner and owner[after] is not None:
        message = f'another name of "{after}", which the file has as well'
        if old == ("bfloat16",):
            message = f'the file has "{after}" as well, and DeepSpeed ignores this one'
        findings.error(old, message, "keep one", code="conflict")
        del owner[before]
        return
    owner[after] = owner.pop(before)
    findings.moved(old, new)
    if old[0] == "zero_optimization" and f"stage3_{before}" == after:
        findings.note(old, "short name", f'DeepSpeed documents it as "{after}"', code="deprecated")
    else:
        findings.warning(old, "deprecated", f'write "{after}"', code="deprecated")
    findings.fixes.append(Fix(old, new))


def _cpu_offload(zero: dict[str, Any], findings: Findings) -> None:
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero or zero[old] == "auto":
            continue
        path: Path = ("zero_optimization", old)
        value = zero.pop(old)
        if not isinstance(value, bool):
            message = f"deprecated, and {show(value)} is not true or false"
            findings.error(path, message, f'write "{new}": {{"device": "cpu"}}', code="type", at_value=True)
        elif zero.get(new) is not None:
            message = f'deprecated name of "{new}", which the file has as well: DeepSpeed raises'
            findings.error(path, message, "remove it", code="conflict")
        elif value:
            zero[new] = {"device": "cpu"}
            findings.moved(path, ("zero_optimization", new))
            findings.warning(path, "deprecated", f'write "{new}": {{"device": "cpu"}}', code="deprecated")
            findings.fixes.append(Fix(path, ("zero_optimization", new), {"device": "cpu"}, replace=True))
        else:
            findings.warning(path, "deprecated, and false is the default", "remove it", code="deprecated")
            findings.fixes.append(Fix(path, path, remove=True))
    if "cpu_offload_use_pin_memory" in zero:
        path = ("zero_optimization", "cpu_offload_use_pin_memory")
        pinned = zero.pop("cpu_offload_use_pin_memory")
        if pinned is not None and not isinstance(pinned, bool) and pinned != "auto":
            message = f"deprecated, and {show(pinned)} is not true or false"
            findings.error(path, message, "remove it", code="type", at_value=True)
            return
        remedy = 'write "pin_memory" under "offload_optimizer" or "offload_param"'
        findings.warning(path, "deprecated, and DeepSpeed ignores it", remedy, code="deprecated")
        findings.fixes.append(Fix(path, path, remove=True))
