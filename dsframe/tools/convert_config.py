"""``dsframe convert``: a file of Accelerate's, arguments of Hugging Face's Trainer or Lightning's as a dsframe file.

What has a counterpart is written, what has none is listed with what to do. Nothing is imported or run: of a Python file the
call is read, and only what stands there as a value is known.

Sources: accelerate 1.15 (``utils/dataclasses.py``, ``commands/config``), transformers 5.23 (``training_args.py``), lightning 2.6
(``fabric/strategies/deepspeed.py``).
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

_CALLS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DeepSpeedStrategy", "Trainer")
TASK = "my_module:MyTask"
"""What the file has in the place of the user's own task."""
_STAYS = "the program's own: it stays in your code"
_MACHINE = "where it runs is told to the launcher"
_NEEDLESS = "dsframe does so by itself, or has nothing like it to switch"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Conversion:
    """A file that grows, and what was said of each key."""

    def __init__(self, document: dict[str, Any] | None = None) -> None:
        """``document``: a ds_config to begin with."""
        self.document: dict[str, Any] = document or {}
        self.taken: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self.processes: int | None = None

    def put(self, key: str, path: str, value: Any) -> None:
        """Writes ``value`` at the dotted ``path``. A ds_config's own value stays, unless it is "auto"."""
        *above, last = path.split(".")
        section = self.document
        for name in above:
            section = section.setdefault(name, {})
        if section.get(last, "auto") == "auto" or section[last] == value:
            section[last] = value
            self.taken.append((key, f"{path} = {json.dumps(value)}"))
        else:
            self.leave(
                key, f"the ds_config has {path} = {json.dumps(section[last])}, which stays; it said {json.dumps(value)}"
            )

    def leave(self, key: str, why: str) -> None:
        """Says why a key is not in the file."""
        self.left.append((key, why))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command(
        "convert",
        "Write a dsframe file from an Accelerate YAML, TrainingArguments (JSON, YAML, or a Python file or notebook "
        "with the call), or a Python file with Lightning's Trainer or DeepSpeedStrategy.",
    )
    add = parser.add_argument
    add("file", type=Path)
    add("--out", type=Path, help="file to write (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the file, or writes it, and says on standard error what became of each key; returns 0.

    Raises ConfigError for a file that cannot be read, or that is none of these.
    """
    options = parser().parse_args(argv)
    found = convert(options.file)
    found.document.setdefault("dsframe", {}).setdefault("task", {"name": TASK})
    text = json.dumps(found.document, indent=2) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        if options.out.exists():
            raise _wrong(options.out, "exists already", "choose another name")
        options.out.write_text(text)
    for key, where in found.taken:
        print(f"  {key}: {where}", file=sys.stderr)
    for key, why in found.left:
        print(f"  {key}: not taken; {why}", file=sys.stderr)
    name = options.out or "FILE"
    processes = f" -np {found.processes}" if found.processes else ""
    print(f"Next: write your task in the place of {TASK} (docs/tasks.md), then dsframe check {name}", file=sys.stderr)
    print(f"To start it: dsframe launch{processes} --config {name}", file=sys.stderr)
    return 0


def convert(path: Path) -> Conversion:
    """Reads a file of any of the kinds. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}", "give a text file") from None
    if path.suffix in (".py", ".ipynb"):
        return _from_call(path, text if path.suffix == ".py" else _code(path, text))
    given = _mapping(path, text)
    if "distributed_type" in given or "compute_environment" in given:
        return _accelerate(path, given)
    if any(key in given for key in ("per_device_train_batch_size", "learning_rate", "output_dir", "num_train_epochs")):
        return _trainer(path, given, set())
    raise _wrong(
        path,
        "is neither an Accelerate configuration (distributed_type) nor TrainingArguments (output_dir, learning_rate)",
        "give one of these; a ds_config needs no conversion",
    )


def _mapping(path: Path, text: str) -> dict[str, Any]:
    try:
        if path.suffix in (".yaml", ".yml"):
            try:
                import yaml  # type: ignore[import-untyped]
            except ImportError:
                raise _wrong(path, "needs PyYAML, which is not installed", "pip install pyyaml") from None
            try:
                given = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
        else:
            given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"cannot be read: {error}", "mend the file") from None
    if not isinstance(given, dict):
        raise _wrong(path, f"holds {type(given).__name__} where keys and values are expected", "give another file")
    return {str(key): value for key, value in given.items()}


def _code(path: Path, text: str) -> str:
    """The code of a notebook, without what is no Python."""
    cells = _mapping(path, text).get("cells", [])
    lines = [line for cell in cells if cell.get("cell_type") == "code" for line in "".join(cell["source"]).splitlines()]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%", "?")))


def _from_call(path: Path, text: str) -> Conversion:
    try:
        calls = [
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and _name(node.func) in _CALLS
        ]
    except SyntaxError as error:
        raise _wrong(path, f"is not Python: {error}", "mend the file") from None
    of_trainer = [call for call in calls if _name(call.func) not in ("Trainer", "DeepSpeedStrategy")]
    of_lightning = [call for call in calls if _name(call.func) in ("Trainer", "DeepSpeedStrategy")]
    chosen = of_trainer[:1] or of_lightning
    if not chosen:
        raise _wrong(path, f"has no call of {', '.join(_CALLS)}", "give the file that has it")
    given: dict[str, Any] = {}
    unknown: set[str] = set()
    for call in chosen:
        names = ["output_dir"] if of_trainer else []
        arguments = [*zip(names, call.args, strict=False), *((word.arg or "**", word.value) for word in call.keywords)]
        for name, node in arguments:
            try:
                given[name] = ast.literal_eval(node)
            except (ValueError, TypeError):
                unknown.add(name)
    if of_trainer:
        return _trainer(path, given, unknown)
    return _lightning(path, given, unknown)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ds_config(path: Path, named: Any) -> dict[str, Any]:
    """A ds_config that a file names, or holds."""
    if isinstance(named, dict):
        return dict(named)
    for place in (path.parent / str(named), Path(str(named))):
        if place.is_file():
            return _mapping(place, place.read_text(encoding="utf-8"))
    raise _wrong(path, f"names the ds_config {named}, which is not there", "give its path from here, or from that file")


def _wrong(path: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("error", "", message, remedy, str(path), code="convert")])


# Accelerate.

_ACCELERATE = {
    **dict.fromkeys(
        _names(
            "compute_environment machine_rank main_process_ip main_process_port rdzv_backend "
            "same_network gpu_ids num_machines mpirun_config enable_cpu_affinity deepspeed_hostfile "
            "deepspeed_inclusion_filter deepspeed_exclusion_filter deepspeed_multinode_launcher "
            "use_cpu"
        ),
        _MACHINE,
    ),
    **dict.fromkeys(("main_training_function", "debug", "deepspeed_moe_layer_cls_names"), _STAYS),
    **dict.fromkeys(
        _names(
            "downcast_bf16 zero3_init_flag zero3_save_16bit_model fsdp_use_orig_params "
            "fsdp_sync_module_states fsdp_cpu_ram_efficient_loading fsdp_state_dict_type "
            "fsdp_backward_prefetch fsdp_forward_prefetch fsdp_version fsdp_auto_wrap_policy "
            "fsdp_min_num_params tpu_env tpu_use_cluster tpu_use_sudo"
        ),
        _NEEDLESS,
    ),
}
_ENGINES = {
    "DEEPSPEED": "deepspeed",
    "FSDP": "fsdp",
    "NO": "single",
    **dict.fromkeys(("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"), "ddp"),
}


def _accelerate(path: Path, given: dict[str, Any]) -> Conversion:
    sections = ("deepspeed_config", "fsdp_config", "dynamo_config")
    inner = {key: given.pop(key) or {} for key in sections if key in given}
    kind = str(given.pop("distributed_type", "NO"))
    deepspeed = inner.get("deepspeed_config", {}) if kind == "DEEPSPEED" else {}
    named = deepspeed.pop("deepspeed_config_file", None)
    found = Conversion(_ds_config(path, named) if named else None)
    if kind in _ENGINES:
        found.put("distributed_type", "dsframe.engine", _ENGINES[kind])
    else:
        found.leave("distributed_type", f"{kind} has no engine here; choose one (docs/engines.md)")
    found.processes = given["num_processes"] if isinstance(given.get("num_processes"), int) else None
    given.pop("num_processes", None)
    _number_format(found, "mixed_precision", str(given.pop("mixed_precision", "no")))
    if kind == "FSDP":
        _each(found, inner.get("fsdp_config", {}), _FSDP, _ACCELERATE)
    _each(found, deepspeed, _ZERO, _ACCELERATE)
    if any(value not in ("NO", "no") for value in inner.get("dynamo_config", {}).values() if isinstance(value, str)):
        found.put("dynamo_config", "dsframe.model.compile", True)
    _each(found, given, {}, _ACCELERATE)
    found.document.setdefault("train_micro_batch_size_per_gpu", 1)
    found.leave("the batch size", "it is in your code: write train_micro_batch_size_per_gpu, which is 1 now")
    if "optimizer" not in found.document:
        found.leave("the optimizer and its schedule", "they are in your code: write optimizer and scheduler")
    return found


def _number_format(found: Conversion, key: str, value: str) -> None:
    if value in ("bf16", "fp16"):
        where = "torch_autocast" if found.document.get("dsframe", {}).get("engine") != "deepspeed" else value
        if where == value:
            found.put(key, f"{value}.enabled", True)
        else:
            found.put(key, "torch_autocast.enabled", True)
            found.put(key, "torch_autocast.dtype", "bfloat16" if value == "bf16" else "float16")
    elif value not in ("no", "None", "32", "32-true"):
        found.leave(key, f"{value} has no counterpart")


Put = Callable[[Conversion, str, Any], None]
"""Writes the value of a key into the file."""
Puts = Mapping[str, Put]


def _offload(name: str) -> Put:
    def put(found: Conversion, key: str, value: Any) -> None:
        if value not in (None, "none", False):
            found.put(key, f"zero_optimization.{name}.device", "cpu" if value is True else value)

    return put


def _path(path: str) -> Put:
    def put(found: Conversion, key: str, value: Any) -> None:
        if value not in (None, "none", "None"):
            found.put(key, path, value)

    return put


def _paths(section: str, names: str) -> Puts:
    """Keys that have the same names in a section of the file."""
    return {name: _path(f"{section}.{name}") for name in _names(names)}


def _sharding(found: Conversion, key: str, value: Any) -> None:
    kinds = {"FULL_SHARD": "full", "1": "full", "HYBRID_SHARD": "hybrid", "4": "hybrid"}
    if str(value) in kinds:
        found.put(key, "dsframe.fsdp.sharding", kinds[str(value)])
    else:
        found.leave(
            key,
            f"{value} has no counterpart; for SHARD_GRAD_OP write reshard_after_forward false, for NO_SHARD engine ddp",
        )


def _wrap(found: Conversion, key: str, value: Any) -> None:
    classes = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value or [])
    found.put(key, "dsframe.fsdp.wrap", classes)


def _true(path: str, value: Any) -> Put:
    def put(found: Conversion, key: str, given: Any) -> None:
        if given:
            found.put(key, path, value)

    return put


_ZERO: Puts = {
    "zero_stage": _path("zero_optimization.stage"),
    "gradient_accumulation_steps": _path("gradient_accumulation_steps"),
    "gradient_clipping": _path("gradient_clipping"),
    "offload_optimizer_device": _offload("offload_optimizer"),
    "offload_param_device": _offload("offload_param"),
    "offload_optimizer_nvme_path": _path("zero_optimization.offload_optimizer.nvme_path"),
    "offload_param_nvme_path": _path("zero_optimization.offload_param.nvme_path"),
}
_FSDP: Puts = {
    "fsdp_sharding_strategy": _sharding,
    "fsdp_transformer_layer_cls_to_wrap": _wrap,
    "fsdp_offload_params": _true("dsframe.fsdp.offload", "cpu"),
    "fsdp_reshard_after_forward": lambda found, key, value: (
        _sharding(found, key, value)
        if isinstance(value, str)
        else found.put(key, "dsframe.fsdp.reshard_after_forward", bool(value))
    ),
    "fsdp_activation_checkpointing": _true("dsframe.model.activation_checkpointing", True),
}


def _each(found: Conversion, given: Mapping[str, Any], puts: Puts, known: Mapping[str, str]) -> None:
    for key, value in given.items():
        if key in puts:
            puts[key](found, key, value)
        elif value not in (None, False, "no", "NO", [], {}):
            found.leave(key, known.get(key, "no counterpart is known"))


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
_RENAMED = {"evaluation_strategy": "eval_strategy", "per_gpu_train_batch_size": "per_device_train_batch_size"}
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
_OWN = _names(
    "remove_unused_columns label_names group_by_length length_column_name "
    "predict_with_generate run_name dataloader_num_workers dataloader_pin_memory "
    "dataloader_prefetch_factor prediction_loss_only dataset_text_field max_seq_length "
    "max_length packing include_inputs_for_metrics generation_max_length generation_num_beams "
    "label_smoothing_factor data_seed batch_eval_metrics dataset_kwargs assistant_only_loss "
    "completion_only_loss"
)
_NOTHING = _names(
    "overwrite_output_dir logging_dir logging_first_step do_train do_eval do_predict "
    "disable_tqdm no_cuda gradient_checkpointing_kwargs ddp_find_unused_parameters "
    "save_safetensors log_level logging_strategy use_cpu load_best_model_at_end ddp_timeout "
    "save_only_model greater_is_better local_rank half_precision_backend fp16_full_eval "
    "bf16_full_eval eval_delay log_level_replica skip_memory_metrics auto_find_batch_size"
)
_KNOWN = {
    **dict.fromkeys(_OWN, _STAYS),
    **dict.fromkeys(_NOTHING, _NEEDLESS),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_token", "hub_strategy"), "nothing is uploaded; dsframe export, then push"
    ),
    "neftune_noise_alpha": "no counterpart",
    "torch_compile_backend": "torch's default backend is taken",
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), "AdamW"),
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adafactor": "Adafactor",
}
_SCHEDULES = {"linear", "cosine", "constant", "constant_with_warmup", "polynomial", "cosine_with_restarts"}


def _trainer(path: Path, given: dict[str, Any], unknown: set[str]) -> Conversion:
    given = {_RENAMED.get(key, key): value for key, value in given.items()}
    base = given.pop("deepspeed", None)
    found = Conversion(_ds_config(path, base) if base else None)
    unknown = {_RENAMED.get(key, key) for key in unknown}
    for name in sorted(unknown):
        default = f"; the Trainer's default {json.dumps(_DEFAULTS[name])} is in the file" if name in _DEFAULTS else ""
        found.leave(name, f"its value is not written in the call{default}; write it")
    wanted = {**_DEFAULTS, **given}
    if "deepspeed" not in unknown and not given.get("fsdp"):
        found.put("deepspeed" if base else "no deepspeed, no fsdp", "dsframe.engine", "deepspeed" if base else "ddp")
    elif given.get("fsdp"):
        found.put("fsdp", "dsframe.engine", "fsdp")
    for key, target in _DIRECT.items():
        if wanted.get(key) is not None:
            found.put(key, target, wanted.pop(key))
    _length(found, wanted)
    _optimizer(found, wanted)
    _schedule(found, wanted)
    _watching(found, wanted)
    short = [kind for kind in ("bf16", "fp16") if wanted.pop(kind, False)]
    _number_format(found, "bf16 or fp16", short[0] if short else "no")
    wanted.pop("fsdp", None)
    if given.get("weight_decay") and "no_decay" not in found.document.get("dsframe", {}):
        found.put("weight_decay", "dsframe.no_decay", "norms-and-biases")
    greater = wanted.get("greater_is_better")
    puts = {
        "gradient_checkpointing": _true("dsframe.model.activation_checkpointing", True),
        "torch_compile": _true("dsframe.model.compile", True),
        "metric_for_best_model": lambda found, key, value: _best(found, key, value, greater),
    }
    _each(found, wanted, puts, _KNOWN)
    return found


def _length(found: Conversion, wanted: dict[str, Any]) -> None:
    steps, epochs = wanted.pop("max_steps"), wanted.pop("num_train_epochs")
    if isinstance(steps, int) and steps > 0:
        found.put("max_steps", "dsframe.steps", steps)
    elif float(epochs).is_integer() and epochs > 0:
        found.put("num_train_epochs", "dsframe.epochs", int(epochs))
    else:
        found.leave("num_train_epochs", f"{epochs} is no whole number of epochs; write dsframe.steps")


def _optimizer(found: Conversion, wanted: dict[str, Any]) -> None:
    kind = str(wanted.pop("optim"))
    betas = [wanted.pop("adam_beta1"), wanted.pop("adam_beta2")]
    if kind not in _OPTIMIZERS:
        found.leave("optim", f"{kind} has no counterpart, AdamW is in the file; for one of your own write module:Class")
    found.put("optim", "optimizer.type", _OPTIMIZERS.get(kind, "AdamW"))
    if found.document["optimizer"]["type"] == "AdamW":
        found.put("adam_beta1, adam_beta2", "optimizer.params.betas", betas)
    else:
        found.document["optimizer"]["params"].pop("eps", None)


def _schedule(found: Conversion, wanted: dict[str, Any]) -> None:
    kind, more = str(wanted.pop("lr_scheduler_type")), wanted.pop("lr_scheduler_kwargs", None) or {}
    warmup, ratio = wanted.pop("warmup_steps", 0), wanted.pop("warmup_ratio", None)
    if "scheduler" in found.document:
        found.leave("lr_scheduler_type", "the ds_config has a scheduler, which stays")
        return
    if kind not in _SCHEDULES:
        found.leave("lr_scheduler_type", f"{kind} has no counterpart; write scheduler, or Task.schedule")
        return
    if isinstance(warmup, float) and 0 < warmup < 1:  # of transformers 5
        warmup, ratio = 0, warmup
    params: dict[str, Any] = {} if kind == "constant" else {"num_warmup_steps": int(warmup)}
    if ratio and not warmup and kind != "constant":
        settings = found.document["dsframe"]
        steps, epochs = settings.get("steps"), settings.get("epochs")
        params["num_warmup_steps"] = -int(-ratio * steps // 1) if steps else {"epochs": ratio * (epochs or 1)}
    if kind not in ("constant", "constant_with_warmup"):
        params["num_training_steps"] = "auto"
    found.put("lr_scheduler_type, warmup", "scheduler", {"type": kind, "params": {**params, **more}})


def _watching(found: Conversion, wanted: dict[str, Any]) -> None:
    steps = wanted.pop("logging_steps")
    if isinstance(steps, int) and steps > 0:
        found.put("logging_steps", "dsframe.log_every_steps", steps)
    else:
        found.leave("logging_steps", f"{steps}: write dsframe.log_every_steps")
    evaluates, every = str(wanted.pop("eval_strategy")), wanted.pop("eval_steps", None)
    if evaluates == "epoch":
        found.put("eval_strategy", "dsframe.eval_every_steps", {"epochs": 1})
    elif evaluates == "steps":
        found.put("eval_steps", "dsframe.eval_every_steps", every or steps)
    saves, every = str(wanted.pop("save_strategy")), wanted.pop("save_steps")
    if saves == "epoch":
        found.put("save_strategy", "dsframe.checkpoints.every_steps", {"epochs": 1})
    elif saves == "steps" and isinstance(every, int):
        found.put("save_steps", "dsframe.checkpoints.every_steps", every)
    elif saves not in ("no", "steps"):
        found.leave("save_strategy", f'{saves}: write dsframe.checkpoints.keep_best, such as "loss:min"')
    services = wanted.pop("report_to", None) or []
    for name in [services] if isinstance(services, str) else services:
        if name in ("tensorboard", "wandb"):
            found.put("report_to", f"{name}.enabled", True)
        elif name == "mlflow":
            found.put("report_to", "dsframe.mlflow.enabled", True)
        elif name != "none":
            found.leave("report_to", f"{name} has no counterpart; tensorboard, wandb, comet, mlflow and csv have")


def _best(found: Conversion, key: str, value: Any, greater: Any) -> None:
    name = str(value).removeprefix("eval_")
    better = "max" if greater or (greater is None and not name.endswith("loss")) else "min"
    found.put(key, "dsframe.checkpoints.keep_best", f"{name}:{better}")


# Lightning.

_PRECISION = {
    **dict.fromkeys(("bf16-mixed", "bf16-true", "bf16"), "bf16"),
    **dict.fromkeys(("16-mixed", "16-true", "16"), "fp16"),
}
_LIGHTNING: Puts = {
    "accumulate_grad_batches": _path("gradient_accumulation_steps"),
    "gradient_clip_val": _path("gradient_clipping"),
    "max_epochs": _path("dsframe.epochs"),
    "max_steps": lambda found, key, value: found.put(key, "dsframe.steps", value) if value > 0 else None,
    "log_every_n_steps": _path("dsframe.log_every_steps"),
    "check_val_every_n_epoch": lambda found, key, value: found.put(key, "dsframe.eval_every_steps", {"epochs": value}),
    "default_root_dir": _path("dsframe.run_dir"),
    "deterministic": _true("dsframe.deterministic", True),
    "sync_batchnorm": _true("dsframe.model.sync_batch_norm", True),
    "stage": _path("zero_optimization.stage"),
    "offload_optimizer": _offload("offload_optimizer"),
    "offload_parameters": _offload("offload_param"),
    "nvme_path": _path("zero_optimization.offload_optimizer.nvme_path"),
    "pin_memory": _path("zero_optimization.offload_optimizer.pin_memory"),
    **_paths(
        "zero_optimization",
        "contiguous_gradients overlap_comm allgather_partitions reduce_scatter allgather_bucket_size reduce_bucket_size "
        "sub_group_size",
    ),
    "zero_allow_untested_optimizer": _path("zero_allow_untested_optimizer"),
    **_paths("fp16", "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    **_paths("activation_checkpointing", "partition_activations cpu_checkpointing contiguous_memory_optimization"),
}
_LIGHTNINGS_OWN = {
    **dict.fromkeys(("accelerator", "devices", "num_nodes"), _MACHINE),
    **dict.fromkeys(_names("callbacks logger plugins profiler limit_train_batches limit_val_batches"), _STAYS),
    **dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "benchmark", "use_distributed_sampler"), _NEEDLESS),
}


def _lightning(path: Path, given: dict[str, Any], unknown: set[str]) -> Conversion:
    config = given.pop("config", None)
    found = Conversion(_ds_config(path, config) if config else None)
    strategy = str(given.pop("strategy", "") or "")
    sharded = {"offload_optimizer", "stage", "zero_optimization"} & given.keys() or config
    engine = "fsdp" if strategy.startswith("fsdp") else "ddp"
    found.put("strategy", "dsframe.engine", "deepspeed" if sharded or strategy.startswith("deepspeed") else engine)
    for stage in (1, 2, 3):
        if strategy.startswith(f"deepspeed_stage_{stage}"):
            found.put("strategy", "zero_optimization.stage", stage)
            if "offload" in strategy:
                found.put("strategy", "zero_optimization.offload_optimizer.device", "cpu")
    precision = str(given.pop("precision", "no"))
    _number_format(found, "precision", _PRECISION.get(precision, precision))
    if isinstance(given.get("devices"), int) and isinstance(given.get("num_nodes", 1), int) and given["devices"] > 0:
        found.processes = given["devices"] * given.get("num_nodes", 1)
    for name in sorted(unknown - {"strategy", "callbacks", "logger"}):
        found.leave(name, "its value is not written in the call; write it")
    _each(found, given, _LIGHTNING, _LIGHTNINGS_OWN)
    found.document.setdefault("train_micro_batch_size_per_gpu", 1)
    found.leave("the batch size", "it is in your code: write train_micro_batch_size_per_gpu, which is 1 now")
    message = "they are in your code (configure_optimizers): write optimizer and scheduler"
    found.leave("the optimizer and its schedule", message)
    return found
