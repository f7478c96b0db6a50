"""A run's page: whole by itself, and its figures are those of the run's directory."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dsframe.cli import main
from dsframe.report.runs import names
from dsframe.report.svg import Axis, Line, chart


def write_run(folder: Path, losses: list[float], **more: Any) -> Path:
    """A run's directory, as a run leaves it."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"run": {"description": "an <engine>", "world_size": 2, "start_seconds": 1.5}}]
    for step, loss in enumerate(losses, start=1):
        lines.append({"step": step, "loss": loss, "rate": 100.0 * step, "learning_rate": 0.1, "gradient_norm": None})
    lines.append({"step": len(losses), "evaluation": {"accuracy": 0.5}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if more:
        (folder / "summary.json").write_text(json.dumps(lines[0]["run"] | more))
        (folder / "run.json").write_text(
            json.dumps({"command": ["python", "a b"], "versions": {"torch": "2"}, "git": None})
        )
        (folder / "config.json").write_text(json.dumps({"train_batch_size": 8}))
    return folder


class Reader(HTMLParser):
    """Cells of tables by their row, the figures, and everything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.figures: Any = None
        self.fetched: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href")]
        self._in = tag
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("th", "td"):
            self.rows[-1].append(data)
        elif self._in == "script":
            self.figures = json.loads(data)


def test_a_page_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = {
        "steps": 3, "rate": 400.0, "unit": "samples", "units_per_step": 8, "seconds": 2.0, "first_step_seconds": 0.5,
        "startup_seconds": {"python": 4.0, "engine": 1.5, "first step": 0.75},
        "metrics": {"accuracy": 0.5}, "peak_memory_bytes": [2**20, 3 * 2**20],
        "predicted": {"memory_bytes": 2 * 2**20, "seconds_per_step": 0.03, "sent_bytes_per_step": {"gradients": 5e6}},
    }  # fmt: skip
    runs = [write_run(tmp_path / "a", [3.0, 2.0, 1.0], **finished), write_run(tmp_path / "b", [3.0, 2.5])]
    page = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "-o", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    read = Reader(text)
    assert read.fetched == []
    assert "url(" not in text
    rows = {row[0]: row[1:] for row in read.rows if row}
    assert rows["engine"] == ["an <engine>", "an <engine>"]
    assert rows["state"] == ["finished", "not finished"]
    assert rows["last training loss"] == ["1", "2.5"]
    assert rows["command"] == ["python 'a b'"]
    figures = read.figures["a"]
    assert figures["step, ms"] == pytest.approx(20)
    assert figures["time to first step, s"] == pytest.approx(6.25)
    assert figures["step, predicted, ms"] == pytest.approx(30)
    assert figures["peak memory of the fullest rank, MiB"] == pytest.approx(3)
    assert figures["peak memory, predicted, MiB"] == pytest.approx(2)
    assert figures["sent, predicted, MB"] == pytest.approx(5)
    pictures = re.findall(r"<figure>(.*?)</figure>", text, re.DOTALL)
    titles = [ElementTree.fromstring(picture).attrib["aria-label"] for picture in pictures]
    assert titles == [
        "Training loss",
        "Difference of the training loss to a",
        "Speed",
        "Peak memory",
        "Time to first step",
        "Learning rate",
        "Speed during training",
    ]
    assert main(["report", str(tmp_path / "none")]) == 6
    assert names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def places(picture: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_shows_what_it_is_given(log: bool) -> None:
    lines = [Line("up", [(1, 1.0), (2, 10.0), (4, 100.0)]), Line("gone", [(1, float("nan"))])]
    picture = chart("A & B", Axis("x"), Axis("seconds", log=log), lines, limit=("most", 150.0))
    (line,) = places(picture)
    heights = [y for _, y in line]
    assert heights == sorted(heights, reverse=True)
    steps = [before - after for before, after in itertools.pairwise(heights)]
    assert (steps[0] == pytest.approx(steps[1], abs=0.2)) == log
    root = ElementTree.fromstring(picture)
    texts = [
        (float(t.attrib["x"]), float(t.attrib["y"]), t.text or "")
        for t in root.iter("{http://www.w3.org/2000/svg}text")
        if "x" in t.attrib
    ]
    named = {text: (x, y) for x, y, text in texts}
    assert {"A & B", "x", "seconds", "up", "most"} <= set(named)
    assert abs(named["up"][1] - named["most"][1]) >= 14  # names do not lie on each other
    assert all(0 <= x <= 760 and 0 <= y <= 400 for x, y, _ in texts)


def test_lines_on_each_other_are_both_seen() -> None:
    """Where two lines are the same they are drawn as dashes in turns, and whole where they part."""
    first = [(float(step), 1.0) for step in range(10)]
    second = [(at, value if at < 5 else 2.0) for at, value in first]
    root = ElementTree.fromstring(chart("t", Axis("x"), Axis("y"), [Line("a", first), Line("b", second)]))
    drawn = [
        (line.attrib["class"], line.attrib.get("stroke-dasharray"), line.attrib.get("stroke-dashoffset"))
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert drawn == [("s0", "8 8", "16"), ("s0", None, None), ("s1", "8 8", "8"), ("s1", None, None)]


def test_differences_of_zero_have_a_place_on_a_logarithmic_axis() -> None:
    values = [(1, 0.0), (2, 1e-7), (3, 3e-3)]
    picture = chart("t", Axis("x"), Axis("y", log=True, floor=1e-8), [Line("a", values)])
    (heights,) = [[y for _, y in line] for line in places(picture)]
    assert heights == sorted(heights, reverse=True)
    read = {
        t.text: float(t.attrib["y"]) for t in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    }
    assert read["0"] - 4 == pytest.approx(heights[0], abs=0.1)
    assert read["1e-7"] - 4 == pytest.approx(heights[1], abs=0.1)


def test_thousands_of_points_become_as_many_as_can_be_seen() -> None:
    values = [(float(step), 5.0 if step == 12_345 else 1.0) for step in range(100_000)]
    picture = chart("t", Axis("x"), Axis("y"), [Line("a", values)])
    (line,) = places(picture)
    assert len(line) < 2_000
    assert min(y for _, y in line) < min(y for _, y in line[:100])  # the one that stands out is there


def test_names_of_lines_that_end_together_are_apart() -> None:
    lines = [Line(f"line {number}", [(1, 1.0), (2, 2.0)]) for number in range(8)]
    root = ElementTree.fromstring(chart("t", Axis("x"), Axis("y"), lines))
    heights = sorted(
        float(t.attrib["y"]) for t in root.iter("{http://www.w3.org/2000/svg}text") if (t.text or "").startswith("line")
    )
    assert len(heights) == 8
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14
    assert max(heights) < 360
