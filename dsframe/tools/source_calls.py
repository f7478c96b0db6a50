"""The calls of a Python file with the arguments that stand there as values. Nothing is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsframe.config.read import foreign

_ENUMERATIONS = ("IntervalStrategy", "SaveStrategy", "SchedulerType", "OptimizerNames")
"""Of transformers: their members are written in lower case in files."""


@dataclass(frozen=True)
class Unknown:
    """A value that only the running program has."""

    parts: tuple[tuple[str, str], ...]
    """The source of it, or of each element of a list, with the function that an element calls, or ""."""


@dataclass(frozen=True)
class Call:
    """One call."""

    name: str
    arguments: Mapping[str, Any]
    """Values; :class:`Unknown` where it is none."""
    owner: str
    """Names of the functions around it and of what it is assigned to."""


def calls_of(text: str) -> list[Call]:
    """Returns the calls of a file in its order. Raises SyntaxError."""
    reader = _Reader(ast.parse(text))
    return [reader.call(node, owner) for node, owner in _calls(reader.tree, "")]


def notebook_code(notebook: Mapping[str, Any]) -> str:
    """Returns the Python of a notebook."""
    cells = notebook.get("cells", [])
    code = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    lines = "\n".join(code).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%", "?")))


def _calls(node: ast.AST, owner: str) -> Iterator[tuple[ast.Call, str]]:
    """Yields each call below a node, in the order of the text."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        owner = f"{owner} {node.name}"
    elif isinstance(node, ast.Assign):
        owner = " ".join([owner, *(ast.unparse(target) for target in node.targets)])
    if isinstance(node, ast.Call):
        yield node, owner
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, owner)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Reader:
    """Finds values: literals, names that are assigned a literal once, entries of such a dict, and defaults of argparse."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._constants: dict[str, list[ast.expr]] = {}
        self._defaults: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._constants.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.Call) and _name(node.func) == "add_argument":
                self._option(node)

    def _option(self, node: ast.Call) -> None:
        given = {word.arg: word.value for word in node.keywords}
        for flag in node.args:
            if isinstance(flag, ast.Constant) and "default" in given:
                self._defaults[str(flag.value).lstrip("-").replace("-", "_")] = given["default"]

    def call(self, node: ast.Call, owner: str) -> Call:
        name = _name(node.func)
        positions = foreign.table()["calls"].get(name, {}).get("", "").split()
        words = [*zip(positions, node.args, strict=False), *((word.arg or "**", word.value) for word in node.keywords)]
        return Call(name, {argument: self.value(value) for argument, value in words}, owner)

    def value(self, node: ast.expr) -> Any:
        node = self._settled(node)
        if isinstance(node, ast.Attribute) and _name(node.value) in _ENUMERATIONS:
            return node.attr.lower()
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            parts = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
            called = [_name(part.func) if isinstance(part, ast.Call) else "" for part in parts]
            return Unknown(tuple(zip(map(ast.unparse, parts), called, strict=True)))

    def _settled(self, node: ast.expr) -> ast.expr:
        """Follows a name to its only value, ``config["lr"]`` into such a dict, and an option of argparse to its default."""
        if isinstance(node, ast.Name) and len(self._constants.get(node.id, ())) == 1:
            return self._constants[node.id][0]
        if isinstance(node, ast.Subscript) and isinstance(table := self._settled(node.value), ast.Dict):
            entries = {ast.unparse(key): value for key, value in zip(table.keys, table.values, strict=True) if key}
            return entries.get(ast.unparse(node.slice), node)
        if isinstance(node, ast.Attribute) and _name(node.value) in ("args", "opt", "opts", "options", "hparams"):
            return self._defaults.get(node.attr, node)
        return node
