"""A run's directory from somebody else: one line, nothing outside of it is written, and a terminal shows letters only."""

import os

import pytest

from dsframe.cli import main
from dsframe.run_dir import record
from tests.files import read_json, write_json
from tests.unit.test_report_page import write_run


def a_run(folder):
    finished = {"metrics": {}, "peak_memory_bytes": [1 << 20], "launcher": "python", "seconds": 1.0, "steps": 2}
    return write_run(folder, [2.0, 1.0], **finished)


def test_a_link_in_the_page_s_place_is_not_followed(tmp_path):
    run, mine = a_run(tmp_path / "theirs"), tmp_path / "mine"
    mine.write_text("mine alone")
    (run / "report.html").symlink_to(mine)
    assert main(["report", str(run)]) == 0
    assert mine.read_text() == "mine alone"
    assert not (run / "report.html").is_symlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "run.json", "config.json"])
@pytest.mark.parametrize("how", ["fifo", "device", "no JSON", "deep", "a list"])
def test_what_is_no_record_is_one_line(name, how, tmp_path, capsys):
    run = a_run(tmp_path / "theirs")
    (run / name).unlink(missing_ok=True)
    if how == "fifo":
        os.mkfifo(run / name)
    elif how == "device":
        (run / name).symlink_to("/dev/zero")
    else:
        (run / name).write_text({"no JSON": "{\n", "deep": "[" * 100_000 + "\n", "a list": "[1]\n"}[how])
    code = main(["report", str(run)])
    told = capsys.readouterr().err
    assert code in (0, 6)
    assert told.count("\n") == (code == 6)


def test_names_do_not_move_the_cursor(tmp_path, capsys):
    runs = [a_run(tmp_path / name) for name in ("one", "two")]
    summary = read_json(runs[1] / "summary.json")
    write_json(runs[1] / "summary.json", {**summary, "description": "\x1b[2J\nmine"})
    assert main(["compare", *map(str, runs)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_damaged_line_does_not_keep_a_run_from_going_on(tmp_path):
    lines = ['{"step": 1}\n', "\0\0\0\n", "[]\n", '{"step": "x"}\n', '{"step": 2}\n', '{"step": 3}\n', '{"st']
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert record._lines_until(tmp_path / "metrics.jsonl", 2) == [lines[0], lines[4]]
