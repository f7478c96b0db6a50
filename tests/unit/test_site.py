"""The documentation: built without a warning, and its blocks of code are right."""

from __future__ import annotations

import json
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsframe.config.load import examine
from dsframe.config.resolve.facts import Facts
from tests.processes import BIN, REPOSITORY, run_program

PAGES = sorted(
    [
        *REPOSITORY.glob("docs/**/*.md"),
        REPOSITORY / "README.md",
        *REPOSITORY.glob("examples/**/README.md"),
        REPOSITORY / "check" / "README.md",
    ]
)
GENERATED = {"configuration.md", "messages.md", "commands.md", "api.md"}
"""Written from code; their examples have their own tests."""
RUN = ("tutorials", "coming_from", "how_to")
"""Folders of docs/ whose blocks are run if a comment before them says so."""
QUICK = ("line_by_line", "notebooks")
"""Pages that are run in every test run; the others take longer."""
NOT_WHOLE = ("missing-key", "batch")
"""Mistakes of what a page shows of a file in part: no batch size."""


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    mark: str
    """What the comment right before it says."""


def blocks(page):
    pattern = re.compile(r"(?:^<!-- (.*?) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
    for found in pattern.finditer(page.read_text(encoding="utf-8")):
        text = "\n".join(line.removeprefix(found[2]) for line in found[4].splitlines()) + "\n"
        yield Block(page, found[3], text, found[1] or "")


def texts(page, language):
    """What the page has in a language, block after block."""
    found = [block.text for block in blocks(page) if block.language == language]
    assert found
    return found


def of_kind(*languages):
    found = [
        block for page in PAGES if page.name not in GENERATED for block in blocks(page) if block.language in languages
    ]
    assert len(found) > 5
    return found


def named(block):
    return f"{block.page.relative_to(REPOSITORY)}-{zlib.crc32(block.text.encode()) % 1000}"


def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    done = run_program(command, cwd=REPOSITORY, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    loads = re.compile(r"""<(?:script|img|link[^>]*stylesheet)[^>]*(?:src|href)=["']?(?:https?:)?//""")
    assert [page for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("block", of_kind("json"), ids=named)
def test_a_file_on_a_page_has_no_mistake(block):
    if '"train_batch_size"' not in block.text and '"dsframe"' not in block.text:
        json.loads(block.text)  # a row of a file, an editor's settings
        return
    found = examine(block.text, block.page.name, [], Facts(world_size=2), None)
    wrong = [
        str(problem) for problem in found.problems if problem.severity == "error" and problem.code not in NOT_WHOLE
    ]
    assert wrong == []


def test_a_file_of_the_repository_is_shown_as_it_is():
    shown = [block for page in PAGES for block in blocks(page) if block.mark.startswith("is: ")]
    assert shown
    for block in shown:
        assert block.text == (REPOSITORY / block.mark.removeprefix("is: ")).read_text(), block.page


TUTORIALS = [
    page
    for folder in RUN
    for page in sorted((REPOSITORY / "docs" / folder).glob("*.md"))
    if any(block.mark.startswith("run") for block in blocks(page))
]


@pytest.mark.parametrize(
    "page",
    [page if page.stem in QUICK else pytest.param(page, marks=pytest.mark.long) for page in TUTORIALS],
    ids=lambda page: page.stem,
)
def test_a_tutorial_works_as_it_stands(page, tmp_path):
    """In one folder and one shell, block after block."""
    script = ["set -eo pipefail"]
    for number, block in enumerate(blocks(page)):
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.mark == "run, code 2":
            script.append(
                f"code=0; {{\n{block.text}}} || code=$?; [ $code = 2 ] || {{ echo block {number}: code $code; exit 1; }}"
            )
        elif block.mark.startswith("run"):
            script.append(block.text)
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = run_program(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
