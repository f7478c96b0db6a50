"""``python -m dsframe.data.fetch fashion-mnist [--to DIR]``: fetches a data set before training.

Only this command writes data; training only reads. It tries, in order: the folder itself, a copy elsewhere on this
machine, Debian's package (Fashion-MNIST; unpacked, not installed), torchvision's download. Every file is checked,
written under a temporary name and renamed, so a data set is complete or missing, even with concurrent runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsframe.data import vision
from dsframe.data._torchvision import torchvision
from dsframe.data.files import data_root, replacing
from dsframe.data.idx import read_idx
from dsframe.data.raw_bytes import read_bytes
from dsframe.errors import DataError, DsframeError, exit_code_of
from dsframe.text import Say

DEBIAN_PACKAGE = "dataset-fashion-mnist"
_COMMAND_SECONDS = 300
_CONNECTION_SECONDS = 30


def fetch(name: str, to: str | None = None, report: Say = print) -> Path:
    """Makes sure that ``name`` (``fashion-mnist``, ``mnist``, ``cifar10``) is complete under ``to``; returns ``to``.

    ``to``: default ``$DSFRAME_DATA``, else ``~/.cache/dsframe/data``. ``report`` gets one line about what was done.
    Raises DataError that lists all attempts.
    """
    root = data_root(to)
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=root, prefix=".fetch-")
    except OSError as error:
        raise DataError(f"{root}: cannot be written to ({error.strerror}); choose another folder with --to") from error
    tried = []
    with scratch:
        for method in (_present, *_METHODS[name]):
            try:
                origin = method(name, root, Path(scratch.name))
                _check(name, str(root))
            except (DsframeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                tried.append(f"{method.__name__.strip('_')}: {_reason(error)}")
                continue
            report(f"{name}: {origin} in {root}")
            return root
    raise DataError(f"{name} could not be fetched to {root}; tried:\n  " + "\n  ".join(tried))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return f"{' '.join(map(str, error.cmd[:2]))} failed: {lines[-1] if lines else f'status {error.returncode}'}"
    return str(error).partition('; run "python')[0].strip().replace("\n", " ")


def _check(name: str, folder: str) -> None:
    """Reads the complete data set in ``folder``. Raises DataError if something is missing or damaged."""
    if name == "cifar10":
        vision.read_cifar(folder, train=True)
        vision.read_cifar(folder, train=False)
    else:
        for path in vision.find_mnist(name, folder).values():
            read_idx(path)


def _present(name: str, root: Path, scratch: Path) -> str:
    """Uses the folder itself."""
    return "complete"


def _local(name: str, root: Path, scratch: Path) -> str:
    """Copies from elsewhere on this machine."""
    files = vision.find_mnist(name, None)
    _store(files, name, root)
    return f"copied from {next(iter(files.values())).parent}"


def _debian(name: str, root: Path, scratch: Path) -> str:
    """Downloads Debian's package with apt and unpacks it into ``scratch``. Needs no root and installs nothing."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        raise DataError("no apt-get on this machine")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}

    def command(*arguments: str) -> None:
        subprocess.run(
            arguments,
            cwd=scratch,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
        )

    try:
        command(apt, "download", DEBIAN_PACKAGE)
    except subprocess.CalledProcessError:
        if os.geteuid() != 0:
            raise
        command(apt, "update", "-qq")  # a fresh container has no package lists, and only root may update them
        command(apt, "download", DEBIAN_PACKAGE)
    packages = list(scratch.glob(f"{DEBIAN_PACKAGE}_*.deb"))
    if not packages:
        raise DataError(f"apt-get download left no {DEBIAN_PACKAGE}_*.deb")
    command(dpkg, "-x", str(packages[0]), str(scratch / "package"))
    folder = scratch / "package" / vision.DEBIAN_FASHION_MNIST.relative_to("/")
    _store(vision.find_mnist(name, str(folder)), name, root)
    return f"unpacked from Debian's package {packages[0].stem}"


def _download(name: str, root: Path, scratch: Path) -> str:
    """Uses torchvision's download, which checks MD5 sums."""
    datasets = torchvision().datasets
    folder = scratch / "torchvision"
    if name == "cifar10":
        datasets.CIFAR10(folder, download=True)
        target = root / "cifar-10-batches-py"
        target.mkdir(exist_ok=True)
        for path in (folder / "cifar-10-batches-py").iterdir():
            path.replace(target / path.name)
    else:
        (datasets.FashionMNIST if name == "fashion-mnist" else datasets.MNIST)(folder, download=True)
        _store(vision.find_mnist(name, str(folder)), name, root)
    return "downloaded by torchvision"


def _store(files: dict[str, Path], name: str, root: Path) -> None:
    """Writes the four files, checked and decompressed, in torchvision's layout under ``root``."""
    target = root / vision.TORCHVISION_FOLDER[name]
    target.mkdir(parents=True, exist_ok=True)
    for file, path in files.items():
        read_idx(path)
        with replacing(target / file) as out:
            out.write(read_bytes(path))


_METHODS: dict[str, list[Callable[[str, Path, Path], str]]] = {
    "fashion-mnist": [_local, _debian, _download],
    "mnist": [_local, _download],
    "cifar10": [_download],
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dsframe.data.fetch", description="Download a data set, once.")
    parser.add_argument("name", choices=["fashion-mnist", "mnist", "cifar10"])
    parser.add_argument("--to", metavar="DIR", help="folder (default: $DSFRAME_DATA, else ~/.cache/dsframe/data)")
    options = parser.parse_args(arguments)
    socket.setdefaulttimeout(_CONNECTION_SECONDS)  # torchvision's download sets no timeout

    def command() -> None:
        fetch(options.name, options.to)

    return exit_code_of(command)


if __name__ == "__main__":
    sys.exit(main())
