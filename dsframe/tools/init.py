"""``dsframe init``: writes a commented file, and a task if one is needed, to start with."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from dsframe.errors import DsframeError
from dsframe.host.source_files import shipped
from dsframe.tools.commands import Argv, command

BEGINNINGS = {
    "own": ("own_model", "a model of your own: a task of four methods"),
    "images": ("images", "a folder of pictures, by class"),
    "text": ("text", "a small GPT on text"),
    "finetune": ("finetune", "a model of transformers, on conversations, by LoRA"),
    "table": ("table", "numbers in a CSV file"),
    "slurm": ("slurm", "a batch script that continues after time limits, and the file of a small training"),
}
"""Name -> folder in examples/, and one line of help."""
_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]*)[^)]*\)")
"""A README's link to a page that is not copied."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in BEGINNINGS.items()]
    about = "Write a commented file, and a task where one is needed, to begin with."
    parser = command("init", about, "\n".join(["beginnings:", *lines]))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; created if missing")
    parser.add_argument(
        "--from", dest="beginning", choices=tuple(BEGINNINGS), default="own", help="default: %(default)s"
    )
    return parser


def main(argv: Argv = None) -> int:
    """Writes the files, prints the next steps and returns 0. Raises DsframeError if a file exists."""
    options = parser().parse_args(argv)
    source, folder = shipped("examples", "examples") / BEGINNINGS[options.beginning][0], options.folder
    files = [path for path in sorted(source.iterdir()) if path.is_file()]
    existing = [path.name for path in files if (folder / path.name).exists()]
    if existing:
        raise DsframeError(f"{folder} has {', '.join(existing)} already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            text = path.read_text(encoding="utf-8")
            (folder / path.name).write_text(_LINK.sub(r"\1 (\2 in dsframe's repository)", text), encoding="utf-8")
    except OSError as error:
        raise DsframeError(f"{error.filename}: {error.strerror}; name another folder") from None
    names = [path.name for path in files]
    print(f"{folder}: {', '.join(names)}\n\nnext:\n  cd {folder}")
    if "make_data.py" in names:
        print("  python make_data.py    # data to try it with; name your own in the file")
    print("  dsframe check config.json -np 2")
    start = "sbatch --ntasks=2 slurm.sbatch" if "slurm.sbatch" in names else "dsframe launch -np 2"
    print(f"  {start} --config config.json")
    return 0
