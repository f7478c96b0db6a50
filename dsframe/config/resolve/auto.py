"""Resolves ``"auto"``, the value that Hugging Face's Trainer fills in before DeepSpeed sees the file.

Each rule is the Trainer's own where it has one (``transformers.integrations.deepspeed``): bucket sizes from the hidden
size, ``lr`` and the like from its default arguments, the number of steps from the data. Everywhere else in the sections
that DeepSpeed parses with pydantic, ``"auto"`` means DeepSpeed's default. It never reaches DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dsframe.config.read.findings import Findings
from dsframe.config.read.reader import Path, inside

Keys = tuple[str, ...]
from dsframe.config.schema.base import AUTO, Section
from dsframe.config.schema.file import File, section_at, shape
from dsframe.config.schema.optimizer import MUP, muon_rates
from dsframe.config.schema.settings import LanguageTask

COMPILE = ("dsframe", "model", "compile")
COMPILE_STEPS = 1_000
"""From so many steps on ``"compile": "auto"`` compiles: a choice, so that a minute of compiling is a small part of a training."""
TRAINER_MICRO_BATCH = 8
"""``per_device_train_batch_size`` of Hugging Face's Trainer, for files whose batch sizes are all ``"auto"``."""


@dataclass(frozen=True)
class Facts:
    """Facts that the file does not tell. None: not known (yet)."""

    world_size: int | None = None
    """Processes of the run."""
    total_steps: int | None = None
    """Optimizer steps of the whole training."""
    epoch_steps: Fraction | None = None
    """Optimizer steps of an epoch: no whole number where the last batch takes samples of the next epoch."""
    hidden_size: int | None = None
    """Hidden size of the model."""
    replicas: bool | None = None
    """True if the engine ignores pipeline and tensor parallelism (full replicas)."""
    engine: str | None = None
    """The engine that will run, if it is not the file's."""
    gpu: bool | None = None
    """True if it trains on GPUs."""


Answer = tuple[Any, str] | None
"""A value and the reason for it; None when it is not known yet."""
Rule = Callable[[dict[str, Any], Facts], Answer]


def _default(value: Any, reason: str = "the default of Hugging Face's Trainer") -> Rule:
    return lambda raw, facts: (value, reason)


def _from_hidden(compute: Callable[[int], int], formula: str) -> Rule:
    def rule(raw: dict[str, Any], facts: Facts) -> Answer:
        size = facts.hidden_size or _width(raw)
        return None if size is None else (compute(size), f"{formula}, and the model's hidden size is {size}")

    return rule


def _width(raw: dict[str, Any]) -> int | None:
    """The hidden size of a language model, where the file alone tells it."""
    settings = raw.get("dsframe")
    task = settings.get("task") if isinstance(settings, dict) else None
    if not isinstance(task, dict):
        return None
    width = None
    if task.get("name") == "language":
        width = task.get("width", LanguageTask.model_fields["width"].default)
    elif isinstance(task.get("model"), dict):
        width = task["model"].get("hidden_size")
    return width if isinstance(width, int) else None


def _total_steps(raw: dict[str, Any], facts: Facts) -> Answer:
    if facts.total_steps is not None:
        return facts.total_steps, "the optimizer steps of this training"
    settings = raw.get("dsframe")
    steps = settings.get("steps") if isinstance(settings, dict) else None
    return (steps, "dsframe.steps") if isinstance(steps, int) else None


def _learning_rate(raw: dict[str, Any], facts: Facts) -> Answer:
    optimizer, scheduler = (_owner(raw, (section, "type")) or {} for section in ("optimizer", "scheduler"))
    kind = str(optimizer.get("type")).lower()
    if scheduler.get("type") == "WarmupLR" and kind in ("muon", *MUP):
        return None, "each parameter warms up to the optimizer's own rate for it, as where the key is left out"
    parameters = _owner(optimizer, ("params", "lr")) or {}
    keys = ("muon_lr", "lr", "adam_lr") if kind == "muon" else ("lr",)
    rates = {key: parameters[key] for key in keys if type(parameters.get(key)) in (int, float)}
    if kind == "muon" and [*rates] == ["adam_lr"]:
        return muon_rates(rates)[0], "Muon's own rate for its matrices"
    if rates:
        key = next(iter(rates))
        return rates[key], f"optimizer.params.{key}"
    return 5e-5, "the default learning rate of Hugging Face's Trainer"


def _compile(raw: dict[str, Any], facts: Facts) -> Answer:
    """Blocks, on GPUs, where norms and residuals that are not compiled each read and write their activations once more."""
    settings = raw["dsframe"]
    model = settings["model"]
    excluded = {
        "dsframe.per_sample_randomness": settings.get("per_sample_randomness"),
        "dsframe.model.sync_batch_norm": model.get("sync_batch_norm"),
        "sequence_parallel_size": raw.get("sequence_parallel_size") not in (None, 1),
    }
    for key, is_on in excluded.items():
        if is_on:
            return False, f"not possible with {key}"
    if facts.gpu is None:
        return None
    if not facts.gpu:
        return False, "this training is on CPUs, where it was slower as often as faster"
    steps = facts.total_steps or 0
    if steps < COMPILE_STEPS:
        return False, f"{steps:,} steps; from {COMPILE_STEPS:,} on the time to compile is a small part"
    return "blocks", f"a training of {steps:,} steps on GPUs"


_NO_WARMUP = "no warm-up, the default of Hugging Face's Trainer; DeepSpeed takes no less than 1"

# The optimizer comes before the scheduler, whose rules look at it.
RULES: Mapping[Keys, Rule] = {
    ("gradient_clipping",): _default(1.0, "the default of DeepSpeed and of Hugging Face's Trainer"),
    ("optimizer", "params", "lr"): _default(5e-5),
    ("optimizer", "params", "betas"): _default([0.9, 0.999]),
    ("optimizer", "params", "eps"): _default(1e-8),
    ("optimizer", "params", "weight_decay"): _default(0.0),
    ("scheduler", "params", "warmup_min_lr"): _default(0.0),
    ("scheduler", "params", "warmup_max_lr"): _learning_rate,
    ("scheduler", "params", "warmup_num_steps"): _default(1, _NO_WARMUP),
    ("scheduler", "params", "total_num_steps"): _total_steps,
    ("scheduler", "params", "num_training_steps"): _total_steps,
    ("scheduler", "params", "lr_decay_iters"): _total_steps,
    ("scheduler", "params", "warmup_type"): _default("log", "DeepSpeed's default"),
    ("fp16", "enabled"): _default(False, "DeepSpeed's default; the Trainer would take its --fp16"),
    ("bf16", "enabled"): _default(False, "DeepSpeed's default; the Trainer would take its --bf16"),
    ("zero_optimization", "reduce_bucket_size"): _from_hidden(lambda n: n * n, "hidden size squared"),
    ("zero_optimization", "stage3_prefetch_bucket_size"): _from_hidden(
        lambda n: int(0.9 * n * n), "0.9 x hidden size squared"
    ),
    ("zero_optimization", "stage3_param_persistence_threshold"): _from_hidden(lambda n: 10 * n, "10 x hidden size"),
    ("pipeline", "stages"): _default(1, "no pipeline unless the file asks for one"),
    COMPILE: _compile,
}
_WAITS_FOR = {"zero_optimization": "hidden size", "scheduler": "number of steps", "dsframe": "device"}
"""Section -> what of the training its ``"auto"`` may wait for."""

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolve(raw: dict[str, Any], facts: Facts, findings: Findings) -> None:
    """Replace or drop every ``"auto"`` of ``raw``, in place, and say why."""
    _batch(raw, findings)
    for path, rule in RULES.items():
        owner = _owner(raw, path)
        if owner is None or owner.get(path[-1]) != AUTO:
            continue
        answer = rule(raw, facts)
        if answer is None:
            del owner[path[-1]]
            findings.pending.add(path)
            message = f'"auto" is resolved when the {_WAITS_FOR[path[0]]} of the training is known'
            findings.note(path, message, code="auto-later", at_value=True)
        else:
            owner[path[-1]] = answer[0]
            findings.resolve(path, *answer)
    _rest(File, raw, (), findings)


def _owner(raw: dict[str, Any], path: Keys) -> dict[str, Any] | None:
    owner = inside(raw, path[:-1])
    return owner if isinstance(owner, dict) else None


def _batch(raw: dict[str, Any], findings: Findings) -> None:
    asked = [key for key in BATCH_KEYS if raw.get(key) == AUTO]
    for key in asked:
        del raw[key]
    train, micro = raw.get("train_batch_size"), raw.get("train_micro_batch_size_per_gpu")
    if not asked:
        return
    if train is None and micro is None:
        micro = raw["train_micro_batch_size_per_gpu"] = TRAINER_MICRO_BATCH
        key = next((key for key in asked if key == "train_micro_batch_size_per_gpu"), asked[0])
        if key == "train_micro_batch_size_per_gpu":
            findings.resolve((key,), micro, "the default of Hugging Face's Trainer (per_device_train_batch_size)")
        else:
            message = f"no micro-batch size is given: {micro}, the default of Hugging Face's Trainer"
            findings.note((key,), message, code="auto")
        asked = [other for other in asked if other != key or key == "train_batch_size"]
    if "gradient_accumulation_steps" in asked and (train is None or micro is None):
        raw["gradient_accumulation_steps"] = 1
        findings.resolve(("gradient_accumulation_steps",), 1, "the default of Hugging Face's Trainer")
        asked.remove("gradient_accumulation_steps")
    for key in asked:
        if key not in raw:
            findings.note((key,), '"auto" follows from the other two and the world size', code="auto", at_value=True)


def _rest(owner: type[Section], raw: dict[str, Any], path: Path, findings: Findings) -> None:
    """``"auto"`` elsewhere: DeepSpeed's default where its parser drops the word, an error where it would crash."""
    for key in list(raw):
        value, here = raw[key], (*path, key)
        if key in owner.model_fields:
            expected = shape(owner, key)
            section = section_at(owner, key, raw)
            if isinstance(value, dict) and section is not None:
                _rest(section, value, here, findings)
            elif value == AUTO and AUTO not in expected.literals and not expected.kinds & {"str", "any"}:
                _drop(owner, raw, key, here, findings)


def _drop(owner: type[Section], raw: dict[str, Any], key: str, here: Path, findings: Findings) -> None:
    default = owner.model_fields[key].get_default(call_default_factory=False)
    if owner.coerced:
        del raw[key]
        if here == ("zero_optimization", "stage"):
            message = 'has no effect: DeepSpeed takes "auto" for 0, and ZeRO is off'
            findings.warning(here, message, "write 0, 1, 2 or 3", code="no-effect", at_value=True)
            return
        findings.resolve(here, default, "DeepSpeed's default")
        return
    del raw[key]
    findings.error(here, '"auto" is not possible here', "write a value, or remove the key", code="auto", at_value=True)
