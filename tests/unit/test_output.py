"""What marks output. ``tests/engines/test_loggers.py`` has real runs with it."""

import contextlib
import io
import json
import os
import sys
import time

import pytest

from dsframe import train
from dsframe.cluster import world as worlds
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.errors import ConfigError, DataError, DsframeError, Problem, StoppedError, TrainingError
from dsframe.host import supervise
from dsframe.run_dir import outcome
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


class LeaderlessError(DataError):
    first_is_gone = True


LOST = "Connection closed by peer [1]"


@pytest.mark.parametrize(
    ("error", "rank", "code", "waits", "said"),
    [
        (DataError("a"), 0, DataError, [], "dsframe: error: a [data]"),
        (DataError("a"), 1, DataError, [10.0], "[rank 1] dsframe: error: a [data]"),
        (LeaderlessError("a"), 0, DataError, [10.0], "[rank 0] dsframe: error: a [data]"),
        (LeaderlessError("a"), 1, DataError, [], "dsframe: error: a [data]"),
        (ConfigError([Problem("error", "a", "b", code="c")]), 0, ConfigError, [], "error: a: b [c]"),
        (StoppedError("a"), 0, StoppedError, [], "dsframe: "),
        (StoppedError("a"), 1, StoppedError, [1.0], ""),
        (ValueError("a"), 0, DsframeError, [], "[rank 0] "),
        (ValueError("a"), 2, DsframeError, [3.0], "[rank 2] "),
        (ValueError(LOST), 0, DsframeError, [], "[rank 0] "),
        (RuntimeError(f"{LOST}\nb"), 1, TrainingError, [10.0], f"[rank 1] {outcome.LOST_A_PEER}, see its message ({LOST})"),
        (RuntimeError("DataLoader worker (pid 5) ended"), 0, DataError, [], "dsframe: error: a process that reads data"),
    ],
)  # fmt: skip
def test_an_error_is_said_once_by_the_rank_that_has_it(error, rank, code, waits, said, monkeypatch, tmp_path, capsys):
    waited, report = [], tmp_path / "report"
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(train, "leave_at_once", sys.exit)
    monkeypatch.setattr(outcome, "_current", outcome.Reporter(str(report), rank))
    leave = train.leave if isinstance(error, DsframeError) else train.crash
    with pytest.raises(SystemExit, match=f"^{code.exit_code}$"):
        leave(error, World(rank, 4, rank % 2, 2), verbose=False)
    printed = capsys.readouterr().err
    assert (waited, printed.startswith(said), bool(printed)) == (waits, True, bool(said))
    assert json.loads(report.read_text())["code"] == code.exit_code
    with contextlib.ExitStack() as stack:
        stack.push(lambda *_: True)
        stack.push(lambda _, raised, __: leave(raised, World(rank, 4, rank % 2, 2), verbose=True))
        raise error
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "options", "said"),
    [(0, [], True), (1, [], False), (0, ["--quiet"], False), (0, ["--report", "report"], False)],
)
def test_a_files_problems_are_said_once(rank, options, said, here, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    dying = []
    monkeypatch.setattr(outcome, "_current", outcome.reporter())
    monkeypatch.setattr(supervise, "die_with_parent", lambda: dying.append(rank))
    monkeypatch.setattr(worlds, "here", lambda: World(rank, 2, rank, 2, launcher="torchrun" if rank else "python"))
    monkeypatch.setattr("dsframe.run.choose", interrupt)
    monkeypatch.setattr(train, "leave_at_once", sys.exit)
    write_json(here / "mine.json", ds_config(4, sections={"zero_optimization": {"overlap_comm": True}}))
    with pytest.raises(SystemExit, match=r"^130$"):
        train.main(argv=["--config", "mine.json", *options])
    assert ("warning: " in capsys.readouterr().err) == said
    assert dying == [rank] * rank


def test_short_options_are_keys_of_the_file():
    assert train.parse(["--engine", "ddp", "--run-dir", ""]).set == ["dsframe.engine=ddp", "dsframe.run_dir="]


def test_who_leaves_at_once_has_said_all():
    program = "from dsframe import train; print(1); train.leave_at_once(0)"
    done = run_program([sys.executable, "-c", program], cwd=REPOSITORY, env=os.environ | {"PYTHONUNBUFFERED": ""})
    assert done.stdout == "1\n"
