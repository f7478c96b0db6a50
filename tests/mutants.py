"""Bugs that the tests must notice: each is put into a copy of the code, and its test must fail.

    python -m tests.mutants [NAME ...]           # prints the table (make mutants)

``mutants.json`` has them: a file, the text that is replaced (it stands there once), its replacement, and
the tests that are run, those nearest to the file. A bug that passes is "survived", with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.processes import REPOSITORY

LIST = Path(__file__).with_name("mutants.json")
SECONDS = 300.0
"""Time of one mutant's tests; a bug that makes them wait longer is noticed too."""


@dataclass(frozen=True)
class Mutant:
    """A bug."""

    name: str
    file: str
    """Below dsframe/."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest."""

    def put_into(self, tree: Path) -> None:
        """Raises ValueError where the file has changed so that the bug has no place in it."""
        path = tree / "dsframe" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}; adjust mutants.json"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutants() -> list[Mutant]:
    """All of them, in the order of the list."""
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in json.loads(LIST.read_text(encoding="utf-8"))]


def killed(mutant: Mutant, folder: Path) -> bool:
    """Runs the tests on a copy of the code with the bug in it."""
    tree = folder / "tree"
    if tree.exists():
        shutil.rmtree(tree)
    tree.mkdir()
    for path in REPOSITORY.iterdir():
        if path.name in ("dsframe", "tests"):  # pytest puts the folder of the tests first, behind every link
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name != ".git":
            (tree / path.name).symlink_to(path)
    mutant.put_into(tree)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *mutant.tests]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1):  # no tests, or wrong usage
        raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout.decode()[-2000:]}")
    return done.returncode == 1


def main() -> int:
    """Prints a line for each mutant; 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="dsframe-mutants-") as folder:
        for mutant in chosen:
            began = time.monotonic()
            dead = killed(mutant, Path(folder))
            survived += not dead
            state = "killed  " if dead else "SURVIVED"
            print(f"{state} {time.monotonic() - began:4.0f} s  {mutant.file:32} {mutant.name}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
