"""The table of what dsframe uses inside of DeepSpeed: complete, and true of the installed release."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from dsframe.engines.deepspeed import internals, versions
from dsframe.engines.deepspeed.internals import INTERNALS
from dsframe.errors import EngineError
from tests.processes import REPOSITORY

PACKAGE = internals.package()
TABLE = {name for names in INTERNALS.values() for name in names}


@cache
def trees(folder):
    return [ast.parse(path.read_text()) for path in (REPOSITORY / "dsframe" / folder).rglob("*.py")]


def used():
    """Attributes that the engine's files read, set or ask for by name."""
    nodes = [node for tree in trees("engines/deepspeed") for node in ast.walk(tree)]
    asked = {"getattr", "hasattr", "setattr", "delattr"}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in asked]
    texts = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {str(text) for text in texts}


def ours():
    """Names that dsframe defines, and those of torch and the standard library."""
    names = set()
    for node in (node for tree in trees(".") for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    known = (
        torch,
        torch.Tensor,
        torch.nn.Linear(1, 1),
        torch.optim.SGD([torch.zeros(1)]),
        torch.distributed,
        dict,
        list,
        str,
        Path,
    )
    return names.union(*map(dir, known))


def test_nothing_is_used_that_is_not_in_the_table():
    files = {path: path.read_text(errors="ignore") for path in (PACKAGE / "runtime").rglob("*.py")}
    private = "\n".join(files.values())
    candidates = used() - ours()
    defined = {name for name in candidates if re.search(rf"(?:def {name}\(|\.{name}\s*=[^=])", private)}
    assert len(defined) > 50
    assert defined - TABLE == {"get_path", "model_type"}, "those are sysconfig's and transformers'"


def test_each_is_where_the_table_says_and_is_used():
    assert not internals.missing(PACKAGE)
    assert not TABLE - used()


def test_a_release_that_has_lost_one_is_refused(tmp_path, monkeypatch):
    versions.check("0.19.9", speaks=False)
    monkeypatch.setitem(INTERNALS, "runtime/engine.py", {"_no_such_name": ""})
    with pytest.raises(EngineError, match=r"DeepSpeed 0\.19\.9 has no longer .*: runtime/engine\.py: _no_such_name;"):
        versions.check("0.19.9", speaks=False)
    versions.check("0.19.8", speaks=False)
