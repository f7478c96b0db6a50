"""Resolves ``"auto"``, the value that Hugging Face's Trainer fills in before DeepSpeed sees the file.

The rules are the Trainer's if it has one (``transformers.integrations.deepspeed``): ``lr`` and similar keys from its
default arguments, the number of steps from the data. In other sections that DeepSpeed parses with pydantic, ``"auto"``
means DeepSpeed's default. It never reaches DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dsframe.config.read.findings import Findings, Resolved
from dsframe.config.read.reader import Path, Raw, inside, keys
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN
from dsframe.config.resolve.facts import Facts
from dsframe.config.schema.base import AUTO, Section
from dsframe.config.schema.file import File, children, shape
from dsframe.config.schema.optimizer import muon_rates

TRAINER_MICRO_BATCH = 8
"""``per_device_train_batch_size`` of Hugging Face's Trainer, for files whose batch sizes are all ``"auto"``."""
_TRAINER = "the default of Hugging Face's Trainer"


Answer = tuple[Any, str] | None
"""A value and its reason; None if it is not known yet."""
Rule = Callable[[Raw, Facts], Answer]


def _default(value: Any, reason: str = _TRAINER) -> Rule:
    return lambda raw, facts: (value, reason)


def _total_steps(raw: Raw, facts: Facts) -> Answer:
    if facts.total_steps is not None:
        return facts.total_steps, "the optimizer steps of this training"
    steps = inside(raw, ("dsframe", "steps"))
    return (steps, "dsframe.steps") if isinstance(steps, int) else None


def _learning_rate(raw: Raw, facts: Facts) -> Answer:
    name, schedule = (str(inside(raw, (section, "type"))) for section in ("optimizer", "scheduler"))
    name = name.lower()
    if schedule == "WarmupLR" and name == "muon":
        return None, "each parameter warms up to the optimizer's own rate for it, as where the key is left out"
    params = inside(raw, ("optimizer", "params"))
    for key in ("muon_lr", "lr", "adam_lr") if name == "muon" else ("lr",):
        rate = inside(params, (key,))
        if type(rate) in (int, float):
            if key == "adam_lr":
                return muon_rates({})[0], "Muon's own rate for its matrices"
            return rate, f"optimizer.params.{key}"
    return 5e-5, "the default learning rate of Hugging Face's Trainer"


_NO_WARMUP = "no warm-up, the default of Hugging Face's Trainer; DeepSpeed takes no less than 1"

# The optimizer comes first, because the scheduler's rules read it.
RULES: Mapping[str, Rule] = {
    "gradient_clipping": _default(1.0, "the default of DeepSpeed and of Hugging Face's Trainer"),
    "optimizer.params.lr": _default(5e-5),
    "optimizer.params.betas": _default([0.9, 0.999]),
    "optimizer.params.eps": _default(1e-8),
    "optimizer.params.weight_decay": _default(0.0),
    "scheduler.params.warmup_min_lr": _default(0.0),
    "scheduler.params.warmup_max_lr": _learning_rate,
    "scheduler.params.warmup_num_steps": _default(1, _NO_WARMUP),
    **dict.fromkeys(
        (f"scheduler.params.{key}" for key in
         ("total_num_steps", "num_training_steps", "total_steps", "T_max")),
        _total_steps,
    ),
    "scheduler.params.warmup_type": _default("log", "DeepSpeed's default"),
    "fp16.enabled": _default(False, "DeepSpeed's default; the Trainer would take its --fp16"),
    "bf16.enabled": _default(False, "DeepSpeed's default; the Trainer would take its --bf16"),
    "pipeline.stages": _default(1, "no pipeline unless the file asks for one"),
}  # fmt: skip


def resolve(raw: Raw, facts: Facts, findings: Findings) -> None:
    """Replaces or drops every ``"auto"`` of ``raw`` in place, and reports why."""
    _batch(raw, findings)
    for name, rule in RULES.items():
        path = keys(name)
        owner = inside(raw, path[:-1])
        if not isinstance(owner, dict) or owner.get(path[-1]) != AUTO:
            continue
        answer = rule(raw, facts)
        if answer is None:
            del owner[path[-1]]
            findings.pending.add(path)
            message = '"auto" is resolved when the number of steps of the training is known'
            findings.note(path, message, code="auto-later", at_value=True)
        else:
            owner[path[-1]] = answer[0]
            findings.resolve(path, *answer)
    _warm_up(raw, facts, findings)
    _others(File, raw, (), findings)


def _warm_up(raw: Raw, facts: Facts, findings: Findings) -> None:
    """Replaces a warm-up given as a fraction of the training by steps, rounded as in transformers."""
    for key in ("num_warmup_steps", "warmup_num_steps"):
        path = ("scheduler", "params", key)
        part = inside(raw, path)
        if isinstance(part, float) and part.is_integer():
            inside(raw, path[:-1])[key] = int(part)
        if not isinstance(part, float) or not 0.0 < part < 1.0:
            continue
        total, _ = _total_steps(raw, facts) or (None, "")
        if "dsframe" not in raw:
            message = "a part of the training is dsframe's way to count steps: DeepSpeed takes it for 2 steps"
            remedy = 'write steps, or add a "dsframe" section'
            findings.error(path, message, remedy, code="value", at_value=True)
        elif total is None:
            findings.pending.add(path)
        else:
            steps = math.ceil(total * part)
            inside(raw, path[:-1])[key] = steps
            findings.resolved.append(Resolved(path, steps, f"{part} of {total:,} steps", part))


def _batch(raw: Raw, findings: Findings) -> None:
    asked = [key for key in (TRAIN, MICRO, STEPS) if raw.get(key) == AUTO]
    for key in asked:
        del raw[key]
    if asked and TRAIN not in raw and MICRO not in raw:
        raw[MICRO] = TRAINER_MICRO_BATCH
        if MICRO in asked:
            findings.resolve((MICRO,), TRAINER_MICRO_BATCH, f"{_TRAINER} (per_device_train_batch_size)")
        else:
            message = f"no micro-batch size is given: {TRAINER_MICRO_BATCH}, {_TRAINER}"
            findings.note(asked[0], message, code="auto")
    if STEPS in asked and not (TRAIN in raw and MICRO in raw):
        raw[STEPS] = 1
        findings.resolve((STEPS,), 1, _TRAINER)
    for key in asked:
        if key not in raw:
            findings.note(key, '"auto" follows from the other two and the world size', code="auto", at_value=True)


def _others(owner: type[Section], raw: Raw, path: Path, findings: Findings) -> None:
    """Resolves ``"auto"`` in other keys: to DeepSpeed's default if its parser drops the word, else an error."""
    for key in [key for key, value in raw.items() if value == AUTO and key in owner.model_fields]:
        expected, member_path = shape(owner, key), (*path, key)
        if AUTO in expected.literals or expected.kinds & {"str", "any"}:
            continue
        del raw[key]
        if not owner.coerced:
            remedy = "write a value, or remove the key"
            findings.error(member_path, '"auto" is not possible here', remedy, code="auto", at_value=True)
        elif member_path == ("zero_optimization", "stage"):
            message = 'has no effect: DeepSpeed takes "auto" for 0, and ZeRO is off'
            findings.warning(member_path, message, "write 0, 1, 2 or 3", code="no-effect", at_value=True)
        else:
            default = owner.model_fields[key].get_default(call_default_factory=False)
            findings.resolve(member_path, default, "DeepSpeed's default")
    for inner, section, value in list(children(owner, raw)):
        _others(section, value, path + inner, findings)
