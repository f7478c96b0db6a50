"""Every command that the README, the documents and the Makefile name is started.

Here in a short form, or by the test that is named.
"""

import re

import pytest

from tests import portability
from tests.processes import run_ranks, warm

SHORT = {
    "benchmarks.startup": ("--engines ddp --rounds 1 --without-hand", r"\ndsframe +\d+\.\d\d\nbounds: "),
    "benchmarks.soak": ("--engines ddp --steps 20 --rounds 1 --block 0.1", r"\nddp( +\d+\.\d){2} +\d\.\d{3} \("),
    "benchmarks.compare": (
        "--models cnn --only ddp --rounds 1 --block 0.2 --no-peers --json compare.json",
        r"\ncnn +dsframe[\s\S]*\ncnn ",
    ),
    "benchmarks.overhead": (
        "--processes 1 --tensors 10 --engines ddp --rounds 1 --steps 2",
        r"\n\| ddp \| 1 \| 10 \|",
    ),
    "benchmarks.checkpoint": ("--layers 1 --width 48 --rounds 1 --folder .", "torch.save"),
    "benchmarks.data_path": ("--parts images text --pairs 1", r"\nCIFAR-10 +torchvision[\s\S]*\ndocuments +datasets"),
    "benchmarks.tokenise": ("--megabytes 1 --ranks 1", r"\n +1 second +\d"),
    "benchmarks.accuracy": ("--help", "--seeds SEEDS"),
    "benchmarks.gpu": ("--help", "--tiny"),
    "benchmarks.evaluation": ("--engines ddp --rounds 1", r"\n\| ddp \| [\s\S]*\nbound, "),
    "benchmarks.longest_context": ("--help", "--limit"),
    "benchmarks.time_to_accuracy": ("--help", "--held-out"),
    "benchmarks.many_ranks": ("--ranks 2", r"\nleave [\s\S]*\nconstant for each rank: "),
    "tests.equivalence": ("--help", "--case CASE"),
}
"""Module -> options and what they print.

Where that is the help, the test of the command's name calls what the command does:
test_equivalence.py. ``accuracy`` and ``gpu``
have no form that takes less than minutes.
"""


LONG = {
    f"benchmarks.{name}" for name in ("compare", "tokenise", "evaluation", "soak", "data_path", "startup", "overhead")
}
"""A quarter of a minute or a half each, even so: in the night."""


@pytest.mark.parametrize(
    "module", [pytest.param(module, marks=[pytest.mark.long] * (module in LONG)) for module in SHORT]
)
def test_it_starts(module, tmp_path):
    options, printed = SHORT[module]
    finished = run_ranks(warm(1, ["-m", module, *options.split()]), cwd=tmp_path, timeout_seconds=200)
    # 1: the bound of a time is broken, which a busy machine does.
    assert finished.returncode in ((0,) if options == "--help" else (0, 1)), finished
    assert re.search(printed, finished.stdout), finished
    assert "Traceback" not in finished.output
    assert "DIFFER" not in finished.stdout, "what is compared is the same training"


def test_portability_goes_on_to_the_last_bit(capsys):
    """``make portability`` in short; the whole table is of all pairs."""
    assert portability.main(["--of", "single@1"]) == 0
    assert re.fullmatch(r" +single@1\nsingle@1 +0\.0e\+00\n", capsys.readouterr().out)
