"""Builds the extension once and keeps it, by torch's version and its source's digest."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).with_name("device")
NAME = "dsframe_standin"
TORCH = "2.13"
"""The release of torch whose headers and Python modules the stand-in was written for."""


def reason_against():
    """Why the stand-in cannot be used here; empty where it can."""
    import torch

    if torch.version.cuda is not None:
        return "this torch is built for CUDA; the stand-in needs a CPU build"
    if not torch.__version__.startswith(f"{TORCH}."):
        return f"the stand-in is written for torch {TORCH}; here is {torch.__version__}"
    if shutil.which("g++") is None:
        return "g++ is missing, which builds the stand-in"
    return ""


def folder():
    """Where the built extension lies: beside the other builds of this repository, or in ``DSFRAME_STANDIN_CACHE``."""
    import torch

    digest = hashlib.sha256(torch.__version__.encode() + sys.version.encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    kept = os.environ.get("DSFRAME_STANDIN_CACHE")
    root = Path(kept) if kept else Path(__file__).resolve().parents[2] / ".setup" / "standin"
    return root / f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"


def build():
    """The extension's file; compiled on the first call. Other processes wait meanwhile."""
    made = folder()
    library = made / f"{NAME}.so"
    if library.exists():
        return library
    made.mkdir(parents=True, exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # In a process of its own, which loads what it has built.
            command = [sys.executable, "-m", "tests.standin.build", str(made)]
            done = subprocess.run(command, cwd=SOURCES.parents[2], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the stand-in cannot be built:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
    return library


def _compile(made):
    from torch.utils.cpp_extension import load

    work = made / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    load(
        NAME,
        [str(SOURCES / "module.cpp")],
        extra_cflags=["-O1", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"],
        build_directory=str(work),
        is_python_module=False,
        is_standalone=False,
        keep_intermediates=False,
    )
    (work / f"{NAME}.so").replace(made / f"{NAME}.so")  # whole or not at all
    shutil.rmtree(work)


if __name__ == "__main__":
    _compile(Path(sys.argv[1]))
