"""Groups of parameters with other weight decay or learning rate, or frozen ones; the same on every engine. Groups are
determined by name when the model is built, before an engine changes it. An engine then looks up what it trains, such as
masters, shards or a stage's layers, by the model's names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pydantic import ValidationError
from torch import nn

from dsframe.config.read.suggest import similar_pattern
from dsframe.config.schema.settings_training import ParameterGroup
from dsframe.errors import ConfigError, DsframeError, TaskError
from dsframe.model.built import FROZEN, ParameterGroups
from dsframe.tasks.task import Task

if TYPE_CHECKING:
    from dsframe.config.value import Config

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)")
"""Names without weight decay. Source: transformers 5.23, ``trainer.py`` (get_decay_parameter_names)."""


class _RequestedGroups:
    """The groups requested by the file or the task, which also creates errors about them."""

    def __init__(self, config: Config, task: Task, model: nn.Module) -> None:
        """Raises TaskError if both have some, or if the task's are invalid."""
        self._config, self._whose = config, ""
        self.groups: Sequence[ParameterGroup] = config.settings.parameter_groups
        given = task.parameter_groups(model)
        if not given:
            return
        self._whose = f"{type(task).__name__}.parameter_groups"
        if self.groups:
            raise TaskError(f'{self._whose} gives groups, and the file has "parameter_groups" too; remove one of them')
        try:
            self.groups = [ParameterGroup.model_validate(dict(group)) for group in given]
        except (TypeError, ValueError) as error:
            problems = error.errors() if isinstance(error, ValidationError) else ()
            text = ", ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems) or str(error)
            remedy = 'name parameters by patterns, as the file does: {"match": ["head.*"], "lr_scale": 10}'
            raise TaskError(f"{self._whose}: {text}; {remedy}") from None
        for index, group in enumerate(self.groups):
            if group.contradiction:
                raise self.wrong(index, *group.contradiction)

    def wrong(self, index: int, message: str, remedy: str) -> DsframeError:
        if self._whose:
            return TaskError(f"{self._whose}[{index}]: {message}; {remedy}")
        where = ("dsframe", "parameter_groups", index)
        return ConfigError([self._config.error(where, message, remedy, code="model")])


def settle_groups(config: Config, task: Task, model: nn.Module) -> ParameterGroups:
    """Returns the groups of file and task for ``model``, and freezes its parameters of frozen groups. Uses only names,
    sizes and classes, so the model may be on the meta device. Raises ConfigError, or TaskError for the task's groups,
    if a pattern matches nothing, a parameter is in two groups, or all parameters are frozen."""
    for parameter in model.parameters():
        if vars(parameter).pop(FROZEN, False):
            parameter.requires_grad_(True)
    wanted, preset = _RequestedGroups(config, task, model), config.settings.no_decay
    options_of = {name: {"weight_decay": 0.0} for name in (without_decay(model) if preset != "none" else ())}
    frozen = set()
    for name, (index, _) in _match_groups(wanted, model).items():
        group = wanted.groups[index]
        given = {"weight_decay": group.weight_decay, "lr_scale": group.lr_scale}
        options_of[name] = options_of.get(name, {}) | {key: value for key, value in given.items() if value is not None}
        if group.freeze:
            frozen.add(name)
    asked = {
        "parameter_groups": [group.model_dump(exclude_defaults=True) for group in wanted.groups],
        "no_decay": None if preset == "none" else preset,
    }
    parameter_groups = ParameterGroups(
        {name: options for name, options in options_of.items() if options},
        frozenset(frozen),
        {key: value for key, value in asked.items() if value},
    )
    parameter_groups.freeze(model)
    if frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise wanted.wrong(len(wanted.groups) - 1, "with it all parameters are frozen", "leave some to train")
    return replace(parameter_groups, lines=tuple(_lines(parameter_groups, model)) if parameter_groups.asked else ())


def without_decay(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that Hugging Face's Trainer does not decay."""
    normed = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    return [
        name
        for name, _ in model.named_parameters()
        if _UNDECAYED.search(name.lower()) or name.startswith(tuple(normed))
    ]


def _match_groups(wanted: _RequestedGroups, model: nn.Module) -> dict[str, tuple[int, str]]:
    """Returns group and pattern for each matched parameter, under any of its names."""
    first: dict[int, str] = {}
    every = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    claims: dict[str, tuple[int, str]] = {}
    for index, group in enumerate(wanted.groups):
        for pattern in group.match:
            matched = [name for name in every if fnmatchcase(name, pattern)]
            if not matched:
                raise wanted.wrong(
                    index, f'"{pattern}" matches no parameter of the model', similar_pattern(pattern, every)
                )
            for name in matched:
                other, its = claims.setdefault(every[name], (index, pattern))
                if other != index:
                    message = f'"{pattern}" matches {name}, and so does "{its}" of group {other}'
                    raise wanted.wrong(index, message, "change one of them: a parameter belongs to one group")
    return claims


def _lines(groups: ParameterGroups, model: nn.Module) -> Iterator[str]:
    counts, elements = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        options = groups.options.get(name, {}) if parameter.requires_grad else {"frozen": 1.0}
        label = ", ".join(key if key == "frozen" else f"{key} {value:g}" for key, value in options.items())
        counts[label] += 1
        elements[label] += parameter.numel()
    for label, count in counts.items():
        parameters = f"{count:,} parameter{'s' * (count > 1)}"
        yield f"{label or 'as the optimizer says'}: {parameters}, {elements[label]:,} elements"
