"""Argument parser with suggestions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsframe.config.read.suggest import closest

_FILES = (".json", ".hjson", ".yaml", ".yml", ".toml")


class Parser(argparse.ArgumentParser):
    """argparse's parser, with a suggestion for unrecognized arguments."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses as argparse does."""
        options, rest = self.parse_known_args(args, namespace)
        return options if not rest else self._unrecognized(rest)

    def _unrecognized(self, rest: Sequence[str]) -> NoReturn:
        first = rest[0].partition("=")[0]
        options = self._option_string_actions
        if Path(first).suffix in _FILES and "--config" in options:
            hint = f"; did you mean --config {first}?"
        else:
            similar = closest(first, options) if first.startswith("--") else None
            hint = f"; did you mean {similar}?" if similar else ""
        self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
