"""dsframe on the Pythons that it is declared for: tests and, where there is torch without CUDA for them, trainings."""

from __future__ import annotations

import re

import pytest

from tests import versions
from tests.processes import REPOSITORY

PYTHONS = ("3.10", "3.12", "3.13")


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
def test_a_python_holds(python: str) -> None:
    try:
        row = versions.run(python, versions.PINNED)
    except versions.NotHereError as error:
        pytest.skip(str(error))
    assert not row.failed, row
    assert "passed" in row.tests


def test_what_is_declared_is_what_the_table_runs() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    declared = re.findall(r"Python :: (3\.\d+)", text)
    assert {*declared} <= {"3.11", *(python for python, _ in versions.ROWS)}
    oldest = re.findall(r'"torch>=([\d.]+)"', text)[0]
    assert versions.pinned_torch().startswith(oldest), "the oldest is what the tests run with"
    rows = (REPOSITORY / "docs" / "support.md").read_text()
    for python in declared:
        assert re.search(rf"^\| {re.escape(python)}\.\d+ \|", rows, re.MULTILINE), (
            f"no row for Python {python} in docs/support.md"
        )
