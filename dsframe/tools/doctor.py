"""``dsframe doctor``: reports what this machine can run, what it lacks and how to install it.

Each library is loaded in its own process, so that a build that does not fit this torch crashes there and is reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from dsframe.engines import TABLE
from dsframe.host.source_files import shipped
from dsframe.text import Json
from dsframe.tools.commands import Argv, command
from dsframe.tools.launch import devices
from dsframe.tools.launch.launchers import search_path

PROBE_SECONDS = 120.0
ENOUGH_SHARED_MEMORY = 2**30
"""Bytes. Containers have 64 MiB by default; data loader workers pass batches through it, NCCL its messages."""
ACTIVATE = 'eval "$(dsframe activate)"'
PROBES = {
    "torch": """
import json, torch, torch.distributed as d
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "Gloo": d.is_gloo_available(),
    "NCCL": d.is_nccl_available(), "gpus": [[g.name, g.total_memory] for g in gpus]}))
""",
    "deepspeed": "import deepspeed; print('{}')",
    "horovod": """
import json, horovod.torch as h
print(json.dumps({"Gloo": bool(h.gloo_built()), "MPI": bool(h.mpi_built()),
    "NCCL": bool(h.nccl_built())}))
""",
    "torchvision": "from dsframe.data._torchvision import torchvision; torchvision(); print('{}')",
}
"""Library -> program that loads it and prints facts about it."""
INSTALL = {
    "torch": "pip install torch",
    "deepspeed": "pip install 'dsframe[deepspeed]'",
    "horovod": "compile it as docs/coming_from/horovod.md says",
    "torchvision": "pip install 'dsframe[vision]'",
}
LAUNCHERS = {
    "deepspeed": f"pip install 'dsframe[deepspeed]', then {ACTIVATE}",
    "horovodrun": "comes with horovod",
    "torchrun": "comes with torch",
    "mpirun": "apt-get install openmpi-bin",
    "srun": "comes with Slurm",
    "pdsh": "apt-get install pdsh; only for deepspeed on several nodes",
}
"""Launcher -> how to get it."""
SYMBOLS = {"ok": "ok", "absent": "--", "broken": "!!", "note": "  "}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: str
    """A key of SYMBOLS."""
    text: str

    def __str__(self) -> str:
        return f"  {SYMBOLS[self.state]}  {self.text}"


@dataclass(frozen=True)
class Library:
    """An installed library."""

    name: str
    version: str
    facts: Json
    broken: str = ""
    """Why it does not load: the last line of its error."""

    @property
    def finding(self) -> Finding:
        text = f"{self.name} {self.version}"
        if self.broken:
            return Finding("broken", f"{text} does not load: {self.broken}; {INSTALL[self.name]}")
        built = {name: has for name, has in self.facts.items() if name in ("Gloo", "MPI", "NCCL")}
        parts = ", ".join(name if has else f"no {name}" for name, has in built.items())
        return Finding("ok", f"{text} ({parts})" if parts else text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("doctor", "Report what this machine can run, and what it lacks.")
    add = parser.add_argument
    train = "try every engine and launcher that is there in short trainings (10 minutes)"
    add("--train", action="store_true", help=train)
    add("--engines", metavar="NAME,NAME", default="", help="with --train: only these engines")
    where = "with --train: where the trainings and doctor.json go (default %(default)s)"
    add("--out", type=Path, default=Path("runs/doctor"), metavar="DIR", help=where)
    return parser


def main(argv: Argv = None) -> int:
    """Prints the report. Returns 1 if something installed does not work."""
    options = parser().parse_args(argv)
    chosen = list(filter(None, options.engines.split(",")))
    if unknown := [name for name in chosen if name not in TABLE]:
        parser().error(f"--engines: no engine {', '.join(unknown)}; there are {', '.join(TABLE)}")
    libraries = {name: probe(name) for name in PROBES}
    sections = {
        "machine": machine(libraries["torch"]),
        "engines": engines(libraries),
        "launchers": launchers(),
    }
    broken = False
    report: dict[str, list[str]] = {}
    for title, findings in sections.items():
        print(title)
        for finding in findings:
            broken |= finding.state == "broken"
            report.setdefault(title, []).append(str(finding).strip())
            print(finding, flush=True)
    torch = libraries["torch"]
    if options.train and torch:
        from dsframe.tools import doctor_train

        broken |= not doctor_train.run(torch.facts.get("gpus", []), chosen, options.out, report)
    return int(broken)


def probe(name: str) -> Library | None:
    """Loads a library in another process. Returns None if it is not installed."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        number = version(name)
    except PackageNotFoundError:
        number = "(version unknown)"
    command = [sys.executable, "-W", "ignore", "-c", PROBES[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Library(name, number, {}, f"no answer within {PROBE_SECONDS:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Library(name, number, {}, lines[-1] if lines else f"exit code {done.returncode}")
    return Library(name, number, json.loads(done.stdout.splitlines()[-1]))


def machine(torch: Library | None) -> Iterator[Finding]:
    """Yields findings about hardware and system."""
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("note", f"Python {platform.python_version()}, {system}, {cores} cores")
    for name, free, total in (
        ("memory", memory.available, memory.total),
        ("/dev/shm", shared.free, shared.total),
    ):
        yield Finding("note", f"{name}: {_gib(free)} of {_gib(total)} GiB free")
    if shared.total < ENOUGH_SHARED_MEMORY:
        why = "the data loader's workers and NCCL need more, and end in a bus error"
        yield Finding("absent", f"/dev/shm is small: {why}; docker run --shm-size=2g")
    gpus = torch.facts.get("gpus", []) if torch else []
    for name, size in gpus:
        yield Finding("ok", f"GPU {name}, {_gib(size)} GiB")
    if torch and not torch.broken and not gpus:
        why = "this torch is a build for CPUs" if torch.facts["cuda"] is None else "torch finds none"
        has_one = devices.installed() > 0
        yield Finding("broken" if has_one else "absent", f"no GPU: {why}{', but there is one' * has_one}")


def engines(libraries: Mapping[str, Library | None]) -> Iterator[Finding]:
    """Yields findings about the engines' libraries."""
    for name, library in libraries.items():
        yield library.finding if library else Finding("absent", f"{name}: not installed; {INSTALL[name]}")
    horovod, torch = libraries["horovod"], libraries["torch"]
    facts = horovod.facts if horovod else {}
    if facts and torch and torch.facts.get("gpus") and not facts["NCCL"]:
        yield Finding("absent", "horovod on GPUs: needs Horovod compiled with NCCL")


def launchers() -> Iterator[Finding]:
    """Yields findings about the launchers."""
    for name, remedy in LAUNCHERS.items():
        path = shutil.which(name, path=search_path())
        if path is None:
            yield Finding("absent", f"{name}: not found; {remedy}")
            continue
        plain = name == "deepspeed" and Path(path).resolve().parent != shipped("bin", "launch/bin").resolve()
        hint = f"; DeepSpeed's own, without -m: {ACTIVATE}" if plain else ""
        yield Finding("ok", f"{name}: {path}{hint}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
