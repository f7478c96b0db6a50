"""``dsframe schema``: prints the JSON Schema of the file, for editors. docs/schema.py generates it."""

from __future__ import annotations

import argparse

from dsframe.host.source_files import shipped
from dsframe.tools.commands import Argv, command


def parser() -> argparse.ArgumentParser:
    """The command line."""
    return command("schema", "Print the JSON Schema of ds_config files, for editors.")


def main(argv: Argv = None) -> int:
    """Prints the schema and returns 0."""
    parser().parse_args(argv)
    print((shipped("ds_configs", "ds_configs") / "dsframe.schema.json").read_text(encoding="utf-8"), end="")
    return 0
