"""A run's page: whole by itself, and its figures are those of the run's directory."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

from dsframe.cli import main
from dsframe.tools.report.page import charts
from dsframe.tools.report.runs import names, read_run
from tests.files import write_json


def write_run(folder, losses, **more):
    """A run's directory, as a run leaves it."""
    folder.mkdir(parents=True)
    lines = [{"run": {"description": "an <engine>", "world_size": 2, "start_seconds": 1.5}}]
    for step, loss in enumerate(losses, start=1):
        lines.append({"step": step, "loss": loss, "rate": 100.0 * step, "learning_rate": 0.1, "gradient_norm": None})
        if step % 2:
            lines.append({"step": step, "evaluation": {"accuracy": 0.5, "loss": 2 * loss}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if more:
        write_json(folder / "summary.json", lines[0]["run"] | more)
        write_json(
            folder / "run.json",
            {"command": ["python", "a b"], "versions": {"torch": "2", "horovod": None}, "git": None},
        )
        write_json(folder / "config.json", {"train_batch_size": 8})
    return folder


class Reader(HTMLParser):
    """Cells of tables by their row, and everything that would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.fetched = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href")]
        self._in = tag
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in in ("th", "td"):
            self.rows[-1].append(data)


def test_a_page_of_two_runs(tmp_path, capsys):
    finished = {
        "steps": 3, "rate": 400.0, "unit": "samples", "units_per_step": 8, "seconds": 2.0, "first_step_seconds": 0.5,
        "startup_seconds": {"python": 4.0, "engine": 1.5, "first step": 0.75},
        "metrics": {"accuracy": 0.5}, "peak_memory_bytes": [2**20, 3 * 2**20],
    }  # fmt: skip
    runs = [write_run(tmp_path / "a", [3.0, 2.0, 1.0], **finished), write_run(tmp_path / "b", [3.0, 2.5, math.nan])]
    page = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "-o", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page)]
    text = page.read_text()
    read = Reader(text)
    assert read.fetched == []
    assert set(re.findall(r"url\(.", text)) <= {"url(#"}, "of the page itself"
    rows = {row[0]: row[1:] for row in read.rows if row}
    assert rows["engine"] == ["an <engine>", "an <engine>"]
    assert rows["state"] == ["finished", "not finished"]
    assert (rows["command"], rows["versions"]) == (["python 'a b'"], ["torch 2"])
    assert "git" not in rows
    assert rows["last training loss"] == ["1", "2.5"]
    assert rows["largest difference of the loss"] == ["0.5"]
    assert rows["time to first step, s"][0] == "6.25"
    assert rows["peak memory of the fullest rank, MiB"][0] == "3"
    pictures = re.findall(r"<figure>(.*?)</figure>", text, re.DOTALL)
    titles = [ElementTree.fromstring(picture).attrib["aria-label"] for picture in pictures]
    assert titles == ["Loss", "Learning rate", "Speed during training", "Evaluation: accuracy"]
    assert names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_without_matplotlib_there_are_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dsframe.tools.report.page.available", lambda: False)
    run = write_run(tmp_path / "a", [3.0, 2.0, 1.0])
    short = write_run(tmp_path / "b", [2.0])
    assert charts([read_run(short)]) == [], "of single points"
    assert main(["report", str(run), str(short)]) == 0
    text = (run / "report.html").read_text()
    assert "<svg" not in text
    assert "pip install &quot;dsframe[plots]&quot;" in text
    assert {row[0]: row[1:] for row in Reader(text).rows if row}["last training loss"] == ["1", "2"]
