"""What marks output. ``tests/engines/test_loggers.py`` has real runs with it."""

import io
import os
import sys

import pytest

from dsframe.config import load
from dsframe.run_dir.output import PrefixedStream, directory_of, silence
from tests.files import ds_config, write_json
from tests.processes import REPOSITORY, run_program

PROGRAM = """
import os, sys
from dsframe.run_dir.output import marked
from dsframe.cluster.world import World
print("before")
with marked(World(3, 4, 3, 4, launcher=sys.argv[1])):
    print("one\\ntwo", end=" ")
    print("[rank 3] marked already", file=sys.stderr)
    os.write(2, b"native\\n")
    print("[rank 3] last", end="", file=sys.stderr)
print("after")
"""
MARKED = "before\n[rank 3] one\n[rank 3] two \nafter\n"
PLAIN = "before\none\ntwo after\n"


@pytest.mark.parametrize(
    ("launcher", "out"),
    [("torchrun", MARKED), ("horovodrun", PLAIN)],
)
def test_what_other_ranks_print_says_whose_it_is(launcher, out):
    command = [sys.executable, "-c", PROGRAM, launcher]
    done = run_program(command, cwd=REPOSITORY)
    assert done.stdout == out
    assert set(done.stderr.splitlines()) == {"[rank 3] marked already", "native", "[rank 3] last"}


def test_of_a_progress_bar_the_last_text_is_written():
    out = io.StringIO()
    stream = PrefixedStream(out, "> ")
    stream.write("1 %\r2 %\r")
    stream.writelines(["3 %\n", "\n"])
    assert stream.write("a\nb") == 3
    stream.close_line()
    assert out.getvalue() == "> 3 %\n\n> a\n> b\n"


def test_libraries_are_silent_unless_somebody_wants_them(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    silence(verbose=True, quiet=False)
    assert os.environ == {}
    silence(verbose=False, quiet=True)
    assert os.environ == {"WANDB_SILENT": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    silence(verbose=False, quiet=True)
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_a_run_is_named_after_its_file_or_its_task(tmp_path):
    write_json(tmp_path / "mine.json", ds_config(4))
    for file, name in ((tmp_path / "mine.json", "mine"), (ds_config(4), "Net")):
        assert str(directory_of(load(file), "ddp", "Net")) == f"runs/{name}-ddp"
    assert str(directory_of(load(ds_config(4, run_dir="own")), "ddp", "Net")) == "own"
