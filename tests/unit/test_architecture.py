"""The rules of the house, read from the sources: which way imports point, who may know DeepSpeed, Horovod and torch, what is
never committed. Each rule also fails when it finds nothing to look at."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

PACKAGE = REPOSITORY / "dsframe"

LAYERS = (
    "text",
    "errors",
    "version",
    "user_class",
    "values",
    "host",
    "cluster",
    "engines/table",
    "config",
    "data",
    "results",
    "hooks",
    "tasks",
    "model",
    "engine",
    "checkpoint",
    "engines",
    "run_dir",
    "guard",
    "events",
    "training",
    "trainer",
    "job",
    "inference",
    "run",
    "arguments",
    "train",
    "tools",
    "cli",
    "__main__",
)
"""Files and folders, lowest first. A module imports from its own folder and from lower layers: late imports and those for type
checkers count. Nothing but the command line imports the tools."""

ALONE = ("engines/table",)
"""The file in another layer than its folder: the engines' names, which the configuration checks."""

MAY_IMPORT = {
    "deepspeed": {"engines/deepspeed/imports.py"},
    "horovod": {"engines/horovod/engine.py"},
    "torchvision": {"data/_torchvision.py"},
    "transformers": {"model/hf_schedules.py", "tasks/_transformers.py"},
}
"""Who may import these, anywhere in the file. DeepSpeed's patches.py looks up by name what it patches.
collectives.py measures Horovod beside the others, in a process of its own."""

LIGHT = (
    "config",
    "cluster/world.py",
    "errors.py",
    "cli.py",
    "train.py",
    "engines/__init__.py",
    "engines/table.py",
    "engines/rules.py",
    "__init__.py",
    "tools/check.py",
    "tools/commands.py",
    "tools/activate.py",
    "tools/init.py",
    "tools/doctor.py",
    "host/processes.py",
    "host/supervise.py",
    "tools/launch",
    "run_dir/outcome.py",
    "host/phases.py",
)
"""What imports no torch when it is imported: torch takes a second, and thread counts are settled before it."""


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str

    def __str__(self):
        return f"dsframe/{self.file}:{self.line} imports {self.module}"


@cache
def sources():
    found = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 20
    return found


@cache
def imports():
    found = tuple(entry for file, tree in sources().items() for entry in in_file(file, tree))
    assert len(found) > 200
    return found


def in_file(file, tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"dsframe/{file}:{node.lineno}: relative import; say where from"
            for alias in node.names:
                yield Import(file, node.lineno, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
                yield Import(file, node.lineno, str(node.args[0].value))


def layer(unit):
    assert unit in LAYERS, f"dsframe/{unit} has no place among the layers: give it one in {Path(__file__).name}"
    return LAYERS.index(unit)


def unit_of(file):
    """The file or folder right below dsframe/, or one of the files that stand for themselves."""
    alone = next((name for name in ALONE if file.startswith(name)), None)
    return alone or Path(file).parts[0].removesuffix(".py")


def test_imports_point_one_way():
    checked, wrong = 0, []
    for entry in imports():
        target = entry.module.split(".")
        if target[0] != "dsframe" or entry.file == "__init__.py" or len(target) < 2 or target[1].startswith("__"):
            continue
        own, other = unit_of(entry.file), unit_of("/".join(target[1:]))
        checked += 1
        if own != other and layer(own) <= layer(other):
            wrong.append(str(entry))
    assert checked > 100
    assert not wrong, "\n".join(wrong)


def imported_by_file():
    """The files that each imports; late imports and those for type checkers count."""
    files = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in sources()}
    imported = {file: set() for file in sources()}
    for entry in imports():
        name = entry.module.removeprefix("dsframe.")
        target = files.get(name) or files.get(name.rpartition(".")[0])
        if entry.module.startswith("dsframe.") and target not in (None, entry.file, "__init__.py"):
            imported[entry.file].add(str(target))
    assert sum(map(len, imported.values())) > 500
    return imported


def test_files_import_each_other_in_no_circle():
    """Within a folder too."""
    imported = imported_by_file()
    while free := {file for file, targets in imported.items() if not targets}:
        imported = {file: targets - free for file, targets in imported.items() if file not in free}
    assert not imported, "in a circle, or above one: " + ", ".join(imported)


@pytest.mark.parametrize(("file", "most"), [("engine.py", 7_230), ("job.py", 18_900)])
def test_what_a_reader_must_know_does_not_grow(file, most):
    """Lines of a file and of all that it imports, directly or not."""
    imported, reached, ahead = imported_by_file(), set(), [file]
    while ahead:
        reached.add(name := ahead.pop())
        ahead += imported[name] - reached
    assert sum(len((PACKAGE / name).read_text().splitlines()) for name in reached) < most


def test_data_and_tasks_read_the_settings_and_nothing_else_of_the_configuration():
    wrong = [
        str(entry)
        for entry in imports()
        if unit_of(entry.file) in ("data", "tasks")
        and entry.module.startswith("dsframe.config")
        and not entry.module.startswith("dsframe.config.schema.settings")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_library_has_its_own_file(package):
    users = {entry.file: entry for entry in imports() if entry.module.split(".")[0] == package}
    assert set(users) & MAY_IMPORT[package], f"nobody imports {package} any more: this test looks at nothing"
    assert [str(entry) for file, entry in users.items() if file not in MAY_IMPORT[package]] == []


PATCH_FILES = {
    "engines/deepspeed/patches.py",
    "engines/torch_patches.py",
}
THEIRS = {
    "engine",
    "_engine",
    "optimizer",
    "deepspeed",
    "dist",
    "torch",
    "hvd",
    "wrapped",
    "stage",
    "auto",
    "coordinator",
}
"""What dsframe's engines call the objects and modules of the libraries."""
STATE = {
    "engines/ddp.py": {"broadcast_buffers"},
    "engines/deepspeed/state.py": {"global_steps", "micro_steps", "global_samples", "_hp_optimizer_states_linked"},
}
"""A public switch of torch's; and numbers, which a checkpoint brings: how far the engine is, whether its views are made again."""


def assigned(node):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        for one in ast.walk(target):
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                yield one


def test_libraries_are_patched_in_their_files_only():
    """An attribute of a library's object or module that is assigned, mock.patch, or an entry of sys.modules."""
    wrong, seen = [], 0
    for file, tree in sources().items():
        if not file.startswith("engines/"):
            continue
        for node in ast.walk(tree):
            found = [one for one in assigned(node) if ast.unparse(one.value).split(".")[-1] in THEIRS]
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            stores = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            hidden = text.startswith(("mock.patch", "warnings.filterwarnings")) or (
                stores and text.startswith(("sys.modules[", "deepspeed."))
            )
            names = {one.attr for one in found} - STATE.get(file, set())
            if file in PATCH_FILES:
                seen += len(found) + hidden
            elif names or hidden:
                wrong.append(f"dsframe/{file}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}")
    assert seen > 10
    assert not wrong, "\n".join(wrong)


def light_files():
    return [file for file in sources() if any(file == light or file.startswith(f"{light}/") for light in LIGHT)]


def test_importing_them_imports_no_torch():
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


MAY_NAME_ENGINES = {
    "cluster/world.py": "the launcher of that name, and its variables",
    "tools/launch/launchers.py": "the launcher of that name",
    "tools/launch/command.py": "the launcher of that name",
    "tools/doctor.py": "the package and the launcher of that name",
    "tools/plan/footprint.py": "what each engine holds, for predictions",
    "tools/plan/choose.py": "the engines that a plan proposes, in its order",
    "run_dir/record.py": "the package of that name",
    "config/schema/settings.py": "whose defaults the file inherits, DeepSpeed's or torch's",
    "config/schema/monitor.py": "DeepSpeed's own default for the name of a project",
}
"""Files outside engines/ with a string that is also an engine's name, and what it is there."""


def test_no_engine_is_named_outside_the_engines():
    """What dsframe needs to know of one stands in its entry: an engine from outside is planned and checked like its own."""
    from dsframe.engines import TABLE

    assert {"deepspeed", "horovod", "reference-ring"} <= set(TABLE)
    found = {}
    for file, tree in sources().items():
        if file.startswith("engines/"):
            continue
        keys = {id(part) for node in ast.walk(tree) for part in _key_path(node)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in keys else None
            if isinstance(text, str) and (text in TABLE or "reference-" in text):
                found.setdefault(file, []).append(f"dsframe/{file}:{node.lineno}: {text[:60]!r}")
    assert [place for file, places in found.items() if file not in MAY_NAME_ENGINES for place in places] == []
    assert set(found) == set(MAY_NAME_ENGINES), "a file names none any more: take it off the list"


def _key_path(node):
    """The parts of a key's place in the file, ``("dsframe", "ddp", ...)``: options of an engine have its name."""
    parts = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
    first = parts[0] if parts else None
    return parts if isinstance(first, ast.Constant) and first.value == "dsframe" else []


def committed():
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


def test_nothing_of_one_machine_is_committed():
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


def test_no_link_and_nothing_large_or_compiled_is_committed():
    """A link to somebody's environment has once taken that environment's place: git replaces what it ignores without a word."""
    binary = {".so", ".whl", ".pt", ".bin", ".gz", ".zip", ".tar", ".safetensors", ".npz", ".pyc"}
    wrong = [
        str(path.relative_to(REPOSITORY))
        for path in committed()
        if path.is_symlink() or path.suffix in binary or path.stat().st_size > 400_000
    ]
    assert not wrong, "\n".join(wrong)


MOST_LINES, MOST_ARGUMENTS = 60, 7
TOO_LONG = set()
"""Still longer. Nothing is added here: what becomes short enough must be taken out."""
TOO_MANY_ARGUMENTS = {
    "checkpoint/changes.py:about",
    "checkpoint/saver.py:Saver.__init__",
    "data/loader.py:Loader.__init__",
    "data/source.py:ImageSource.__init__",
}
"""Still more. Nothing is added here either."""


def functions():
    """Every function with its name, ``file:Class.function``."""

    def visit(name, node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name + child.name, child
                yield from visit(f"{name}{child.name}.", child)
            else:
                yield from visit(f"{name}{child.name}." if isinstance(child, ast.ClassDef) else name, child)

    for file, tree in sources().items():
        yield from visit(f"{file}:", tree)


def test_a_function_can_be_read_at_once():
    """At most 60 lines and 7 arguments, ``self`` not counted. Fields of dataclasses and models are no arguments."""
    found = dict(functions())
    assert len(found) > 1000
    long = {name for name, one in found.items() if (one.end_lineno or 0) - one.lineno + 1 > MOST_LINES}
    many = set()
    for name, one in found.items():
        arguments = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
        if len([argument for argument in arguments if argument.arg not in ("self", "cls")]) > MOST_ARGUMENTS:
            many.add(name)
    assert long == TOO_LONG
    assert many == TOO_MANY_ARGUMENTS
