"""Words never end a training: a log on a full disk, a closed pipe, a closed terminal."""

import errno
import io
import os
import subprocess
import sys

import pytest

from dsframe.host import streams
from dsframe.run_dir.progress import Progress
from tests.files import ds_config, read_json, write_json
from tests.processes import REPOSITORY


class Broken(io.StringIO):
    """Every write fails, as on a full disk."""

    name = "<stderr>"

    def __init__(self, number):
        super().__init__()
        self._number = number

    def write(self, text):
        raise OSError(self._number, os.strerror(self._number))

    def flush(self):
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_words_that_cannot_be_written_are_dropped(number, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Broken(number))
    streams.survive()
    tolerant = sys.stderr
    streams.survive()
    assert sys.stderr is tolerant
    print("a line", file=sys.stderr, flush=True)
    sys.stderr.writelines(["one\n", "two\n"])


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_survives_without_help(terminal, monkeypatch):
    """A program that calls dsframe as a library has streams of its own."""
    broken = Broken(errno.EPIPE)
    broken.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", broken)
    progress = Progress(3, speaks=True, unit="samples", units_per_step=8)
    progress.begin(0)
    for _ in range(3):
        progress.advance()
    progress.log(3, {"loss": 1.0}, 2.0, 2**20)
    progress.say("a line")
    progress.close()


@pytest.mark.parametrize("end", ["2>&1 | head -1", "2>&- >&-"])
def test_a_training_whose_words_are_lost_comes_to_its_end(end, tmp_path):
    config = ds_config(8, "SGD", 0.1, engine="single", task={"name": "tests.engines.odd_task:Odd"}, steps=60)
    write_json(tmp_path / "c.json", config)
    command = f"set -o pipefail; {sys.executable} -m dsframe.train --config {tmp_path}/c.json --run-dir {tmp_path}/run"
    done = subprocess.run(["bash", "-c", f"{command} {end}"], cwd=REPOSITORY, timeout=120, capture_output=True)
    assert done.returncode == 0, done
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 60
