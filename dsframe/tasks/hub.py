"""Finds models of the Hugging Face hub, ``hub:NAME`` or ``hub:NAME@REVISION``, in the cache of huggingface_hub. A
subprocess downloads missing ones, so that this process stays offline."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from dsframe.errors import TaskError

HUB = "hub:"
_LEFT_OUT = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*"]
"""Files that are not needed; some can contain code."""
_DOWNLOAD = """
import sys, huggingface_hub
name, revision, *left_out = sys.argv[1:]
try:
    huggingface_hub.snapshot_download(name, revision=revision, ignore_patterns=left_out)
except Exception as error:
    sys.exit(type(error).__name__)
"""
_REASONS = {
    "GatedRepoError": "its owner asks who uses it; accept its terms at https://huggingface.co/{name}, then: hf auth login",
    "RepositoryNotFoundError": "there is none, or it is private; check the name, or: hf auth login",
    "RevisionNotFoundError": "it has no revision {revision}; name a branch, a tag or a commit of it",
    "HFValidationError": "this is not a name; write hub:OWNER/NAME or hub:OWNER/NAME@REVISION",
}
_OFFLINE = (
    "it is not in the cache, and this machine cannot download it; where there is a network: "
    "hf download {name} --revision {revision}, then copy the cache (HF_HOME), or name the folder of --local-dir"
)


@cache
def snapshot(address: str) -> Path:
    """Returns the model's folder. Raises TaskError with a remedy if it is not available."""
    name, _, revision = address.removeprefix(HUB).partition("@")
    revision = revision or "main"
    folder = _cached(name, revision)
    if folder is None:
        command = [sys.executable, "-c", _DOWNLOAD, name, revision, *_LEFT_OUT]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        why, folder = ended.stderr.strip().rpartition("\n")[2], _cached(name, revision)
        if folder is None:
            reason = _REASONS.get(why, _OFFLINE).format(name=name, revision=revision)
            raise TaskError(f"task: {address} of the Hugging Face hub: {reason}")
    return folder


def _cached(name: str, revision: str) -> Path | None:
    try:
        import huggingface_hub
    except ImportError:
        raise TaskError('"hub:" needs huggingface_hub; pip install "dsframe[transformers]"') from None
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not cached, or an invalid name
        return None


def origin(path: str) -> tuple[str, str] | None:
    """Returns name and commit of a folder in the cache; None for any other folder."""
    match = re.search(r"models--([^/]+)/snapshots/(\w+)/?$", path)
    return (match[1].replace("--", "/"), match[2]) if match else None
