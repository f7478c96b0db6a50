"""Imports a user's class (task or hooks) by its name, ``package.module:Class``."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dsframe.errors import DsframeError, TaskError
from dsframe.text import reason

Named = TypeVar("Named")


def named_class(path: str, base: type[Named], what: str) -> type[Named]:
    """Returns the subclass of ``base`` named ``package.module:Class``. ``what``: its role. Raises TaskError."""
    module_name, _, class_name = path.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name[:-3].strip("./").replace("/", ".")
        raise TaskError(f'{what} "{path}": write "{dotted}:{class_name}", the module and not its file')
    whose = f'{what} "{path}"'
    module = _import(module_name, whose)
    try:
        target: Any = attrgetter(class_name)(module)
    except AttributeError:
        classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)]
        known = ", ".join(cls.__name__ for cls in classes if cls is not base)
        raise TaskError(
            f"{whose}: module {module_name} ({module.__file__}) has no {class_name}; its {what}s: {known or 'none'}"
            + close_match(class_name, vars(module))
        ) from None
    if not (isinstance(target, type) and issubclass(target, base)):
        raise TaskError(f'{whose}: {class_name} is not a {what}; write "class {class_name}(dsframe.{base.__name__})"')
    return target


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
        hint = close_match(missing.rpartition(".")[2], _neighbours(missing))
        searched = ", ".join(entry or here for entry in sys.path)
        raise TaskError(f"{who}: no module named {missing}{hint}; searched {searched}") from error
    except DsframeError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = getattr(error, "lineno", None) or frame.lineno
        file = getattr(error, "filename", None) or frame.filename
        raise TaskError(f"{who}: importing {name} failed: {file}:{line}: {reason(error)}") from error


def _neighbours(module: str) -> list[str]:
    """Returns names of modules next to the missing one: in its package, else in the working directory."""
    package = module.rpartition(".")[0]
    paths = getattr(sys.modules.get(package), "__path__", []) if package else [Path.cwd()]
    entries = [entry for path in paths if Path(path).is_dir() for entry in Path(path).iterdir()]
    return [entry.stem for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").is_file()]


def close_match(word: str, candidates: Iterable[str]) -> str:
    """Returns ``; did you mean "..."?`` with the closest of ``candidates``; empty if none is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f'; did you mean "{matches[0]}"?' if matches else ""
