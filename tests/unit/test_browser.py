"""Pages and pictures as a browser shows them: headless Chromium lays them out, says what it reads and takes a picture."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dsframe.cli import main
from tests.unit.test_report_page import write_run

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

LOOK = """
<pre id="seen"></pre><script>
addEventListener("load", () => {
  const wrong = [], rows = {}, box = one => one.getBoundingClientRect();
  const overlap = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]) > 1;
  const cross = (a, b) => overlap(a, b, "left", "right") && overlap(a, b, "top", "bottom");
  const pictures = [...document.querySelectorAll("svg")];
  const titles = pictures.map(one => one.getAttribute("aria-label"));
  pictures.forEach((picture, place) => {
    const texts = [...picture.querySelectorAll("text")], whole = box(picture);
    texts.forEach((text, index) => {
      const own = box(text), said = `${titles[place]}: "${text.textContent}"`;
      if (own.left < whole.left || own.right > whole.right || own.top < whole.top || own.bottom > whole.bottom)
        wrong.push(`${said} leaves the picture`);
      for (const other of texts.slice(index + 1))
        if (cross(own, box(other))) wrong.push(`${said} lies on "${other.textContent}"`);
      for (const sign of picture.querySelectorAll("circle, polygon, rect:not(:first-child)"))
        if (cross(own, box(sign))) wrong.push(`${said} has a mark on it`);
    });
  });
  for (const row of document.querySelectorAll("tr"))
    rows[row.cells[0].innerText] = [...row.cells].slice(1).map(cell => cell.innerText.trim());
  document.getElementById("seen").textContent = JSON.stringify({
    wrong, rows, titles,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    columns: new Set(pictures.map(one => Math.round(box(one).left))).size,
    smallest: Math.min(...pictures.map(one => box(one).width)),
    wider: document.documentElement.scrollWidth - innerWidth,
    fetched: performance.getEntriesByType("resource").map(one => one.name),
  });
});
</script>
"""
"""Put into the page: it says which texts overlap or leave their picture, what the tables read, what was fetched."""


def look(page: Path, width: int, *, dark: bool = False) -> tuple[dict[str, Any], set[tuple[int, int, int]]]:
    """Opens ``page`` in a window so wide; what the browser saw, and the colours of its picture that cover more than 20 pixels."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    copy, picture = page.with_name("look.html"), page.with_name(f"look-{width}.png")
    copy.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    opened = subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
            "--hide-scrollbars", "--force-device-scale-factor=1",
            f"--user-data-dir={page.parent / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},2400", f"--screenshot={picture}", "--dump-dom", copy.as_uri(),
        ],
        check=True, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', opened.stdout, re.DOTALL)
    assert found
    with image.open(picture) as shot:
        assert shot.width == width
        counted = shot.convert("RGB").getcolors(2**24)
    return json.loads(unescape(found[1])), {colour for count, colour in counted if count > 20}


def colour(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def some_runs(folder: Path) -> list[str]:
    """Five that differ little, with the longest words that engines have for themselves."""
    runs = []
    names = ("deepspeed", "horovod", "reference-parameter-averaging", "fsdp", "single")
    for number, name in enumerate(names):
        losses = [4 / step + 1e-7 * number * (step % 3) for step in range(1, 41)]
        written = write_run(
            folder / name, losses, description="PyTorch FSDP, 2 x Block gathered in turn", launcher="torchrun", steps=40,
            rate=1e6 + number, unit="samples", units_per_step=8, seconds=2.0, start_seconds=3.0, first_step_seconds=0.5,
            metrics={"accuracy": 0.5}, peak_memory_bytes=[2**33, 2**33 + number * 2**28, 2**32],
        )  # fmt: skip
        runs.append(str(written))
    return runs


def test_a_page_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", *some_runs(tmp_path), "-o", str(page)]) == 0
    wide, colours = look(page, 1400)
    assert wide["wrong"] == wide["fetched"] == []
    assert wide["wider"] <= 0
    assert wide["columns"] == 2
    assert "Loss" in wide["titles"]
    assert wide["rows"]["samples a second"] == [f"1,000,00{number}" for number in range(5)]
    assert wide["rows"]["largest difference of the loss"][1:] == ["2e-7", "4e-7", "6e-7", "8e-7"]
    assert {colour(name) for name in ("#ffffff", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")} <= colours
    narrow, colours = look(page, 800, dark=True)
    assert narrow["dark"]
    assert narrow["wrong"] == []
    assert narrow["wider"] <= 0
    assert narrow["columns"] == 1
    assert narrow["smallest"] > 700
    assert {colour(name) for name in ("#15171b", "#eceef2", "#0072B2", "#D55E00")} <= colours
    assert colour("#ffffff") not in colours, "pictures are dark too"
    phone, _ = look(page, 400)
    assert phone["wider"] <= 0
    assert phone["smallest"] < 480, "curves are as narrow as the window, which has 500 pixels at least"
