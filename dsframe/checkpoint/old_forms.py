"""Translates the manifests of formats 2 and 3 (earlier dsframe) to today's. Supported for one release.

A parameter was stored whole, with its moments, in ``part-RANK-NUMBER.safetensors``; or in pieces, each a 1-d tensor in
``shard-RANK-NUMBER.safetensors``, for which the manifest has file, first element and number of elements. Tensors were
named ``KEY/NAME``, and only a file's header says where they are. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsframe.errors import CheckpointError
from dsframe.text import Json

FORMATS = (2, 3)
_BUFFERS = re.compile(r"buffers(?:-(\d+))?\.safetensors")
_MOST_BYTES = 100_000_000
"""Longest header: safetensors' own limit."""


def translated(path: Path, manifest: Json) -> Json:
    """Returns the manifest that today's dsframe would have written for the same files. Raises CheckpointError if they
    do not match."""
    headers: dict[str, Json] = {}

    def header(file: str) -> Json:
        if file not in manifest["files"] or Path(file).name != file:
            raise CheckpointError(f"{path}: {file!r} is not one of its files")
        if file not in headers:
            headers[file] = _header(path / file)
        return headers[file]

    try:
        parameters = {name: _parameter(name, entry, header) for name, entry in manifest["parameters"].items()}
        buffers: dict[str, Json] = {}
        for file in manifest["files"]:
            if match := _BUFFERS.fullmatch(file):
                buffers[f"rank-{int(match[1] or 0):05}"] = {
                    name: _tensor(file, entry) for name, entry in header(file).items()
                }
        files = {
            name: {
                "bytes": entry["bytes"],
                "checksums": [[entry["bytes"], entry["xxh3_128"]]] if entry["bytes"] else [],
            }
            for name, entry in manifest["files"].items()
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its manifest does not fit its files: {error!r}") from None
    return {**manifest, "files": files, "parameters": parameters, "buffers": buffers}


def _parameter(name: str, entry: Json, header: Callable[[str], Json]) -> Json:
    tensors = {}
    for key in ("weight", *entry["moments"]):
        full = f"{key}/{name}"
        if not entry.get("pieces"):
            tensors[key] = _tensor(entry["file"], header(entry["file"])[full])
            continue
        each: list[list[Any]] = []
        end = 0
        for file, first, count in sorted(entry["pieces"], key=lambda piece: int(piece[1])):
            tensor = _tensor(file, header(file)[full])
            if first != end or tensor["shape"] != [count]:
                raise ValueError(f"{full}: its pieces do not follow one another at element {min(first, end)}")
            each, end = each + tensor["pieces"], end + count
        tensors[key] = {"dtype": tensor["dtype"], "shape": entry["shape"], "pieces": each}
    if tensors["weight"]["shape"] != entry["shape"]:
        raise ValueError(f"weight/{name} has shape {tensors['weight']['shape']} instead of {entry['shape']}")
    return {"tensors": tensors, "scalars": entry["scalars"]}


def _tensor(file: str, entry: Json) -> Json:
    count = math.prod(entry["shape"])
    return {"dtype": entry["dtype"], "shape": entry["shape"], "pieces": [[file, entry["begin"], count]]}


def _header(path: Path) -> Json:
    """Returns the header of a safetensors file, with each tensor's first byte in the file. Raises CheckpointError."""
    try:
        if path.is_symlink() or not path.is_file():  # a pipe would block
            raise CheckpointError(f"{path} is not there, or no file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, _MOST_BYTES))
        entries: Json = json.loads(text)
        entries.pop("__metadata__", None)
        return {
            name: {"dtype": entry["dtype"], "shape": entry["shape"], "begin": 8 + length + entry["data_offsets"][0]}
            for name, entry in entries.items()
        }
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} has no header of safetensors") from None
