"""Bugs that the tests must notice: each is put into a copy of the code, and its test must fail.

    python -m tests.mutants [NAME ...]           # prints the table, and one line for each folder (make mutants)

``mutants.json`` has them: a file, the text that is replaced (it stands there once), its replacement, and
the tests that are run, those nearest to the file. A bug that passes is "survived", with exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

LIST = Path(__file__).with_name("mutants.json")
PRELOADED = ("torch.distributed.fsdp", "torch._dynamo", "hypothesis", "pydantic", "safetensors.torch", "deepspeed")
"""Imported once, before the forks: what most tests import."""
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


def start(mutant):
    """Forks a process that runs the tests on a copy of the code with the bug in it; ends with pytest's code."""
    tree = Path(tempfile.mkdtemp(prefix="dsframe-mutant-"))
    for path in REPOSITORY.iterdir():
        if path.name in ("dsframe", "tests"):  # pytest puts the folder of the tests first, behind every link
            shutil.copytree(path, tree / path.name)  # compiled files too: they are of files with the same times
        elif path.name != ".git":
            (tree / path.name).symlink_to(path)
    mutant.put_into(tree)
    if not (process := os.fork()):
        os.setsid()
        os.chdir(tree)
        for number in (1, 2):
            os.dup2(os.open(tree / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("dsframe", "tests")]:
            del sys.modules[name]
        sys.path.insert(0, str(tree))
        references = REPOSITORY / "examples" / "reference_engines"
        os.environ.update(PYTHONPATH=f"{tree}:{references}", PYTHONDONTWRITEBYTECODE="1")
        options = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not long",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        os._exit(pytest.main([*options, *mutant.tests]))
    return Running(mutant, tree, process)


@dataclass
class Running:
    """The tests of a mutant."""

    mutant: Mutant
    tree: Path
    process: int
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self):
        return time.monotonic() - self.began

    def killed(self):
        """Whether a test has failed; None while they run."""
        if self.seconds > SECONDS:
            os.killpg(self.process, signal.SIGKILL)
        ended, status = os.waitpid(self.process, 0 if self.seconds > SECONDS else os.WNOHANG)
        if not ended:
            return None
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, 1, -signal.SIGKILL):  # no tests, or wrong usage
            raise SystemExit(f"{self.mutant.name}: pytest ended with {code}\n{(self.tree / 'out').read_text()[-2000:]}")
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # what its tests have left
        shutil.rmtree(self.tree, ignore_errors=True)
        return code != 0


def run(chosen, jobs):
    """Yields each mutant, whether it was killed, and the seconds of its tests, ``jobs`` at a time."""
    ahead, running = list(chosen), []
    while ahead or running:
        running += [start(ahead.pop(0)) for _ in range(min(jobs - len(running), len(ahead)))]
        for each in list(running):
            if (dead := each.killed()) is not None:
                running.remove(each)
                yield each.mutant, dead, each.seconds
        time.sleep(0.05)


def main():
    """Prints a line for each mutant and for each folder; 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default: 1)")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not options.names or mutant.name in options.names]
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    folders = collections.defaultdict(list)
    for mutant, dead, seconds in run(chosen, options.jobs):
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
