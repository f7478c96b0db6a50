"""Writes constraints.txt: one version of each package for every Python of pyproject.toml, resolved by uv.

    python3 launch/lock.py              # make lock: keeps today's versions where they still do
    python3 launch/lock.py --upgrade    # takes the newest

Each line ends with the Python versions that the package itself asks for (Requires-Python), as the package index says:
tests/unit/test_lock.py compares them with the line's marker. uv reads its own settings (UV_INDEX_URL), not pip's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.txt"
UV = "uv==0.13.9"
OLDEST = "3.10"
BUILD = ("setuptools", "wheel", "hatchling", "editables", "cmake", "horovod==0.28.1")
"""What launch/setup needs beside the extras of pyproject.toml."""
TORCH = "torch==2.13.0"
HEADER = f"""\
# The version of every package that launch/setup and the extra "bench" install, for Linux and Python {OLDEST} to 3.13. Written by
# `make lock`. The build of torch (+cpu, +cu130) is chosen by launch/setup. After #: the package's own Requires-Python.
"""


def resolve(uv: str, *options: str) -> list[str]:
    """Returns uv's lines ``name==version [; marker]``. Raises CalledProcessError, with uv's message on the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, pins, out = (Path(folder) / name for name in ("build.in", "torch.txt", "out.txt"))
        inputs.write_text("\n".join(BUILD) + "\n")
        pins.write_text(TORCH + "\n")
        out.write_text("\n".join(line.partition("  #")[0] for line in LOCK.read_text().splitlines()) + "\n")
        command = [uv, "pip", "compile", str(ROOT / "pyproject.toml"), str(inputs), "--universal", "--all-extras"]
        command += ["--python-version", OLDEST, "--no-python-downloads", "--no-annotate", "--no-header", "--quiet"]
        command += ["--no-emit-package", "dsframe", "--constraints", str(pins), "--output-file", str(out), *options]
        subprocess.run(command, check=True)
        return [line for line in out.read_text().splitlines() if not line.startswith("#")]


def runs_on_linux(line: str) -> bool:
    """False for packages of other systems: uv has no option that leaves them out of a universal file."""
    return not re.search(r"sys_platform == '(?!linux)|platform_system == '(?!Linux)", line)


def requires_python(name: str, version: str) -> str:
    """Returns Requires-Python of a version, as the package index has it, or ``*``."""
    from pip._internal.models.index import PyPI  # its address, where no other is set

    index = os.environ.get("UV_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX") or PyPI.simple_url
    request = urllib.request.Request(
        f"{index.rstrip('/')}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    stem = re.sub(r"[-_.]+", "[-_.]+", name)
    for file in files:
        if re.match(rf"{stem}-{re.escape(version)}(-|\.tar|\.zip)", file["filename"], re.IGNORECASE):
            return (file.get("requires-python") or "*").replace(" ", "")
    raise SystemExit(f"lock: the package index has no file of {name} {version}")


def with_requires_python(line: str) -> str:
    name, version = re.match(r"([^=\s]+)==([^\s;]+)", line).groups()
    return f"{line}  # {requires_python(name, version)}"


def main(options: list[str]) -> None:
    """Resolves, and writes the file where that succeeded."""
    tools = ROOT / ".setup" / "uv"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", tools, UV], check=True)
    lines = [line for line in resolve(str(tools / "bin" / "uv"), *options) if runs_on_linux(line)]
    with ThreadPoolExecutor(8) as pool:
        LOCK.write_text(HEADER + "\n".join(pool.map(with_requires_python, lines)) + "\n")
    print(f"lock: {len(lines)} lines in {LOCK.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
