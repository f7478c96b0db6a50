"""Writes docs/configuration.md, docs/messages.md and the editors' schema (`make docs`)."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from dsframe.tools import explain
from dsframe.tools.schema import main as schema

ROOT = Path(__file__).resolve().parents[1]


def printed(*arguments: str) -> str:
    """What `dsframe schema` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        schema(argv=list(arguments))
    return text.getvalue()


def pages() -> dict[Path, str]:
    """What each generated file holds."""
    whole = printed("--markdown")
    title = (
        "# Configuration\n\nEvery key that a file may have. Written by `make docs` from the schema; do not edit.\n\n"
        'Where a type has `{"epochs": 1}`, a number of epochs may stand for the number of steps that they take\n'
        "([Moving a script](porting.md#schedules)).\n\n"
    )
    return {
        ROOT / "docs" / "configuration.md": title + whole.strip() + "\n",
        ROOT / "docs" / "messages.md": explain.markdown(),
        ROOT / "ds_configs" / "dsframe.schema.json": printed(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
