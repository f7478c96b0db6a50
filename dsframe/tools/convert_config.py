"""``dsframe convert``: settings of Accelerate, the Hugging Face Trainer or Lightning as a dsframe file.

What has a counterpart is written, what has none is listed with what to do. Nothing is imported or
run: of a Python file the call is read, and only what stands there as a value is known.

Sources: accelerate 1.15 (``utils/dataclasses.py``, ``commands/config``), transformers 5.23
(``training_args.py``), lightning 2.6 (``fabric/strategies/deepspeed.py``).
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsframe.errors import ConfigError, Problem
from dsframe.tools.commands import command

TASK = "my_module:MyTask"
"""What the file has in the place of the user's own task."""
_TRAINER_CALLS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
_LIGHTNING_CALLS = ("Trainer", "DeepSpeedStrategy")


class Conversion:
    """A file that grows, and what became of each key."""

    def __init__(self, path: Path, ds_config: Any = None) -> None:
        """``ds_config``: a file next to ``path``, or its content, to begin with."""
        self.document: dict[str, Any] = _ds_config(path, ds_config) if ds_config else {}
        self.taken: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self.processes: int | None = None

    def put(self, key: str, path: str, value: Any) -> None:
        """Writes ``value`` at the dotted ``path``. A ds_config's own value stays, unless "auto"."""
        *above, last = path.split(".")
        section = self.document
        for name in above:
            section = section.setdefault(name, {})
        if section.get(last, "auto") in ("auto", value):
            section[last] = value
            self.taken.append((key, f"{path} = {json.dumps(value)}"))
        else:
            stays = f"the ds_config has {path} = {json.dumps(section[last])}, which stays"
            self.leave(key, f"{stays}; it said {json.dumps(value)}")

    def leave(self, key: str, why: str) -> None:
        """Says why a key is not in the file."""
        self.left.append((key, why))

    def put_all(self, given: Mapping[str, Any], rules: Rules, reasons: Mapping[str, str]) -> None:
        """Writes each key by its rule, or says for what reason it is left."""
        for key, value in given.items():
            rule = rules.get(key)
            if value in _NOTHING_SET:
                continue
            if rule is None:
                self.leave(key, next((why for why, keys in reasons.items() if key in keys.split()), _UNKNOWN))
            elif isinstance(rule, str):
                self.put(key, rule, value)
            elif isinstance(rule, tuple):
                self.put(key, *rule)
            else:
                rule(self, key, value)

    def put_precision(self, key: str, value: str) -> None:
        """A number format, by its name in any of the libraries."""
        name = value.removesuffix("-mixed").removesuffix("-true")
        short = {"bf16": "bf16", "fp16": "fp16", "16": "fp16"}.get(name)
        if short is None:
            if name not in ("no", "None", "32"):
                self.leave(key, f"{value} has no counterpart")
        elif self.document.get("dsframe", {}).get("engine") == "deepspeed":
            self.put(key, f"{short}.enabled", True)
        else:
            self.put(key, "torch_autocast.enabled", True)
            self.put(key, "torch_autocast.dtype", "bfloat16" if short == "bf16" else "float16")

    def leave_to_code(self, *, optimizer: bool) -> None:
        """What Accelerate and Lightning leave to the program."""
        self.document.setdefault("train_micro_batch_size_per_gpu", 1)
        self.leave("the batch size", "it is in your code: write train_micro_batch_size_per_gpu, 1 now")
        if optimizer:
            self.leave("the optimizer and its schedule", "they are in your code: write optimizer, scheduler")


Rules = Mapping[str, "str | tuple[str, Any] | Callable[[Conversion, str, Any], None]"]
"""Key -> where its value goes; where another value goes; or what writes it."""
_NOTHING_SET: tuple[Any, ...] = (None, False, "no", "NO", "none", "None", [], {})
_UNKNOWN = "no counterpart is known"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command(
        "convert",
        "Write a dsframe file from an Accelerate YAML, TrainingArguments (JSON, YAML, or a Python file or notebook "
        "with the call), or a Python file with Lightning's Trainer or DeepSpeedStrategy.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the file, or writes it, and says on standard error what became of each key; returns 0.

    Raises ConfigError for a file that cannot be read, or that is none of these.
    """
    options = parser().parse_args(argv)
    converted = convert(options.file)
    converted.document.setdefault("dsframe", {}).setdefault("task", {"name": TASK})
    text = json.dumps(converted.document, indent=2) + "\n"
    if options.out is None:
        print(text, end="")
    elif options.out.exists():
        raise _wrong(options.out, "exists already", "choose another name")
    else:
        options.out.write_text(text)
    lines = [f"  {key}: {where}" for key, where in converted.taken]
    lines += [f"  {key}: not taken; {why}" for key, why in converted.left]
    name = options.out or "FILE"
    processes = f" -np {converted.processes}" if converted.processes else ""
    lines.append(f"Next: write your task in the place of {TASK} (docs/tasks.md), then dsframe check {name}")
    lines.append(f"To start it: dsframe launch{processes} --config {name}")
    print(*lines, sep="\n", file=sys.stderr)
    return 0


def convert(path: Path) -> Conversion:
    """Reads a file of any of the kinds. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}", "give a text file") from None
    if path.suffix == ".py":
        return _from_call(path, text)
    if path.suffix == ".ipynb":
        return _from_call(path, _notebook_code(path, text))
    given = _mapping(path, text)
    if "distributed_type" in given or "compute_environment" in given:
        return _accelerate(path, given)
    if {"per_device_train_batch_size", "learning_rate", "output_dir", "num_train_epochs"} & given.keys():
        return _trainer(path, given, set())
    message = "is neither an Accelerate configuration (distributed_type) nor TrainingArguments (output_dir)"
    raise _wrong(path, message, "give one of these; a ds_config needs no conversion")


def _mapping(path: Path, text: str) -> dict[str, Any]:
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]

            try:
                given = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
        else:
            given = json.loads(text)
    except ImportError:
        raise _wrong(path, "needs PyYAML, which is not installed", "pip install pyyaml") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"cannot be read: {error}", "correct the file") from None
    if not isinstance(given, dict):
        message = f"holds {type(given).__name__} where keys and values are expected"
        raise _wrong(path, message, "give another file")
    return {str(key): value for key, value in given.items()}


def _notebook_code(path: Path, text: str) -> str:
    """The Python of a notebook."""
    cells = _mapping(path, text).get("cells", [])
    code = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    lines = "\n".join(code).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%", "?")))


def _from_call(path: Path, text: str) -> Conversion:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _wrong(path, f"is not Python: {error}", "correct the file") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of_trainer = [call for call in calls if _name(call.func) in _TRAINER_CALLS][:1]
    of_lightning = [call for call in calls if _name(call.func) in _LIGHTNING_CALLS]
    if not of_trainer and not of_lightning:
        names = ", ".join((*_TRAINER_CALLS, *_LIGHTNING_CALLS))
        raise _wrong(path, f"has no call of {names}", "give the file that has it")
    given: dict[str, Any] = {}
    unknown: set[str] = set()
    for call in of_trainer or of_lightning:
        positional = zip(["output_dir"] if of_trainer else [], call.args, strict=False)
        for name, node in [*positional, *((word.arg or "**", word.value) for word in call.keywords)]:
            try:
                given[name] = ast.literal_eval(node)
            except (ValueError, TypeError):
                unknown.add(name)
    return (_trainer if of_trainer else _lightning)(path, given, unknown)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ds_config(path: Path, named: Any) -> dict[str, Any]:
    """A ds_config that a file names, or holds."""
    if isinstance(named, dict):
        return dict(named)
    for candidate in (path.parent / str(named), Path(str(named))):
        if candidate.is_file():
            return _mapping(candidate, candidate.read_text(encoding="utf-8"))
    raise _wrong(
        path, f"names the ds_config {named}, which does not exist", "give its path from here, or from that file"
    )


def _wrong(path: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("error", "", message, remedy, str(path), code="convert")])


_REASONS = {
    "where it runs is told to the launcher": """
compute_environment machine_rank main_process_ip main_process_port rdzv_backend same_network gpu_ids
num_machines mpirun_config enable_cpu_affinity deepspeed_hostfile deepspeed_inclusion_filter
deepspeed_exclusion_filter deepspeed_multinode_launcher use_cpu accelerator devices num_nodes""",
    "the program's own: it stays in your code": """
main_training_function debug deepspeed_moe_layer_cls_names remove_unused_columns label_names
group_by_length length_column_name predict_with_generate run_name dataloader_num_workers
dataloader_pin_memory dataloader_prefetch_factor prediction_loss_only dataset_text_field
max_seq_length max_length packing include_inputs_for_metrics generation_max_length
generation_num_beams label_smoothing_factor data_seed batch_eval_metrics dataset_kwargs
assistant_only_loss completion_only_loss callbacks logger plugins profiler limit_train_batches
limit_val_batches""",
    "dsframe does so by itself, or has nothing like it to switch": """
downcast_bf16 zero3_init_flag zero3_save_16bit_model fsdp_use_orig_params fsdp_sync_module_states
fsdp_cpu_ram_efficient_loading fsdp_state_dict_type fsdp_backward_prefetch fsdp_forward_prefetch
fsdp_version fsdp_auto_wrap_policy fsdp_min_num_params tpu_env tpu_use_cluster tpu_use_sudo
overwrite_output_dir logging_dir logging_first_step do_train do_eval do_predict disable_tqdm no_cuda
gradient_checkpointing_kwargs ddp_find_unused_parameters save_safetensors log_level logging_strategy
load_best_model_at_end ddp_timeout save_only_model greater_is_better local_rank
half_precision_backend fp16_full_eval bf16_full_eval eval_delay log_level_replica
skip_memory_metrics auto_find_batch_size enable_progress_bar enable_checkpointing benchmark
use_distributed_sampler""",
    "nothing is uploaded; dsframe export, then push": "push_to_hub hub_model_id hub_token hub_strategy",
    "torch's default backend is taken": "torch_compile_backend",
}
"""Why keys are left."""


# Accelerate.


def _offload(name: str) -> Callable[[Conversion, str, Any], None]:
    def put(conversion: Conversion, key: str, value: Any) -> None:
        device = "cpu" if value is True else value
        conversion.put(key, f"zero_optimization.{name}.device", device)

    return put


def _sharding(conversion: Conversion, key: str, value: Any) -> None:
    names = {"FULL_SHARD": "full", "1": "full", "HYBRID_SHARD": "hybrid", "4": "hybrid"}
    if str(value) in names:
        conversion.put(key, "dsframe.fsdp.sharding", names[str(value)])
    elif isinstance(value, bool):
        conversion.put(key, "dsframe.fsdp.reshard_after_forward", value)
    else:
        remedy = "for SHARD_GRAD_OP write reshard_after_forward false, for NO_SHARD engine ddp"
        conversion.leave(key, f"{value} has no counterpart; {remedy}")


def _wrap(conversion: Conversion, key: str, value: Any) -> None:
    classes = value.split(",") if isinstance(value, str) else value
    conversion.put(key, "dsframe.fsdp.wrap", [name.strip() for name in classes])


_ENGINES = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "NO": "single"}
_ENGINES |= dict.fromkeys(("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"), "ddp")
_ZERO: Rules = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": _offload("offload_optimizer"),
    "offload_param_device": _offload("offload_param"),
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
_FSDP: Rules = {
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _sharding,
    "fsdp_transformer_layer_cls_to_wrap": _wrap,
    "fsdp_offload_params": ("dsframe.fsdp.offload", "cpu"),
    "fsdp_activation_checkpointing": ("dsframe.model.activation_checkpointing", True),
}


def _accelerate(path: Path, given: dict[str, Any]) -> Conversion:
    sections = ("deepspeed_config", "fsdp_config", "dynamo_config")
    zero, fsdp, dynamo = (dict(given.pop(name, None) or {}) for name in sections)
    distributed = str(given.pop("distributed_type", "NO"))
    zero = zero if distributed == "DEEPSPEED" else {}
    conversion = Conversion(path, zero.pop("deepspeed_config_file", None))
    if distributed in _ENGINES:
        conversion.put("distributed_type", "dsframe.engine", _ENGINES[distributed])
    else:
        conversion.leave("distributed_type", f"{distributed} has no engine here; choose one (docs/engines.md)")
    processes = given.pop("num_processes", None)
    conversion.processes = processes if isinstance(processes, int) else None
    conversion.put_precision("mixed_precision", str(given.pop("mixed_precision", "no")))
    if "fsdp_reshard_after_forward" in fsdp and distributed == "FSDP":  # false says something here
        _sharding(conversion, "fsdp_reshard_after_forward", fsdp.pop("fsdp_reshard_after_forward"))
    conversion.put_all(fsdp if distributed == "FSDP" else {}, _FSDP, _REASONS)
    conversion.put_all(zero, _ZERO, _REASONS)
    if any(isinstance(value, str) and value.upper() != "NO" for value in dynamo.values()):
        conversion.put("dynamo_config", "dsframe.model.compile", True)
    conversion.put_all(given, {}, _REASONS)
    conversion.leave_to_code(optimizer="optimizer" not in conversion.document)
    return conversion


# Hugging Face's Trainer.

_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "seed": 42,
    "logging_steps": 500,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
}
"""What the Trainer trains with where the call says nothing, and dsframe would not."""
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
}
_DIRECT = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "per_device_eval_batch_size": "dsframe.eval_micro_batch_size",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "adam_epsilon": "optimizer.params.eps",
    "max_grad_norm": "gradient_clipping",
    "seed": "dsframe.seed",
    "output_dir": "dsframe.run_dir",
    "dataloader_drop_last": "dataloader_drop_last",
    "save_total_limit": "dsframe.checkpoints.keep_last",
    "tf32": "dsframe.tf32",
    "full_determinism": "dsframe.deterministic",
}
_SWITCHES: Rules = {
    "gradient_checkpointing": ("dsframe.model.activation_checkpointing", True),
    "torch_compile": ("dsframe.model.compile", True),
}
_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "adafactor": "Adafactor"}
_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "cosine_with_restarts")
_LOGGERS = {
    "tensorboard": "tensorboard.enabled",
    "wandb": "wandb.enabled",
    "mlflow": "dsframe.mlflow.enabled",
}


def _trainer(path: Path, given: dict[str, Any], unknown: set[str]) -> Conversion:
    given = {_RENAMED.get(key, key): value for key, value in given.items()}
    ds_config = given.pop("deepspeed", None)
    conversion = Conversion(path, ds_config)
    for name in sorted(_RENAMED.get(key, key) for key in unknown):
        default = f"; the Trainer's default {_DEFAULTS[name]} is in the file" if name in _DEFAULTS else ""
        conversion.leave(name, f"its value is not written in the call{default}; write it")
    wanted = {**_DEFAULTS, **given}
    if wanted.pop("fsdp", None):
        conversion.put("fsdp", "dsframe.engine", "fsdp")
    elif ds_config:
        conversion.put("deepspeed", "dsframe.engine", "deepspeed")
    elif "deepspeed" not in unknown:
        conversion.put("no deepspeed, no fsdp", "dsframe.engine", "ddp")
    for key, target in _DIRECT.items():
        if (value := wanted.pop(key, None)) is not None:
            conversion.put(key, target, value)
    if given.get("weight_decay") and "no_decay" not in conversion.document.get("dsframe", {}):
        conversion.put("weight_decay", "dsframe.no_decay", "norms-and-biases")
    _length(conversion, wanted)
    _optimizer(conversion, wanted)
    _schedule(conversion, wanted)
    _intervals(conversion, wanted)
    short = [name for name in ("bf16", "fp16") if wanted.pop(name, False)]
    conversion.put_precision("bf16 or fp16", short[0] if short else "no")
    if best := wanted.pop("metric_for_best_model", None):
        name, greater = str(best).removeprefix("eval_"), wanted.get("greater_is_better")
        better = "max" if greater or (greater is None and not name.endswith("loss")) else "min"
        conversion.put("metric_for_best_model", "dsframe.checkpoints.keep_best", f"{name}:{better}")
    conversion.put_all(wanted, _SWITCHES, _REASONS)
    return conversion


def _length(conversion: Conversion, wanted: dict[str, Any]) -> None:
    steps, epochs = wanted.pop("max_steps"), wanted.pop("num_train_epochs")
    if isinstance(steps, int) and steps > 0:
        conversion.put("max_steps", "dsframe.steps", steps)
    elif float(epochs).is_integer() and epochs > 0:
        conversion.put("num_train_epochs", "dsframe.epochs", int(epochs))
    else:
        conversion.leave("num_train_epochs", f"{epochs} is no whole number of epochs; write dsframe.steps")


def _optimizer(conversion: Conversion, wanted: dict[str, Any]) -> None:
    name = str(wanted.pop("optim"))
    betas = [wanted.pop("adam_beta1"), wanted.pop("adam_beta2")]
    if name not in _OPTIMIZERS and not name.startswith("adamw"):
        conversion.leave("optim", f"{name} has no counterpart, AdamW is in the file; for your own write module:Class")
    conversion.put("optim", "optimizer.type", _OPTIMIZERS.get(name, "AdamW"))
    if conversion.document["optimizer"]["type"] == "AdamW":
        conversion.put("adam_beta1, adam_beta2", "optimizer.params.betas", betas)
    else:
        conversion.document["optimizer"]["params"].pop("eps", None)


def _schedule(conversion: Conversion, wanted: dict[str, Any]) -> None:
    name, more = str(wanted.pop("lr_scheduler_type")), wanted.pop("lr_scheduler_kwargs", None) or {}
    warmup, ratio = wanted.pop("warmup_steps", 0), wanted.pop("warmup_ratio", None)
    if "scheduler" in conversion.document:
        conversion.leave("lr_scheduler_type", "the ds_config has a scheduler, which stays")
        return
    if name not in _SCHEDULES:
        conversion.leave("lr_scheduler_type", f"{name} has no counterpart; write scheduler, or Task.schedule")
        return
    if isinstance(warmup, float) and 0 < warmup < 1:  # of transformers 5
        warmup, ratio = 0, warmup
    params: dict[str, Any] = {}
    if name != "constant":
        params["num_warmup_steps"] = int(warmup)
    if ratio and not warmup and name != "constant":
        settings = conversion.document["dsframe"]
        steps, epochs = settings.get("steps"), settings.get("epochs")
        in_epochs = {"epochs": ratio * (epochs or 1)}
        params["num_warmup_steps"] = -int(-ratio * steps // 1) if steps else in_epochs
    if not name.startswith("constant"):
        params["num_training_steps"] = "auto"
    conversion.put("lr_scheduler_type, warmup", "scheduler", {"type": name, "params": {**params, **more}})


def _intervals(conversion: Conversion, wanted: dict[str, Any]) -> None:
    """How often it logs, evaluates and saves, and where to."""
    logging = wanted.pop("logging_steps")
    if isinstance(logging, int) and logging > 0:
        conversion.put("logging_steps", "dsframe.log_every_steps", logging)
    else:
        conversion.leave("logging_steps", f"{logging}: write dsframe.log_every_steps")
    for what, target in (("eval", "dsframe.eval_every_steps"), ("save", "dsframe.checkpoints.every_steps")):
        strategy, every = str(wanted.pop(f"{what}_strategy")), wanted.pop(f"{what}_steps", None) or logging
        if strategy == "epoch":
            conversion.put(f"{what}_strategy", target, {"epochs": 1})
        elif strategy == "steps" and isinstance(every, int):
            conversion.put(f"{what}_steps", target, every)
        elif strategy not in ("no", "steps"):
            remedy = 'write dsframe.checkpoints.keep_best, such as "loss:min"'
            conversion.leave(f"{what}_strategy", f"{strategy}: {remedy}")
    loggers = wanted.pop("report_to", None) or []
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name in _LOGGERS:
            conversion.put("report_to", _LOGGERS[name], True)
        elif name != "none":
            conversion.leave("report_to", f"{name} has no counterpart; tensorboard, wandb, comet, mlflow and csv have")


# Lightning.

_LIGHTNING: Rules = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "gradient_clipping",
    "max_epochs": "dsframe.epochs",
    "max_steps": "dsframe.steps",
    "log_every_n_steps": "dsframe.log_every_steps",
    "check_val_every_n_epoch": lambda conversion, key, value: conversion.put(
        key, "dsframe.eval_every_steps", {"epochs": value}
    ),
    "default_root_dir": "dsframe.run_dir",
    "deterministic": ("dsframe.deterministic", True),
    "sync_batchnorm": ("dsframe.model.sync_batch_norm", True),
    "stage": "zero_optimization.stage",
    "offload_optimizer": _offload("offload_optimizer"),
    "offload_parameters": _offload("offload_param"),
    "nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
}
_SAME_NAMES = {
    "zero_optimization": "contiguous_gradients overlap_comm allgather_partitions reduce_scatter "
    "allgather_bucket_size reduce_bucket_size sub_group_size",
    "fp16": "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization",
}
"""Section -> keys of DeepSpeedStrategy that have the same names there."""


def _lightning(path: Path, given: dict[str, Any], unknown: set[str]) -> Conversion:
    config = given.pop("config", None)
    conversion = Conversion(path, config)
    strategy = str(given.pop("strategy", "") or "")
    sharded = config or given.keys() & {"offload_optimizer", "stage", "zero_optimization"}
    engine = "fsdp" if strategy.startswith("fsdp") else "ddp"
    engine = "deepspeed" if sharded or strategy.startswith("deepspeed") else engine
    conversion.put("strategy", "dsframe.engine", engine)
    if strategy.startswith("deepspeed_stage_"):
        conversion.put("strategy", "zero_optimization.stage", int(strategy.split("_")[2]))
        if "offload" in strategy:
            conversion.put("strategy", "zero_optimization.offload_optimizer.device", "cpu")
    conversion.put_precision("precision", str(given.pop("precision", "no")))
    devices, nodes = given.get("devices"), given.get("num_nodes", 1)
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        conversion.processes = devices * nodes
    for name in sorted(unknown - {"strategy", "callbacks", "logger"}):
        conversion.leave(name, "its value is not written in the call; write it")
    if given.get("max_steps", 0) <= 0:
        given.pop("max_steps", None)
    for section, names in _SAME_NAMES.items():
        for name in given.keys() & set(names.split()):
            conversion.put(name, f"{section}.{name}", given.pop(name))
    conversion.put_all(given, _LIGHTNING, _REASONS)
    conversion.leave_to_code(optimizer=True)
    return conversion
