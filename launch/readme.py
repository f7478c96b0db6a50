"""hatchling calls this when it builds: the README of a distribution, with links that hold on a package index.

In the repository each link is a path from file to file; on an index such a link leads nowhere. Where ``project.urls`` in
pyproject.toml has "Source", or the variable DSFRAME_SOURCE_URL names the repository's address, links lead there, to this version's
files. Without an address they become names of files, which the source distribution has, and pictures are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\(([^):]+)\)\n\n", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)]*)?\)")


class Readme(MetadataHookInterface):
    """Gives ``readme``, which pyproject.toml names as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Changes ``metadata`` in place."""
        root = Path(self.root)
        address = os.environ.get("DSFRAME_SOURCE_URL") or metadata.get("urls", {}).get("Source", "")
        version = re.findall(r'^__version__ = "(.+)"$', (root / "dsframe" / "version.py").read_text(), re.MULTILINE)[0]
        text = for_an_index((root / "README.md").read_text(encoding="utf-8"), address, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def for_an_index(text: str, address: str, version: str) -> str:
    """Returns the README's text with links to ``address`` (empty: none is known) at the tag of ``version``."""
    if not address:
        text = _PICTURE.sub("", text)

    def fitted(found: re.Match[str]) -> str:
        picture, name, path, anchor = found.groups(default="")
        if address:
            return f"{picture}[{name}]({address.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{path}{anchor})"
        return f"{name} (`{path}`)"

    return _LINK.sub(fitted, text)
