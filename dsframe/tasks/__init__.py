"""Tasks: image classification, language modelling, and the user's own. :func:`build` creates one from the settings."""

from dsframe.tasks.build import build, build_hooks
from dsframe.tasks.task import Sum, Task

__all__ = ["Sum", "Task", "build", "build_hooks"]
