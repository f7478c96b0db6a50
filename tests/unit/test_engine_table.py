"""Engines of installed packages: found by their entry points, named in files, refused in words where the package is broken."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from dsframe.config import load
from dsframe.engines import examine
from dsframe.engines.table import BUILT_IN, Entry, _Table
from tests.files import ds_config, write_json
from tests.processes import REPOSITORY, run_program

ENTRIES = """
from dsframe.config.schema.base import Count, Section
from dsframe.engines import Entry

class Options(Section):
    rounds: Count = 1

def rules(context):
    if context.world_size == 3:
        context.conflict(("dsframe", "engine"), "three is one too many", "start 2")

OURS = Entry("ours:Engine", rules="ours:rules", options="ours:Options")
def made(): return Entry("ours:Engine", package="a_package_that_nobody_has")
WRONG = 7
"""
POINTS = {"my-engine": "ours:OURS", "my-made": "ours:made", "my-wrong": "ours:WRONG", "my-gone": "nowhere:X"}


def package(folder, name, points):
    """What pip leaves of an installed package."""
    folder.mkdir(exist_ok=True)
    (folder / "ours.py").write_text(ENTRIES)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{engine} = {target}\n" for engine, target in points.items())
    (info / "entry_points.txt").write_text(f"[dsframe.engines]\n{lines}")


def check(folder, section, *arguments):
    """What ``dsframe check`` says of a file with this section, where the packages of ``folder`` are installed."""
    file = folder / "my.json"
    write_json(file, ds_config(6, {"type": "SGD", "params": {}}, **section))
    done = run_program(
        [sys.executable, "-m", "dsframe.cli", "check", str(file), *arguments],
        check=False,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
    )
    return done.returncode, done.stdout + done.stderr


def test_an_engine_from_outside_is_named_like_any_other(tmp_path):
    package(tmp_path, "ours", POINTS)
    assert check(tmp_path, {"engine": "my-engine", "engine_options": {"rounds": 2}})[0] == 0
    assert check(tmp_path, {}, "--engine", "my-engine")[0] == 0
    code, said = check(tmp_path, {"engine": "my-engine"}, "-np", "3")
    assert code == 2
    assert "dsframe.engine: three is one too many; start 2" in said


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"engine": "my-egin"}, 'did you mean "my-engine"?'),
        ({"engine": "my-engine", "engine_options": {"rounds": 0}}, "dsframe.engine_options.rounds: 0 must be above 0"),
        ({"engine": "my-wrong"}, 'engine "my-wrong" of the package ours is int, not dsframe.engines.Entry'),
        ({"engine": "my-gone"}, 'engine "my-gone" of the package ours cannot be loaded: No module named \'nowhere\''),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_words(tmp_path, section, message):
    package(tmp_path, "ours", POINTS)
    code, said = check(tmp_path, section)
    assert code == (4 if section["engine"] in ("my-wrong", "my-gone") else 2)  # the package's mistake, not the file's
    assert "Traceback" not in said
    assert message in said


def test_options_of_an_engine_that_takes_none_have_no_effect(tmp_path):
    code, said = check(tmp_path, {"engine": "ddp", "engine_options": {"rounds": 2}}, "--strict")
    assert code == 1
    assert 'has no effect: engine "ddp" takes none' in said


def test_a_name_belongs_to_one_package(tmp_path):
    package(tmp_path, "ours", POINTS)
    package(tmp_path, "theirs", {"my-engine": "elsewhere:X", "ddp": "elsewhere:X"})
    code, said = check(tmp_path, {"engine": "my-engine"})
    assert code == 4
    assert 'engine "my-engine" is offered by ours and theirs; uninstall all but one' in said
    assert check(tmp_path, {"engine": "ddp"})[0] == 0, "what is built in stays what it is"


MINE = Entry("mine:Engine")


def test_an_engine_that_is_installed_twice_or_named_like_one_of_ours_is_listed_once(monkeypatch):
    points = [EntryPoint(name, f"{__name__}:MINE", "") for name in ("mine", "ddp", "mine")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    assert list(table := _Table()) == [*BUILT_IN, "mine"]
    assert table["mine"] is MINE


@pytest.mark.parametrize("engine", BUILT_IN)
def test_what_all_engines_train_is_refused_by_none(engine):
    file = ds_config(8, "AdamW", 1e-3, {"gradient_allreduce_op": "sum"}, on_nonfinite="skip")
    assert examine(load(file), engine)[0] == []


def test_packages_are_looked_through_only_for_names_that_are_not_built_in():
    code = (
        "import importlib.metadata as metadata, sys\n"
        "metadata.entry_points = lambda group: [] if group == 'pydantic' else 1 / 0\n"
        "from dsframe.config import load\n"
        "load({'train_batch_size': 8, 'dsframe': {'engine': 'ddp'}})\n"
        "from dsframe.engines import TABLE\n"
        "TABLE['ddp'], 'horovod' in TABLE\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=REPOSITORY)
