"""From the file's ``task`` section to a :class:`~dsframe.tasks.task.Task`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from dsframe.errors import DsframeError, TaskError
from dsframe.tasks.task import Task

if TYPE_CHECKING:
    from dsframe.config.schema import settings as sections

Named = TypeVar("Named")
TABLE = {
    "vision": "dsframe.tasks.vision:VisionTask",
    "language": "dsframe.tasks.language:LanguageTask",
    "causal-language-model": "dsframe.tasks.huggingface:causal_language_model",
    "image-classification": "dsframe.tasks.huggingface:ImageClassificationTask",
}
"""Our own tasks, or what makes one. Each takes its settings section and the seed; a user's task its ``options`` by name."""


def build(settings: sections.Task, seed: int) -> Task:
    """The task that ``settings`` describe.

    ``package.module:Class`` is imported with the working directory on the path. Raises TaskError when there is no such
    module or class, when the class is no Task, and when its constructor does not take the options; DataError when a
    task looks for its data at once and does not find them.
    """
    task: Task
    if settings.name in TABLE:
        module, _, name = TABLE[settings.name].partition(":")
        task = getattr(importlib.import_module(module), name)(settings, seed)
    else:
        cls = find(settings.name)
        task = _construct(cls, getattr(settings, "options", {}), settings.name)
    task.seed = seed
    return task


def find(path: str) -> type[Task]:
    """The Task subclass named by ``package.module:Class``. Raises TaskError."""
    if not re.fullmatch(r"[^:]+:[^:]+", path):
        raise TaskError(
            f'task "{path}": not one of {", ".join(TABLE)} and not of the form "package.module:Class"'
            + _close(path, TABLE)
        )
    return named_class(path, Task, "task")


def named_class(path: str, base: type[Named], what: str) -> type[Named]:
    """The subclass of ``base`` named by ``package.module:Class``. ``what`` it is, for messages. Raises TaskError."""
    module_name, _, class_name = path.partition(":")
    module = _import(module_name, f'{what} "{path}"')
    found: Any = module
    for part in class_name.split("."):
        if not hasattr(found, part):
            known = [
                name
                for name, value in vars(module).items()
                if isinstance(value, type) and issubclass(value, base) and value is not base
            ]
            raise TaskError(
                f'{what} "{path}": module {module_name} ({module.__file__}) has no {class_name}; '
                + (
                    f"its {what}s: {', '.join(known)}"
                    if known
                    else f"it defines no subclass of dsframe.{base.__name__}"
                )
                + _close(class_name, [name for name in vars(module) if not name.startswith("_")])
            )
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, base)):
        kind = f"a class that does not derive from {base.__name__}" if isinstance(found, type) else type(found).__name__
        raise TaskError(f'{what} "{path}": {class_name} is {kind}; write "class {class_name}(dsframe.{base.__name__})"')
    return found


def _import(name: str, who: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # console scripts (horovodrun, dsframe) start without the working directory
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing != name and not name.startswith(missing + "."):
            raise TaskError(f"{who}: {name} imports {missing}, which is not installed") from error
        raise TaskError(
            f"{who}: no module named {missing}{_close(missing.rpartition('.')[2], _neighbours(missing))}; "
            f"searched {', '.join(entry or here for entry in sys.path)}"
        ) from error
    except DsframeError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        line = getattr(error, "lineno", None) or place.lineno
        file = getattr(error, "filename", None) or place.filename
        reason = f"{file}:{line}: {type(error).__name__}: {error}"
        raise TaskError(f"{who}: importing {name} failed: {reason}") from error


def _neighbours(module: str) -> list[str]:
    """Names of modules beside the missing one: in its package, else in the working directory."""
    package = module.rpartition(".")[0]
    paths = getattr(sys.modules.get(package), "__path__", []) if package else [Path.cwd()]
    folders = [Path(path) for path in paths]
    return [entry.stem for folder in folders if folder.is_dir() for entry in folder.iterdir() if _is_module(entry)]


def _is_module(entry: Path) -> bool:
    return entry.suffix == ".py" or (entry / "__init__.py").is_file()


def _construct(cls: type[Task], options: Mapping[str, Any], path: str) -> Task:
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        accepted = [
            f"{parameter.name}" + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")
            for parameter in inspect.signature(cls).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        unknown = [name for name in options if name not in {option.partition("=")[0] for option in accepted}]
        hint = _close(unknown[0], [option.partition("=")[0] for option in accepted]) if unknown else ""
        raise TaskError(
            f'task "{path}": options do not fit: {error}{hint}; it takes {", ".join(accepted) or "no options"}'
        ) from error
    return cls(**options)


def _close(word: str, candidates: Mapping[str, Any] | list[str]) -> str:
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f'; did you mean "{matches[0]}"?' if matches else ""
