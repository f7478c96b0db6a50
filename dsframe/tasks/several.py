"""Tasks with several models."""

from __future__ import annotations

from torch import nn

from dsframe.errors import TaskError
from dsframe.tasks.average_of import AverageOf
from dsframe.tasks.task import Task, gives


def model_names(task: Task) -> list[str]:
    """Returns the names of the task's models, none for a single one. Raises TaskError if losses do not match them."""
    models, losses, whose = list(task.models()), list(task.losses()), type(task).__name__
    if models and gives(task, "model"):
        raise TaskError(f"{whose} has model() and models(); remove one of them")
    for name, made in task.models().items():
        if isinstance(made, AverageOf) and (made.model not in losses or name in losses):
            raise TaskError(
                f"{whose}.models: {name!r} is the {made}; that has to be a model with a loss, and {name!r} has none"
            )
    for name in models:
        if not name.isidentifier() or hasattr(nn.Module, name):
            raise TaskError(
                f"{whose}.models: {name!r} cannot be the name of a model; take another word of letters and digits"
            )
    for name in losses:
        if name not in models:
            known = ", ".join(models) or "none"
            raise TaskError(f"{whose}.losses: there is no model {name!r} for it to train; models() has {known}")
    if models and not losses:
        raise TaskError(
            f"{whose} has models() and no losses(), so nothing would be trained; say which loss trains which"
        )
    return models
