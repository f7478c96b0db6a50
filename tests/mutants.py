"""Bugs that the tests must notice: each is put into a copy of the code, and its test must fail.

    python -m tests.mutants [NAME ...]           # prints the table, and one line for each folder (make mutants)

``mutants.json`` has them: a file, the text that is replaced (it stands there once), its replacement, and
the tests that are run, those nearest to the file. A bug that passes is "survived", with exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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

    def put_into(self, tree):
        """Raises ValueError where the file has changed so that the bug has no place in it."""
        path = tree / "dsframe" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}; adjust mutants.json"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutants():
    """All of them, in the order of the list."""
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in json.loads(LIST.read_text(encoding="utf-8"))]


def killed(mutant):
    """Runs the tests on a copy of the code with the bug in it."""
    with tempfile.TemporaryDirectory(prefix="dsframe-mutant-") as folder:
        return _fails(mutant, Path(folder))


def _fails(mutant, tree):
    for path in REPOSITORY.iterdir():
        if path.name in ("dsframe", "tests"):  # pytest puts the folder of the tests first, behind every link
            shutil.copytree(path, tree / path.name)  # compiled files too: they are of files with the same times
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


def timed(mutant):
    """Whether the tests noticed it, and their seconds."""
    began = time.monotonic()
    return killed(mutant), time.monotonic() - began


def main():
    """Prints a line for each mutant and for each folder; 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default: 1)")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not options.names or mutant.name in options.names]
    folders = collections.defaultdict(list)
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (dead, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            state = "killed  " if dead else "SURVIVED"
            print(f"{state} {seconds:4.0f} s  {mutant.file:32} {mutant.name}", flush=True)
            folders[str(Path(mutant.file).parent)].append((dead, seconds))
    for folder, results in sorted(folders.items()):
        print(f"| {folder} | {sum(dead for dead, _ in results)} of {len(results)} | {sum(s for _, s in results):.0f} |")
    survived = sum(not dead for results in folders.values() for dead, _ in results)
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
