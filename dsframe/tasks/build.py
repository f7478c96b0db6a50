"""Creates the objects that a file names: its :class:`~dsframe.tasks.task.Task` and its hooks."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsframe.errors import TaskError
from dsframe.hooks import Hooks
from dsframe.tasks.data_sets import seeded
from dsframe.tasks.task import Task
from dsframe.user_class import close_match, named_class

if TYPE_CHECKING:
    from dsframe.config.schema import settings as sections

TABLE = {
    "vision": "dsframe.tasks.vision:VisionTask",
    "language": "dsframe.tasks.language:LanguageTask",
    "causal-language-model": "dsframe.tasks.text_files:causal_language_model",
    "image-classification": "dsframe.tasks.huggingface:ImageClassificationTask",
}
"""Built-in tasks, or functions that create them. Each takes its settings section and the seed; a user's task takes its
``options`` by name."""


def build(settings: sections.Task, seed: int) -> Task:
    """Returns the task that ``settings`` describe.

    Imports ``package.module:Class`` with the working directory on the path. Random numbers drawn in module and
    constructor depend on ``seed``. Raises TaskError if the class does not exist, is not a Task, or does not accept the
    options; DataError if it searches for its data at once and does not find them.
    """
    task: Task
    with seeded(seed):
        if settings.name in TABLE:
            module, _, name = TABLE[settings.name].partition(":")
            task = getattr(importlib.import_module(module), name)(settings, seed)
        else:
            cls = find_task(settings.name)
            task = _construct(cls, getattr(settings, "options", {}), settings.name)
    task.seed = seed
    return task


def find_task(path: str) -> type[Task]:
    """Returns the Task subclass named ``package.module:Class``. Raises TaskError."""
    if not re.fullmatch(r"[^:]+:[^:]+", path):
        raise TaskError(
            f'task "{path}": not one of {", ".join(TABLE)} and not of the form "package.module:Class"'
            + close_match(path, TABLE)
        )
    return named_class(path, Task, "task")


def _construct(cls: type[Task], options: Mapping[str, Any], path: str) -> Task:
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        signature = inspect.signature(cls)
        unknown = [name for name in options if name not in signature.parameters]
        hint = close_match(unknown[0], signature.parameters) if unknown else ""
        raise TaskError(f'task "{path}": options do not fit: {error}{hint}; it takes {signature}') from error
    return cls(**options)


def build_hooks(names: Sequence[str], objects: Sequence[Any]) -> tuple[Hooks, ...]:
    """Returns the hooks that a file names, each ``package.module:Class`` without arguments, then ``objects``. Raises
    TaskError for anything but Hooks."""
    for hook in objects:
        if not isinstance(hook, Hooks):
            kind = type(hook).__name__
            raise TaskError(f'hooks: {kind} is not a subclass of dsframe.Hooks; write "class {kind}(dsframe.Hooks)"')
    return (*map(_hook, names), *objects)


def _hook(name: str) -> Hooks:
    cls = named_class(name, Hooks, "hook")
    needed = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty and parameter.kind < 2
    ]
    if needed:
        raise TaskError(
            f'hook "{name}": its class needs {", ".join(needed)}; give them defaults, or give fit() an object'
        )
    return cls()
