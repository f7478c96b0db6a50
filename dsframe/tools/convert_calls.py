"""What ``dsframe convert`` does with the settings of the three libraries whose values have another form here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsframe.config.read import foreign
from dsframe.config.schema.parameters import (
    DEEPSPEED_OPTIMIZERS,
    HF_SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
)
from dsframe.tools.conversion import Conversion
from dsframe.tools.source_calls import Call, Unknown

_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
_ACCELERATE = ("Accelerator", "DeepSpeedPlugin", "FullyShardedDataParallelPlugin")
_LIGHTNING = ("Trainer", "Fabric", "DeepSpeedStrategy", "FSDPStrategy", "DDPStrategy")
_PER_STEP = "here the schedule goes on once for each optimizer step of all processes"
_BEST = "dsframe.checkpoints.keep_best"
_EVERY = "dsframe.checkpoints.every_steps"

DsConfig = Callable[[Any], "dict[str, Any] | None"]
"""Reads the ds_config that an argument names."""


def from_calls(calls: Sequence[Call], ds_config: DsConfig) -> Conversion | None:
    """Returns what a script's calls become; None where no library's own call is among them."""
    names = {call.name for call in calls}
    chosen = [call for call in calls if call.name in _ARGUMENTS][:1]
    library = _ACCELERATE if "Accelerator" in names else _LIGHTNING
    main = chosen or [call for call in calls if call.name in library]
    if not main:
        return None
    given = {name: value for call in main for name, value in call.arguments.items()}
    if chosen:
        conversion = trainer(given, ds_config)
    elif "Accelerator" in names:
        conversion = _accelerator(given, ds_config(given.pop("hf_ds_config", None)))
    else:
        conversion = _lightning(given, ds_config(given.pop("config", None)))
    for call in calls:
        if call not in main:
            _take_call(conversion, call)
    if not chosen:
        _leave_to_code(conversion)
    return conversion


def _take_call(conversion: Conversion, call: Call) -> None:
    """Takes what a script says beside the library's own call: callbacks, loggers, loaders, the optimizer."""
    if call.name.lower() in DEEPSPEED_OPTIMIZERS or call.name in TORCH_OPTIMIZERS:
        _optimizer_call(conversion, call)
    elif call.name in foreign.table()["schedules"] or call.name == "get_scheduler":
        _schedule_call(conversion, call)
    elif call.name in TORCH_SCHEDULERS or call.name == "ReduceLROnPlateau":
        conversion.todo(call.name, f'write it under "scheduler", with its arguments; {_PER_STEP}')
    elif call.name == "DataLoader":
        _loader_call(conversion, call)
    elif call.name in ("train", "fit"):
        for name in call.arguments.keys() & {"resume_from_checkpoint", "ckpt_path"}:
            conversion.take(f"{call.name}({name})", call.arguments[name])
    elif (known := foreign.table()["calls"].get(call.name)) is not None:
        _known_call(conversion, call, known)


def _known_call(conversion: Conversion, call: Call, special: Mapping[str, str]) -> None:
    given = dict(call.arguments)
    if logger := foreign.table()["loggers"].get(call.name):
        conversion.put(call.name, logger, True)
    elif call.name in ("EarlyStopping", "EarlyStoppingCallback"):
        _stop_call(conversion, call.name, given)
    elif call.name == "ModelCheckpoint":
        _checkpoint_call(conversion, given)
    elif call.name == "BitsAndBytesConfig" and given.pop("load_in_4bit", False):
        levels = given.pop("bnb_4bit_quant_type", "fp4")
        conversion.put(call.name, "dsframe.adapter.base_format", "fp4" if levels == "fp4" else "nf4")
    elif not given:
        conversion.note("nothing to do", call.name, "dsframe does so by itself, or has nothing like it")
    for name, value in given.items():
        conversion.take(f"{call.name}({name})", value, special)


def _stop_call(conversion: Conversion, name: str, given: dict[str, Any]) -> None:
    monitor, mode = given.pop("monitor", conversion.metric), given.pop("mode", "min")
    if isinstance(monitor, Unknown):
        conversion.todo(name, foreign.advice("early_stopping") or "")
    elif name == "EarlyStopping":
        conversion.take_metric(name, "dsframe.stop.metric", monitor, mode == "max")
        given.setdefault("patience", 3)
    else:
        conversion.take_metric(name, "dsframe.stop.metric", monitor, conversion.greater)
        given.setdefault("early_stopping_patience", 1)


def _checkpoint_call(conversion: Conversion, given: dict[str, Any]) -> None:
    """Lightning's ModelCheckpoint, which saves after each evaluation unless it is told otherwise."""
    monitor, mode = given.pop("monitor", None), given.pop("mode", "min")
    if isinstance(monitor, str):
        conversion.take_metric("ModelCheckpoint", _BEST, monitor, mode == "max")
    epochs = given.pop("every_n_epochs", 1)
    if "every_n_train_steps" not in given and isinstance(epochs, int):
        evaluates = conversion.document["dsframe"].get("eval_every_steps") if epochs == 1 else None
        conversion.put("ModelCheckpoint(every_n_epochs)", _EVERY, evaluates or {"epochs": epochs})
    if (kept := given.pop("save_top_k", None)) == -1:
        every = conversion.document["dsframe"].get("checkpoints", {}).get("every_steps")
        conversion.put(
            "ModelCheckpoint(save_top_k)", "dsframe.checkpoints.keep_every", given.get("every_n_train_steps", every)
        )
    elif kept is not None:
        stay = f"{kept}: the best one and the newest (keep_last, 2) stay"
        conversion.note("changed", "ModelCheckpoint(save_top_k)", stay)


def _optimizer_call(conversion: Conversion, call: Call) -> None:
    """The first optimizer that a script makes."""
    if "optimizer" in conversion.document:
        conversion.todo(call.name, f"the file has an optimizer already; {foreign.advice('optimizers')}")
        return
    chosen = DEEPSPEED_OPTIMIZERS.get(call.name.lower()) or TORCH_OPTIMIZERS[call.name]
    conversion.put(call.name, "optimizer.type", call.name)
    conversion.document["optimizer"]["params"] = {}
    for name, value in call.arguments.items():
        special = {name: f"optimizer.params.{name}"} if name in chosen.model_fields else None
        conversion.take(f"{call.name}({name})", list(value) if isinstance(value, tuple) else value, special)


def _schedule_call(conversion: Conversion, call: Call) -> None:
    """A schedule of transformers."""
    given = dict(call.arguments)
    kind = foreign.table()["schedules"].get(call.name) or given.pop("name", None)
    if "scheduler" in conversion.document or kind not in HF_SCHEDULERS:
        conversion.todo(call.name, foreign.advice("lr_scheduler") or "")
        return
    takes = HF_SCHEDULERS[kind].model_fields
    params: dict[str, Any] = {"num_training_steps": "auto"} if "num_training_steps" in takes else {}
    for name in [name for name in given if name in takes and name != "num_training_steps"]:
        if isinstance(given[name], Unknown):
            conversion.todo(f"{call.name}({name})", f"its value is not written in the call; write {name}")
        else:
            params[name] = given[name]
    conversion.put(call.name, "scheduler", {"type": kind, "params": params}, _PER_STEP)


def _loader_call(conversion: Conversion, call: Call) -> None:
    """A DataLoader: for training, unless what is around it says otherwise, or the training has one already."""
    given, owner = dict(call.arguments), call.owner.lower()
    has_training = "train_micro_batch_size_per_gpu" in conversion.document
    evaluates = any(word in owner for word in ("val", "eval", "test", "pred")) or (
        has_training and "train" not in owner
    )
    key = "dsframe.eval_micro_batch_size" if evaluates else "train_micro_batch_size_per_gpu"
    given.setdefault("batch_size", 1)
    if given.pop("dataset", None) is not None:
        conversion.todo("DataLoader(dataset)", foreign.advice("train_dataset") or "")
    shuffle = given.pop("shuffle", False)
    if not evaluates and shuffle is False and not given.keys() & {"sampler", "batch_sampler"}:
        conversion.put("DataLoader(shuffle)", "dsframe.order", "sequential")
    for name, value in given.items():
        conversion.take(f"DataLoader({name})", value, {"batch_size": key})


def _leave_to_code(conversion: Conversion) -> None:
    """What Accelerate and Lightning leave to the program, where it does not say it."""
    if not conversion.document.keys() & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        conversion.document["train_micro_batch_size_per_gpu"] = 1
        conversion.todo("the batch size", "it is in your code: write train_micro_batch_size_per_gpu, 1 now")
    said = {name for _, name, _ in conversion.entries} | conversion.document.get("dsframe", {}).keys()
    if not said & {"epochs", "steps", "max_epochs", "max_steps"}:
        conversion.todo("the length", "it is in your code: write dsframe.epochs or dsframe.steps; 1 epoch now")
    if "optimizer" not in conversion.document:
        conversion.todo("the optimizer and its schedule", "they are in your code: write optimizer, scheduler")


# Accelerate, and what Lightning has alike.

_ENGINES = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "NO": "single"}
_ENGINES |= dict.fromkeys(("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"), "ddp")
_SHARDINGS = {"FULL_SHARD": "full", "1": "full", "HYBRID_SHARD": "hybrid", "4": "hybrid"}


def _take_all(conversion: Conversion, given: Mapping[str, Any], special: Mapping[str, str] | None = None) -> None:
    """Takes what has no rule of its own: FSDP's and ZeRO's keys, and all that the table answers."""
    same = foreign.table()["same names"]
    paths = {name: f"{section}.{name}" for section, names in same.items() for name in names.split()}
    for name, value in given.items():
        known = name.removeprefix("fsdp_")
        if name in ("precision", "mixed_precision") and isinstance(value, (str, int)):
            conversion.take_precision(name, str(value))
        elif name in ("report_to", "log_with") and isinstance(value, (str, list)):
            _loggers(conversion, name, value)
        elif known in ("sharding_strategy", "reshard_after_forward") and value is not None:
            _take_sharding(conversion, name, value)
        elif known == "transformer_layer_cls_to_wrap" and isinstance(value, (str, list)):
            classes = value.split(",") if isinstance(value, str) else value
            conversion.put(name, "dsframe.fsdp.wrap", [block.strip() for block in classes])
        elif known in ("offload_params", "cpu_offload") and value is True:
            conversion.put(name, "dsframe.fsdp.offload", "cpu")
        elif name in ("offload_optimizer", "offload_parameters") and value is True:
            section = "offload_optimizer" if name == "offload_optimizer" else "offload_param"
            conversion.put(name, f"zero_optimization.{section}.device", "cpu")
        elif name in paths and not isinstance(value, Unknown):
            conversion.put(name, paths[name], value)
        else:
            conversion.take(name, value, {**paths, **(special or {})})


def _take_sharding(conversion: Conversion, name: str, value: Any) -> None:
    if isinstance(value, bool):
        conversion.put(name, "dsframe.fsdp.reshard_after_forward", value)
    elif str(value) in _SHARDINGS:
        conversion.put(name, "dsframe.fsdp.sharding", _SHARDINGS[str(value)])
    else:
        remedy = "for SHARD_GRAD_OP write reshard_after_forward false, for NO_SHARD engine ddp"
        conversion.todo(name, f"{value} has no counterpart; {remedy}")


def accelerate(given: dict[str, Any], read: DsConfig) -> Conversion:
    """Returns what a file that ``accelerate config`` wrote becomes."""
    sections = ("deepspeed_config", "fsdp_config", "dynamo_config")
    zero, fsdp, dynamo = (dict(given.pop(name, None) or {}) for name in sections)
    distributed = str(given.pop("distributed_type", "NO"))
    conversion = Conversion(read(zero.pop("deepspeed_config_file", None)))
    if distributed in _ENGINES:
        conversion.put("distributed_type", "dsframe.engine", _ENGINES[distributed])
    else:
        conversion.todo("distributed_type", f"{distributed} has no engine here; choose one (docs/engines.md)")
    processes = given.pop("num_processes", None)
    conversion.processes = processes if isinstance(processes, int) else None
    used = {"DEEPSPEED": zero, "FSDP": fsdp}.get(distributed, {})
    _take_all(conversion, {**used, **given})
    if any(isinstance(value, str) and value.upper() != "NO" for value in dynamo.values()):
        conversion.put("dynamo_config", "dsframe.model.compile", True)
    _torch_defaults(conversion)
    _leave_to_code(conversion)
    return conversion


def _torch_defaults(conversion: Conversion) -> None:
    """A program of its own clips nothing and has torch's optimizers, unless DeepSpeed's file says it."""
    if conversion.document.get("dsframe", {}).get("engine") != "deepspeed":
        conversion.put("torch's defaults", "dsframe.inherit", "torch")


def _accelerator(given: dict[str, Any], ds_config: dict[str, Any] | None) -> Conversion:
    """The call of ``Accelerator`` in a program."""
    conversion = Conversion(ds_config)
    zero = ds_config or given.keys() & {"deepspeed_plugin", "zero_stage"}
    engine = "fsdp" if given.keys() & {"fsdp_plugin", "sharding_strategy"} else "ddp"
    conversion.put("Accelerator", "dsframe.engine", "deepspeed" if zero else engine)
    _torch_defaults(conversion)
    _take_all(conversion, given)
    return conversion


# Hugging Face's Trainer.

_RENAMED = {"evaluation_strategy": "eval_strategy", "per_gpu_train_batch_size": "per_device_train_batch_size"}
_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "adafactor": "Adafactor"}


def trainer(written: dict[str, Any], read: DsConfig) -> Conversion:
    """Returns what ``TrainingArguments`` become, with the Trainer's defaults where they say nothing."""
    ds_config = read(written.get("deepspeed"))
    wanted = dict(foreign.table()["the Trainer's defaults"])
    conversion = Conversion(ds_config)
    for key, value in written.items():
        name = _RENAMED.get(key, key)
        if isinstance(value, Unknown) and name in wanted:
            default = f"the Trainer's default {wanted[name]} is in the file; write it"
            conversion.todo(name, f"its value is not written in the call; {default}")
        else:
            wanted[name] = value
    _trainer_engine(conversion, wanted, ds_config)
    if wanted["weight_decay"]:
        conversion.put("weight_decay", "dsframe.no_decay", "norms-and-biases")
    for rule in (_length, _optimizer, _schedule, _intervals, _best):
        rule(conversion, wanted)
    for name in ("bf16", "fp16"):
        if (value := wanted.pop(name, None)) is True:
            conversion.take_precision(name, name)
        elif value is not None:
            conversion.take(name, value)
    _take_all(conversion, wanted)
    mentioned = {name for _, names, _ in conversion.entries for name in names.split(", ")}
    for name in written.keys() - mentioned - _RENAMED.keys():
        conversion.note("nothing to do", name, "has no effect beside the other arguments")
    return conversion


def _trainer_engine(conversion: Conversion, wanted: dict[str, Any], ds_config: dict[str, Any] | None) -> None:
    named, fsdp = wanted.pop("deepspeed", None), wanted.pop("fsdp", None)
    if isinstance(named, Unknown):
        conversion.todo("deepspeed", "its value is not written in the call; write engine and zero_optimization")
    elif fsdp:
        conversion.put("fsdp", "dsframe.engine", "fsdp")
        settings = wanted.pop("fsdp_config", None)
        _take_all(conversion, settings if isinstance(settings, dict) else {})
    elif ds_config:
        conversion.put("deepspeed", "dsframe.engine", "deepspeed")
    else:
        conversion.put("no deepspeed, no fsdp", "dsframe.engine", "ddp")


def _length(conversion: Conversion, wanted: dict[str, Any]) -> None:
    steps, epochs = wanted.pop("max_steps"), wanted.pop("num_train_epochs")
    if isinstance(steps, int) and steps > 0:
        conversion.put("max_steps", "dsframe.steps", steps)
    elif isinstance(epochs, (int, float)) and float(epochs).is_integer() and epochs > 0:
        rest = "a batch goes on in the next epoch here, where the Trainer's last one of an epoch is smaller"
        conversion.put("num_train_epochs", "dsframe.epochs", int(epochs), rest)
    else:
        conversion.todo("num_train_epochs", f"{epochs} is no whole number of epochs; write dsframe.steps")


def _optimizer(conversion: Conversion, wanted: dict[str, Any]) -> None:
    name = str(wanted.pop("optim"))
    betas = [wanted.pop("adam_beta1"), wanted.pop("adam_beta2")]
    same = name.startswith("adamw_torch") or name in _OPTIMIZERS
    other = "" if same else f"{name} has no counterpart; for your own write module:Class"
    conversion.put("optim", "optimizer.type", _OPTIMIZERS.get(name, "AdamW"), other)
    if name not in _OPTIMIZERS:
        conversion.put("adam_beta1, adam_beta2", "optimizer.params.betas", betas)
    else:
        wanted.pop("adam_epsilon")


def _schedule(conversion: Conversion, wanted: dict[str, Any]) -> None:
    name, more = str(wanted.pop("lr_scheduler_type")), wanted.pop("lr_scheduler_kwargs", None) or {}
    warmup = _warm_up(conversion, wanted.pop("warmup_steps", 0), wanted.pop("warmup_ratio", 0))
    if isinstance(more, Unknown):
        conversion.todo("lr_scheduler_kwargs", "its value is not written in the call; write it in scheduler.params")
        more = {}
    if "scheduler" in conversion.document:
        params = conversion.document["scheduler"].setdefault("params", {})
        if params.get("warmup_num_steps") == "auto":
            conversion.put("warmup_steps", "scheduler.params.warmup_num_steps", warmup or 1)
        elif warmup:
            conversion.todo("warmup_steps", f"the ds_config has a scheduler, which stays; it said {warmup}")
        conversion.note("changed", "lr_scheduler_type", "the ds_config has a scheduler, which stays")
    elif name not in HF_SCHEDULERS:
        conversion.todo("lr_scheduler_type", f"{name} has no counterpart; write scheduler, or schedule() of the task")
    else:
        takes = HF_SCHEDULERS[name].model_fields
        params = {"num_warmup_steps": warmup, "num_training_steps": "auto"}
        params = {key: value for key, value in params.items() if key in takes}
        names = "lr_scheduler_type, warmup_steps, warmup_ratio"
        conversion.put(names, "scheduler", {"type": name, "params": {**params, **more}})


def _warm_up(conversion: Conversion, steps: Any, ratio: Any) -> int | float:
    """The Trainer's rule: steps; below 1 a part of the training; the ratio of older versions where steps are 0."""
    chosen: int | float = 0
    for name, value in (("warmup_steps", steps), ("warmup_ratio", ratio)):
        if isinstance(value, (int, float)):
            chosen = chosen or (value if 0 < value < 1 else int(value))
        elif value is not None:
            conversion.todo(name, f"its value is not written in the call; {foreign.advice(name)}")
    return chosen


def _intervals(conversion: Conversion, wanted: dict[str, Any]) -> None:
    """How often it logs, evaluates and saves, and where to."""
    logging = wanted.pop("logging_steps")
    if isinstance(logging, int) and logging > 0:
        conversion.put("logging_steps", "dsframe.log_every_steps", logging)
    else:
        conversion.todo("logging_steps", f"{logging}: write dsframe.log_every_steps")
    for what, target in (("eval", "dsframe.eval_every_steps"), ("save", _EVERY)):
        strategy, every = str(wanted.pop(f"{what}_strategy")), wanted.pop(f"{what}_steps", None) or logging
        if strategy == "epoch":
            conversion.put(f"{what}_strategy", target, {"epochs": 1})
        elif strategy == "steps" and isinstance(every, int):
            conversion.put(f"{what}_steps", target, every)
        elif strategy == "no":
            said = "the end evaluates" if what == "eval" else "the end saves, unless checkpoints.at_end is false"
            conversion.note("changed", f"{what}_strategy", f"no: {said}")
        elif strategy == "best":
            conversion.todo(f"{what}_strategy", f'write {_BEST}, such as "loss:min"')
        else:
            conversion.todo(f"{what}_strategy", foreign.advice(f"{what}_strategy") or "")


def _loggers(conversion: Conversion, argument: str, chosen: Any) -> None:
    for name in [chosen] if isinstance(chosen, str) else chosen:
        if path := foreign.table()["loggers"].get(name):
            conversion.put(argument, path, True)
        elif name == "none":
            conversion.note("nothing to do", argument, "none, as without it")
        else:
            conversion.todo(argument, f"{name} has no counterpart; {foreign.advice(argument)}")


def _best(conversion: Conversion, wanted: dict[str, Any]) -> None:
    """Which evaluation is the best, for keeping its checkpoint and for early stopping."""
    keys = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    keeps, metric, greater = (wanted.get(key) for key in keys)
    if any(isinstance(value, Unknown) for value in (keeps, metric, greater)) or not (keeps or metric):
        return
    for key in keys:
        wanted.pop(key, None)
    conversion.metric, conversion.greater = str(metric or "loss"), greater
    conversion.take_metric(", ".join(keys[1:]), _BEST, conversion.metric, greater)
    if keeps:
        later = "the last weights stay in the model; --best of evaluate, export and predict takes the best"
        conversion.note("changed", "load_best_model_at_end", later)


# Lightning.

_LIGHTNING_KEYS = {
    "stage": "zero_optimization.stage",
    "deterministic": "dsframe.deterministic",
    "nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
}


def _lightning(given: dict[str, Any], ds_config: dict[str, Any] | None) -> Conversion:
    conversion = Conversion(ds_config)
    strategy = given.pop("strategy", "auto")
    kind = str(strategy).lower()  # where it is a call, its source
    sharded = ds_config or given.keys() & {"offload_optimizer", "stage", "overlap_comm"}
    engine = "deepspeed" if sharded or "deepspeed" in kind else "fsdp" if "fsdp" in kind else "ddp"
    conversion.put("strategy", "dsframe.engine", engine)
    conversion.put("torch's defaults", "dsframe.inherit", "torch")
    if kind.startswith("deepspeed_stage_"):
        conversion.put("strategy", "zero_optimization.stage", int(kind.split("_")[2]))
        if "offload" in kind:
            conversion.put("strategy", "zero_optimization.offload_optimizer.device", "cpu")
    devices, nodes = given.get("devices"), given.get("num_nodes", 1)
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        conversion.processes = devices * nodes
        for name in given.keys() & {"devices", "num_nodes"}:
            conversion.note("taken", name, f"dsframe launch -np {conversion.processes} ({given.pop(name)})")
    _lightning_length(conversion, given)
    _take_all(conversion, given, _LIGHTNING_KEYS)
    return conversion


def _lightning_length(conversion: Conversion, given: dict[str, Any]) -> None:
    """How long it trains, and how often it evaluates."""
    for name in ("max_steps", "max_epochs"):
        if given.get(name) in (-1, None) and name in given:
            conversion.note("nothing to do", name, f"{given.pop(name)}, as without it")
    if not given.keys() & {"max_steps", "max_epochs"}:
        conversion.todo("max_epochs", "Lightning trains 1,000 epochs where nothing says how long; 1 here")
    often, accumulated = given.get("val_check_interval"), given.get("accumulate_grad_batches", 1)
    if isinstance(often, (int, float)) and isinstance(accumulated, int):
        given.pop("val_check_interval")
        every: Any = {"epochs": often} if isinstance(often, float) else max(1, often // accumulated)
        conversion.put("val_check_interval", "dsframe.eval_every_steps", every, "counted in optimizer steps")
    if isinstance(epochs := given.get("check_val_every_n_epoch"), int):
        given.pop("check_val_every_n_epoch")
        conversion.put("check_val_every_n_epoch", "dsframe.eval_every_steps", {"epochs": epochs})
