"""dsframe on the Pythons and the versions of torch that it is declared for: the table of docs/support.md.

    python -m tests.versions                                        # make versions
    python -m tests.versions --python 3.13                          # one Python, with the torch of constraints.txt
    python -m tests.versions --python /usr/bin/python3 --torch own  # with the torch that it has: Debian's, conda's

For each, an environment in .setup/versions, which is removed at the end, gets the wheel of dsframe. Tests of tests/unit run in it,
and two processes train on DDP and at ZeRO-3; their losses are compared with this environment's. Where the package index has no CPU
build of torch, what needs no torch is run. ``--cuda`` takes a build with CUDA there: 5.6 GB in each environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import jobs
from tests.processes import REPOSITORY, free_port, run_ranks

FOLDER = REPOSITORY / ".setup" / "versions"
PINNED, NEWEST, OWN = "pinned", "newest", "own"
ROWS = (("3.10", PINNED), ("3.12", PINNED), ("3.13", PINNED), ("3.11", NEWEST))
"""What is declared and not what the tests run with: Python, torch."""
PACKAGES = ["pydantic", "numpy", "psutil", "rapidfuzz", "safetensors", "tqdm", "xxhash"]
"""What pyproject.toml asks for beside torch."""
OF_DEEPSPEED = ["einops", "hjson", "msgpack", "ninja", "packaging", "py-cpuinfo"]
"""What DeepSpeed asks for beside torch and these."""
FOR_TESTS = ["pytest", "pytest-timeout", "hypothesis", "pyyaml"]
WITHOUT_TORCH = (
    "test_check_mistakes",
    "test_check_public",
    "test_config_reader",
    "test_convert_config",
    "test_engine_table",
)
"""Tests of tests/unit that run where no torch is installed."""
NEEDS_TORCH = "not (one and stage and cut)"
"""What pytest leaves out of them there: a message that asks torch."""
WITH_TORCH = (
    "test_checkpoint_store",
    "test_data_loader",
    "test_dtypes",
    "test_ema",
    "test_optimizers",
    "test_schedules",
    "test_state_flat",
    "test_task_build",
    "test_torch_patches",
)
"""Tests that run beside them where it is."""
TRAININGS = {"ddp": ["--engine", "ddp"], "zero3": ["--engine", "deepspeed", "--set", "zero_optimization.stage=3"]}
TOLERANCE = 1e-5


class NotHereError(RuntimeError):
    """This machine or its package index lacks what a row needs."""


@dataclass
class Row:
    """What came out for one Python and one torch."""

    python: str
    torch: str = "none"
    deepspeed: str = "none"
    tests: str = ""
    differences: dict[str, str] = field(default_factory=dict)
    """Training -> the largest difference of a loss to this environment's, or why there is none."""
    failed: bool = False

    def cells(self) -> list[str]:
        return [self.python, self.torch, self.deepspeed, self.tests, *(self.differences[name] for name in TRAININGS)]


def interpreter(name: str) -> str:
    """Returns the path of a Python: ``3.12`` is looked for on PATH and among pyenv's. Raises NotHereError."""
    if os.sep in name:
        return name
    found = shutil.which(f"python{name}")
    if (
        found
        and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0
    ):
        return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    others = sorted(root.glob(f"versions/{name}.*/bin/python{name}"))
    if not others:
        raise NotHereError(f"no Python {name}: neither on PATH nor among pyenv's")
    return str(others[-1])


def pip(environment: Path, *words: str) -> str:
    """Runs pip in an environment and returns what it printed. Raises NotHereError with its last line where it fails."""
    command = [environment / "bin" / "python", "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotHereError(f"pip {words[0]}: {lines[0] if lines else done.returncode}")
    return done.stdout


def index_options() -> list[str]:
    address = os.environ.get("TORCH_INDEX")
    return ["--extra-index-url", address] if address else []


def build_of_torch(environment: Path, wanted: str, *, cuda: bool) -> str:
    """Returns what to ask pip for: the CPU build if the index has it. Raises NotHereError where only a build with CUDA is there."""
    version = f"=={pinned_torch()}" if wanted == PINNED else "" if wanted == NEWEST else f"=={wanted}"
    reason = "the package index has no such torch"
    for asked in [f"torch{version}+cpu"] * bool(version) + [f"torch{version}"]:
        words = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", *index_options(), asked]
        try:
            (found,) = json.loads(pip(environment, "install", *words))["install"]
        except NotHereError:
            continue
        exact = f"torch==={found['metadata']['version']}"
        needs = [name for name in found["metadata"].get("requires_dist", []) if re.match(r"nvidia|cuda", name)]
        if cuda or not needs:
            return exact
        reason = f"no CPU build of torch {found['metadata']['version']} in the package index"
    raise NotHereError(reason)


def pinned_torch() -> str:
    return re.findall(r"^torch==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)[0]


def constraints(folder: Path) -> str:
    """The file of constraints without torch, whose version is the row's."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    path = folder / "constraints.txt"
    path.write_text("\n".join(line for line in lines if not line.startswith(("torch==", "torchvision=="))) + "\n")
    return str(path)


def installed(environment: Path, name: str) -> str:
    command = [
        environment / "bin" / "python",
        "-c",
        f"from importlib.metadata import version; print(version('{name}'))",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or "none"


def imported_torch(environment: Path) -> str:
    command = [environment / "bin" / "python", "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or (done.stderr.strip().splitlines() or ["no torch"])[-1]


def wheel(folder: Path) -> Path:
    """Builds dsframe's wheel into ``folder``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        REPOSITORY,
    ]
    subprocess.run(command, check=True, timeout=120)
    return next(folder.glob("dsframe-*.whl"))


def install(python: str, torch: str, environment: Path, folder: Path, row: Row, *, cuda: bool) -> None:
    """Makes the environment of a row, with torch where there is a build for it, and writes into ``row`` what it has."""
    own = ["--system-site-packages"] if torch == OWN else []
    subprocess.run([interpreter(python), "-m", "venv", *own, environment], check=True, timeout=120)
    limits = ["-q", "--disable-pip-version-check", "-c", constraints(folder)]
    try:
        if torch != OWN:
            pip(environment, "install", *limits, *index_options(), build_of_torch(environment, torch, cuda=cuda))
        row.torch = imported_torch(environment)
    except NotHereError as error:
        row.torch = str(error)
    pip(environment, "install", *limits, *PACKAGES, *FOR_TESTS)
    pip(environment, "install", "-q", "--no-deps", "--disable-pip-version-check", str(wheel(folder)))
    if has_torch(row):
        # Without its dependencies: pip does not see the torch of Debian, and would fetch another.
        pip(environment, "install", *limits, "setuptools", "wheel", *OF_DEEPSPEED)
        pip(environment, "install", *limits, "--no-deps", "--no-build-isolation", "deepspeed")
        row.deepspeed = installed(environment, "deepspeed")


def has_torch(row: Row) -> bool:
    return row.torch[:1].isdigit()


def unit_tests(environment: Path, row: Row) -> None:
    """Runs the tests, and writes into ``row`` how many passed."""
    names = [*WITHOUT_TORCH, *(WITH_TORCH if has_torch(row) else ())]
    command = [environment / "bin" / "python", "-m", "pytest", "-q", "-o", "filterwarnings=default", "-m", "not long"]
    command += [] if has_torch(row) else ["-k", NEEDS_TORCH]
    done = subprocess.run(
        [*command, *(f"tests/unit/{name}.py" for name in names)],
        cwd=REPOSITORY,
        env=variables(environment),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    row.tests = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)) or last
    if done.returncode:
        row.failed = True
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))


def variables(environment: Path) -> dict[str, str]:
    """The environment's variables: its programs first, and none of this one's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.defpath}", "OMP_NUM_THREADS": "1"}


def losses(python: Path, name: str, folder: Path, path: str | None) -> list[float]:
    """Trains with two processes under torchrun. ``path``: PYTHONPATH."""
    where = ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--nproc-per-node=2"]
    start = [str(python), "-m", "torch.distributed.run", *where, "-m", "dsframe.train"]
    words = ["--config", "small.json", "--run-dir", f"{name}-{python.parent.parent.name}", *TRAININGS[name]]
    env = {"PYTHONPATH": path, "PATH": f"{python.parent}{os.pathsep}{os.defpath}", "OMP_NUM_THREADS": "1"}
    run_ranks([*start, *words], cwd=folder, env=env, timeout_seconds=400).check()
    return jobs.losses(folder / words[3])


def trainings(environment: Path, folder: Path, row: Row) -> None:
    """Trains on every engine of TRAININGS, and writes into ``row`` how far its losses are from this environment's."""
    for name in TRAININGS:
        if not has_torch(row):
            row.differences[name] = "not run"
            continue
        try:
            ours = losses(Path(sys.executable), name, folder, str(REPOSITORY))
            theirs = losses(environment / "bin" / "python", name, folder, None)
            largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            row.differences[name], row.failed = f"{largest:.1e}", row.failed or largest > TOLERANCE
        except AssertionError as error:
            row.differences[name], row.failed = "failed", True
            print(error)


def run(python: str, torch: str, *, cuda: bool = False, keep: bool = False) -> Row:
    """Returns the row of one Python and one torch. Raises NotHereError where the Python is missing or pip fails."""
    row = Row(python)
    with tempfile.TemporaryDirectory(prefix="dsframe-versions-") as name:
        folder = Path(name)
        environment = FOLDER / f"{Path(python).name}-torch-{torch}"
        shutil.rmtree(environment, ignore_errors=True)
        environment.parent.mkdir(parents=True, exist_ok=True)
        try:
            install(python, torch, environment, folder, row, cuda=cuda)
            row.python = subprocess.check_output([environment / "bin" / "python", "-V"], text=True).split()[-1]
            jobs.write(folder)
            unit_tests(environment, row)
            trainings(environment, folder, row)
        finally:
            if not keep:
                shutil.rmtree(environment, ignore_errors=True)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and returns 1 where a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="3.12|PATH", help="default: every row of the table")
    parser.add_argument("--torch", default=PINNED, help="a version, pinned, newest or own; default: %(default)s")
    parser.add_argument("--cuda", action="store_true", help="also take a build of torch with CUDA")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .setup/versions")
    options = parser.parse_args(argv)
    chosen = [(name, options.torch) for name in options.python] if options.python else ROWS
    print("| Python | torch | DeepSpeed | tests | DDP: largest difference | ZeRO-3 |\n|---|---|---|---|---|---|")
    failed = False
    for python, torch in chosen:
        try:
            row = run(python, torch, cuda=options.cuda, keep=options.keep)
        except NotHereError as error:
            print(f"| {python} | {error} | | | | |", flush=True)
            continue
        failed |= row.failed
        print(f"| {' | '.join(row.cells())} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
