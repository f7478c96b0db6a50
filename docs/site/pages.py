"""MkDocs calls this: pages that lie outside of docs/ become part of the site, and links between all of them are made to fit.

In the repository every link is a path from file to file, so that it works where the files are read as they are.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def outside() -> dict[str, str]:
    """Returns pages outside of docs/: their place in the site -> their path in the repository."""
    found = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    found["examples/index.md"] = "examples/README.md"
    for readme in sorted(ROOT.glob("examples/*/README.md")):
        found[f"examples/{readme.parent.name}.md"] = str(readme.relative_to(ROOT))
    return found


def on_config(config: Any) -> Any:
    """Puts the examples into the navigation."""
    examples = [{_title(path): place} for place, path in outside().items() if place.startswith("examples/")]
    for entry in config.nav:
        if "Examples" in entry:
            entry["Examples"] = examples
    return config


def _title(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside, and the pictures that they show."""
    for place, path in outside().items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads each link to the page of the site that the file has become; a file that has none stays as a name."""
    pages = {path: place for place, path in outside().items()}
    own = outside().get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def fitted(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, mark, anchor = target.partition("#")
        if ":" in path or not path:
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(own), path))
        place = pages.get(there, there.removeprefix("docs/") if there.startswith("docs/") else None)
        if place is None:
            if not (ROOT / there).exists():
                raise FileNotFoundError(f"{own}: {target}")
            return text if text.startswith("`") else f"{text} (`{there}`)"
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"[{text}]({posixpath.relpath(place, here)}{mark}{anchor})"

    return _LINK.sub(fitted, markdown)
