"""The rules of the house, read from the sources: which way imports point, who may know DeepSpeed, Horovod and torch, what is
never committed. Each rule also fails when it finds nothing to look at."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

PACKAGE = REPOSITORY / "dsframe"

LAYERS = (
    {"errors", "phases"},
    {"world", "supervise"},
    {"config", "tasks/_torchvision"},
    {"data"},
    {"tasks"},
    {"switches", "cores", "allocator"},
    {"rendezvous", "optimizers", "schedules", "leftovers", "checkpoint"},
    {"process_group", "collectives"},
    {"engine"},
    {"engines", "report"},
    {"plan"},
    {"evaluation", "weighting"},
    {"trainer"},
    {"run"},
    {"train"},
    {"convert", "doctor", "check"},
    {"launch"},
    {"cli"},
)
"""Lowest first. A module imports from its own unit and from lower layers; what only type checkers read may look up."""

ALONE = ("tasks/_torchvision",)
"""Files that have another place than their folder: the remedy for torchvision's import."""

MAY_IMPORT = {
    "deepspeed": {"engines/library.py"},
    "horovod": {"engines/horovod.py", "engines/horovod_elastic.py", "collectives.py"},
    "torchvision": {"tasks/_torchvision.py"},
    "transformers": {"tasks/_transformers.py"},
}
"""Who may import these, anywhere in the file. collectives.py measures Horovod beside the others, in a process of its own."""

LIGHT = (
    "config",
    "world.py",
    "errors.py",
    "cli.py",
    "train.py",
    "engines/__init__.py",
    "__init__.py",
    "check.py",
    "doctor.py",
    "supervise.py",
    "launch",
    "report/outcome.py",
    "data/fetch.py",
    "phases.py",
)
"""What imports no torch when it is imported: torch takes a second, and thread counts are settled before it."""


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    at_module_level: bool
    for_types_only: bool

    def __str__(self) -> str:
        return f"dsframe/{self.file}:{self.line} imports {self.module}"


@cache
def sources() -> dict[str, ast.Module]:
    found = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 20
    return found


@cache
def imports() -> tuple[Import, ...]:
    found = tuple(entry for file, tree in sources().items() for entry in in_file(file, tree))
    assert len(found) > 200
    return found


def in_file(file: str, tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, top: bool, types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, top, types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"dsframe/{file}:{node.lineno}: relative import; say where from"
            for alias in node.names:
                yield Import(file, node.lineno, f"{node.module}.{alias.name}", top, types)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
                yield Import(file, node.lineno, str(node.args[0].value), top, types)
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            yield from visit(child, top and not inside, types or guard)

    yield from visit(tree, True, False)


def layer(unit: str) -> int:
    for number, units in enumerate(LAYERS):
        if unit in units:
            return number
    raise AssertionError(f"dsframe/{unit} has no place among the layers: give it one in {Path(__file__).name}")


def unit_of(file: str) -> str:
    """The file or folder right below dsframe/, or one of the files that stand for themselves."""
    alone = next((name for name in ALONE if file.startswith(name)), None)
    return alone or Path(file).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    checked, wrong = 0, []
    for entry in imports():
        target = entry.module.split(".")
        if target[0] != "dsframe" or entry.file == "__init__.py" or len(target) < 2 or target[1].startswith("__"):
            continue
        own, other = unit_of(entry.file), unit_of("/".join(target[1:]))
        checked += 1
        if own != other and layer(own) <= layer(other) and not entry.for_types_only:
            wrong.append(str(entry))
    assert checked > 100
    assert not wrong, "\n".join(wrong)


def test_data_and_tasks_read_the_settings_and_nothing_else_of_the_configuration() -> None:
    wrong = [
        str(entry)
        for entry in imports()
        if unit_of(entry.file) in ("data", "tasks")
        and entry.module.startswith("dsframe.config")
        and not entry.module.startswith("dsframe.config.settings")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_library_has_its_own_file(package: str) -> None:
    users = {entry.file: entry for entry in imports() if entry.module.split(".")[0] == package}
    assert set(users) & MAY_IMPORT[package], f"nobody imports {package} any more: this test looks at nothing"
    assert [str(entry) for file, entry in users.items() if file not in MAY_IMPORT[package]] == []


def light_files() -> list[str]:
    return [file for file in sources() if any(file == light or file.startswith(f"{light}/") for light in LIGHT)]


def test_what_is_read_before_torch_imports_no_torch() -> None:
    files = light_files()
    assert len(files) > 10
    heavy = {"torch", "numpy", "deepspeed", "horovod", "torchvision", "transformers"}
    wrong = [
        str(entry)
        for entry in imports()
        if entry.file in files
        and entry.at_module_level
        and not entry.for_types_only
        and entry.module.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_them_imports_no_torch() -> None:
    modules = sorted("dsframe." + file.removesuffix(".py").replace("/", ".") for file in light_files())
    modules = [module.removesuffix(".__init__") for module in modules]
    code = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps(sorted({{"torch", "numpy", "deepspeed", "horovod", "torchvision", "transformers"}} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("file", ["trainer.py", "evaluation.py", "weighting.py", "engine.py"])
def test_the_loop_names_no_engine(file: str) -> None:
    from dsframe.engines import TABLE

    names = {*TABLE, "zero", "pipeline", "ddp", "fsdp", *(entry.target.partition(":")[2] for entry in TABLE.values())}
    assert {"deepspeed", "horovod"} <= names
    tree = sources()[file]
    words: dict[str, int] = {}
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for text in _texts(node):
            if id(node) not in documentation:
                words |= {word.lower(): getattr(node, "lineno", 0) for word in re.split(r"[^A-Za-z0-9]+", text)}
    assert len(words) > 50
    named = {name: words[name.lower()] for name in names - {"single"} if name.lower() in words}
    assert named == {}, "an engine is named where every engine should look the same"


def _texts(node: ast.AST) -> list[str]:
    """Every identifier and string of a node; docstrings under fields are prose, and may name what they like."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(alias.name for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
        return [] if node.value.endswith(".") else [node.value]
    return []


def committed() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode != 0:  # an unpacked archive
        hidden = {".git", ".venv", ".setup", "runs", "__pycache__"}
        names = [str(p.relative_to(REPOSITORY)) for p in REPOSITORY.rglob("*") if not hidden & set(p.parts)]
    found = [REPOSITORY / name for name in names if (REPOSITORY / name).is_file()]
    assert len(found) > 50
    return found


FORBIDDEN = {
    "a path of somebody's machine": re.compile(
        r"/(?:home|Users)/(?!USER|user\b|you\b)[a-z]\w+/|/work/(?:main|shared)\b|/root/"
    ),
    "the address of a package index": re.compile(
        r"--(?:extra-)?index-url[= ]+https?://(?!example\.)|/simple/?[\"'\s]|file:///opt"
    ),
    "pickle": re.compile(r"weights_only=False|allow_pickle=True"),
}


def test_nothing_of_one_machine_is_committed() -> None:
    wrong, read = [], 0
    for path in committed():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        read += 1
        for what, pattern in FORBIDDEN.items():
            wrong += [
                f"{path.relative_to(REPOSITORY)}:{number}: {what}: {line.strip()[:100]}"
                for number, line in enumerate(text.splitlines(), 1)
                if pattern.search(line)
            ]
    assert read > 50
    assert not wrong, "\n".join(wrong)


def test_no_link_is_committed() -> None:
    """One to somebody's environment has once taken that environment's place: git replaces what it ignores without a word."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False
    )
    entries = listed.stdout.splitlines()
    assert len(entries) > 50 or listed.returncode != 0  # an unpacked archive
    assert [entry for entry in entries if entry.startswith("120000")] == []


def test_nothing_large_or_compiled_is_committed() -> None:
    binary = {".so", ".whl", ".pt", ".bin", ".gz", ".zip", ".tar", ".safetensors", ".npz", ".pyc"}
    wrong = [
        str(path.relative_to(REPOSITORY))
        for path in committed()
        if path.suffix in binary or path.stat().st_size > 400_000
    ]
    assert not wrong, "\n".join(wrong)


def test_files_hold_one_idea_each() -> None:
    lengths = {file: len((PACKAGE / file).read_text().splitlines()) for file in sources()}
    assert {file: length for file, length in lengths.items() if length > 320} == {}
