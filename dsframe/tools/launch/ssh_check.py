"""Checks before a job on several hosts: can they be reached, and do their versions agree? Answers name host and remedy."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dsframe import __version__
from dsframe.errors import WorldError
from dsframe.tools.launch.ssh_launch import SSH_FAILED, python_path, ssh

LIMIT_SECONDS = 30.0
AT_ONCE = 128
"""Connections that are open at a time: each takes two files of a limit of 1,024."""
PACKAGES = ("torch", "deepspeed", "horovod")
_NO_PYTHON = 127
_ASK = """
import json, psutil
from dsframe.tools.launch.ssh_check import versions
print(json.dumps({"versions": versions(), "interfaces": sorted(psutil.net_if_addrs())}))
"""
# What ssh says, in lower case, and what that means.
_SSH_SAYS = {
    "permission denied": "refuses this user's key; make ssh work without a password: ssh-copy-id {host}",
    "connection refused": "does not listen for ssh; start sshd there, or choose another host",
    "could not resolve": "is an unknown name; write it as in /etc/hosts or DNS",
    "host key verification": "has an unknown host key; connect once by hand: ssh {host}",
    "timed out": "cannot be reached; is it switched on and connected?",
    "no route to host": "cannot be reached; is it switched on and connected?",
    "unreachable": "cannot be reached; is it switched on and connected?",
}


def versions() -> dict[str, str]:
    """Returns the versions that must be the same on every host."""
    found = {"python": ".".join(map(str, sys.version_info[:2])), "dsframe": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def examine(names: Sequence[str], interface: str | None) -> None:
    """Asks all hosts, ``AT_ONCE`` at a time.

    ``interface``: a network interface that every host must have under this name, as Horovod needs it. Raises WorldError with a
    line for each host that cannot take part.
    """
    directory = str(Path.cwd())
    words = ["env", *python_path(), sys.executable, "-c", shlex.quote(_ASK)]
    wrong = []
    for first in range(0, len(names), AT_ONCE):
        asked = {
            name: subprocess.Popen(
                ssh(name, directory, *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in names[first : first + AT_ONCE]
        }
        wrong += [text for name, process in asked.items() if (text := _answer(name, process, interface))]
    if wrong:
        raise WorldError("\n".join(wrong))


def _answer(name: str, process: subprocess.Popen[str], interface: str | None) -> str:
    """Returns what is wrong with a host; empty where nothing is."""
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{name} did not answer within {LIMIT_SECONDS:.0f} s"
    if process.returncode == SSH_FAILED:
        return f"{name} {explain(name, err)}"
    last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    if process.returncode == _NO_PYTHON or ("No such file" in err and sys.executable in err):
        return f"{name} has no {sys.executable}; the same environment must be there on every host"
    if "cd:" in err:
        return (
            f"{name} has no folder {Path.cwd()}; share it (NFS), or copy it there and choose a --run-dir that every host shares: "
            "all of them write the checkpoints"
        )
    if process.returncode:
        return f"{name}: {last}"
    told = json.loads(out.splitlines()[-1])
    own = versions()
    theirs = told["versions"]
    differing = [f"{key} {theirs.get(key)} instead of {own[key]}" for key in own if theirs.get(key) != own[key]]
    if differing:
        return f"{name} has {', '.join(differing)}; install the same versions on every host"
    if interface and interface not in told["interfaces"]:
        return (
            f"{name} has no network interface {interface} (it has {', '.join(told['interfaces'])}), and Horovod needs one of "
            "the same name on every host; choose it with --interface, or give them one name: ip link set dev NAME name NEW"
        )
    return ""


def explain(name: str, said: str) -> str:
    """Returns what ssh's words mean, with the remedy."""
    text = said.lower()
    for sign, meaning in _SSH_SAYS.items():
        if sign in text:
            return meaning.format(host=name)
    last = (said.strip().splitlines() or ["ssh ended without a message"])[-1]
    return f"cannot be reached by ssh: {last}"
