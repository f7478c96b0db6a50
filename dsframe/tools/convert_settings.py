"""What ``dsframe convert`` does with the settings of Accelerate and the Trainer whose values have another form here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsframe.config.read import foreign
from dsframe.config.schema.parameters import HF_SCHEDULERS
from dsframe.tools.conversion import Conversion

_BEST = "dsframe.checkpoints.keep_best"
_EVERY = "dsframe.checkpoints.every_steps"

DsConfig = Callable[[Any], "dict[str, Any] | None"]
"""Reads the ds_config that an argument names."""


def _leave_to_code(conversion: Conversion) -> None:
    """What Accelerate leaves to the program, where it does not say it."""
    if not conversion.document.keys() & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        conversion.document["train_micro_batch_size_per_gpu"] = 1
        conversion.todo("the batch size", "it is in your code: write train_micro_batch_size_per_gpu, 1 now")
    conversion.todo("the length", "it is in your code: write dsframe.epochs or dsframe.steps; 1 epoch now")
    if "optimizer" not in conversion.document:
        conversion.todo("the optimizer and its schedule", "they are in your code: write optimizer, scheduler")


# Accelerate, and what the Trainer has alike.

_ENGINES = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "NO": "single"}
_ENGINES |= dict.fromkeys(("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"), "ddp")
_SHARDINGS = {"FULL_SHARD": "full", "1": "full", "HYBRID_SHARD": "hybrid", "4": "hybrid"}


def _take_all(conversion: Conversion, given: Mapping[str, Any]) -> None:
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
        elif name in paths:
            conversion.put(name, paths[name], value)
        else:
            conversion.take(name, value, paths)


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
    if distributed != "DEEPSPEED":
        conversion.put("torch's defaults", "dsframe.inherit", "torch")
    _leave_to_code(conversion)
    return conversion


# Hugging Face's Trainer.

_RENAMED = {"evaluation_strategy": "eval_strategy", "per_gpu_train_batch_size": "per_device_train_batch_size"}
_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "adafactor": "Adafactor"}


def trainer(written: dict[str, Any], read: DsConfig) -> Conversion:
    """Returns what ``TrainingArguments`` become, with the Trainer's defaults where they say nothing."""
    ds_config = read(written.get("deepspeed"))
    wanted = dict(foreign.table()["the Trainer's defaults"])
    conversion = Conversion(ds_config)
    wanted |= {_RENAMED.get(key, key): value for key, value in written.items()}
    _trainer_engine(conversion, wanted, ds_config)
    if wanted["weight_decay"]:
        conversion.put("weight_decay", "dsframe.no_decay", "norms-and-biases")
    for rule in (_length, _optimizer, _schedule, _intervals, _best):
        rule(conversion, wanted)
    for name in ("bf16", "fp16"):
        if (value := wanted.pop(name, None)) is True:
            conversion.take_precision(name, name)
        elif value is not None:
            conversion.take(name, value, {})
    _take_all(conversion, wanted)
    mentioned = {name for _, names, _ in conversion.entries for name in names.split(", ")}
    for name in written.keys() - mentioned - _RENAMED.keys():
        conversion.note("nothing to do", name, "has no effect beside the other arguments")
    return conversion


def _trainer_engine(conversion: Conversion, wanted: dict[str, Any], ds_config: dict[str, Any] | None) -> None:
    wanted.pop("deepspeed", None)
    fsdp = wanted.pop("fsdp", None)
    if fsdp:
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
    given = [wanted.pop(key, 0) for key in ("warmup_steps", "warmup_ratio")]
    chosen = next((value for value in given if isinstance(value, (int, float)) and value), 0)
    warmup = chosen if chosen < 1 else int(chosen)  # below 1 it is a part of the training
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
    if not (keeps or metric):
        return
    for key in keys:
        wanted.pop(key, None)
    name = str(metric or "loss").removeprefix("eval_")
    better = "max" if greater or (greater is None and not name.endswith("loss")) else "min"
    changed = "" if name == "loss" else f"{name} has to be a name that metrics() of the task returns"
    conversion.put(", ".join(keys[1:]), _BEST, f"{name}:{better}", changed)
    if keeps:
        later = "the last weights stay in the model; --best of evaluate, export and predict takes the best"
        conversion.note("changed", "load_best_model_at_end", later)
