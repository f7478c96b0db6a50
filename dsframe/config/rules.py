"""What single values cannot tell: keys without effect, and combinations that cannot be."""

from __future__ import annotations

from typing import Any

from dsframe.config.findings import Findings
from dsframe.config.model import File


def judge(file: File, raw: dict[str, Any], findings: Findings) -> None:
    """Report what is wrong with the combination of values. ``raw`` tells what was written."""
