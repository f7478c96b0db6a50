"""What a person sees in a terminal: words are whole, labels have colours, and no moving line is left before another line."""

import io
import re
import sys
import time
from pathlib import Path

import pytest

from dsframe.run_dir.progress import Progress


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def bare(line):
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_moving_line_is_cleared_before_a_line_that_stays(evaluates, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = Progress(100, speaks=True, unit="samples", units_per_step=4)
    progress.begin(0)
    progress.advance()

    def lines():
        progress.say("evaluation after step 1: accuracy 0.9780")
        time.sleep(0.01)
        progress.say("saved")

    if evaluates:
        with progress.evaluation(16):
            progress.evaluated()
            lines()
    else:
        lines()
    progress.close()
    for stays in ("accuracy 0.9780", "saved"):
        before, _, after = screen(terminal.getvalue()).partition(stays)
        assert after.startswith("\n")
        assert before.rpartition("\n")[2].strip() in ("", "evaluation after step 1:"), before
    assert f" 1/{16 if evaluates else 100} " in bare(terminal.getvalue())
    assert evaluates or screen(terminal.getvalue()).endswith("saved\n"), "no bar is left"


def test_a_resumed_run_shows_where_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = Progress(100, speaks=True, unit="samples", units_per_step=4)
    progress.begin(40)
    assert " 40/100 " in bare(terminal.getvalue())
    progress.log(50, {}, 4.0, 0)
    assert "left" not in terminal.getvalue(), "the bar says it"
    progress.close()


def test_a_logged_line_has_rate_memory_and_what_is_left(monkeypatch, capsys):
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = Progress(100, speaks=True, unit="samples", units_per_step=4, home=Path("/place"))
    progress.begin(10)
    now[0] += 20.0
    progress.pause(10.05)  # an evaluation
    progress.log(20, {"loss": 0.5}, progress.rate(20), 3 << 20)
    progress.say("saved /place/runs/a")
    now[0] += 1.0
    progress.log(30, {}, progress.rate(30), 0)
    progress.log(31, {}, 0.0, 0)
    lines = ("step  20/100  loss 0.5  4 samples/s  3 MiB  1:20 left", "saved runs/a")
    later = ("step  30/100  40 samples/s  0 MiB  0:07 left", "step  31/100  0 MiB")
    assert capsys.readouterr().err.splitlines() == [*lines, *later]


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_another_rank_says_nothing_and_a_full_disk_ends_nothing(monkeypatch, capsys):
    for speaks in (False, True):
        Progress(100, speaks=speaks, unit="samples", units_per_step=4).say("saved")
        assert capsys.readouterr().err == "saved\n" * speaks
    monkeypatch.setattr(sys, "stderr", Full())
    Progress(100, speaks=True, unit="samples", units_per_step=4).say("saved")


def screen(written):
    """What a terminal of one moving line shows: each carriage return begins the line again."""
    shown = []
    for line in bare(written).replace("\x1b[A", "").split("\n"):
        cells = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return "\n".join(shown)
