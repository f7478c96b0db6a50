"""A user's class by its name, ``package.module:Class``: tasks, hooks."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dsframe.errors import DsframeError, TaskError

Named = TypeVar("Named")


def named_class(path: str, base: type[Named], what: str) -> type[Named]:
    """The subclass of ``base`` named by ``package.module:Class``. ``what`` it is, for messages. Raises TaskError."""
    module_name, _, class_name = path.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name[:-3].strip("./").replace("/", ".")
        raise TaskError(f'{what} "{path}": write "{dotted}:{class_name}", the module and not its file')
    module = _import(module_name, f'{what} "{path}"')
    target: Any = module
    for part in class_name.split("."):
        if not hasattr(target, part):
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
                + close_match(class_name, [name for name in vars(module) if not name.startswith("_")])
            )
        target = getattr(target, part)
    if not (isinstance(target, type) and issubclass(target, base)):
        kind = (
            f"a class that does not derive from {base.__name__}" if isinstance(target, type) else type(target).__name__
        )
        raise TaskError(f'{what} "{path}": {class_name} is {kind}; write "class {class_name}(dsframe.{base.__name__})"')
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
        raise TaskError(
            f"{who}: no module named {missing}{close_match(missing.rpartition('.')[2], _neighbours(missing))}; "
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


def close_match(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean "..."?`` for the nearest of ``candidates``; empty where none is near."""
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f'; did you mean "{matches[0]}"?' if matches else ""
