"""What the rules share: the typed file, what was written of it, and where to report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsframe.config.findings import Findings
from dsframe.config.model import File


@dataclass(frozen=True)
class Judge:
    """One file before the rules."""

    file: File
    raw: dict[str, Any]
    findings: Findings
    engine: str = "auto"
    """Which one will run."""

    @property
    def by_deepspeed(self) -> bool:
        """Whether what only DeepSpeed does is done: cutting layers among ranks, ZeRO."""
        return self.engine in ("auto", "deepspeed")

    def wrote(self, *path: str) -> bool:
        """Whether the file has this key, and no error is reported about its value."""
        owner: Any = self.raw
        for part in path:
            if not isinstance(owner, dict) or part not in owner:
                return False
            owner = owner[part]
        return not self.findings.fails(path)

    def conflict(self, path: tuple[str, ...], message: str, remedy: str) -> None:
        """Two values that exclude each other."""
        self.findings.error(path, message, remedy, code="conflict", at_value=True)

    def idle(self, path: tuple[str, ...], message: str, remedy: str = "remove it") -> None:
        """A key without effect."""
        self.findings.warning(path, message, remedy, code="no-effect")
