"""``dsframe export``: a checkpoint for other programs.

Weights alone, in one file that needs no dsframe, or as the folder that transformers' ``from_pretrained`` reads; or, for
DeepSpeed's universal loader, everything. The file holds every name of the model's ``state_dict``: parameters, buffers, and
shared parameters under each of their names.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = {"safetensors": ".safetensors", "torch": ".pt", "huggingface": "-huggingface", "universal": "-universal"}
_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file, says so and returns 0. Raises CheckpointError where there is no whole checkpoint, or no room."""
    parser = argparse.ArgumentParser(
        prog="dsframe export", description="Write a checkpoint's weights into one file, or all of it for DeepSpeed."
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest complete one)")
    parser.add_argument(
        "--to",
        choices=sorted(_SUFFIX),
        default="safetensors",
        help="format; huggingface: a folder for transformers' from_pretrained, with configuration and tokenizer; universal: a "
        "folder for DeepSpeed's load_universal, with the optimizer's state (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="dtype of floating-point tensors; universal: of the model's copy, the rest is float32 (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="huggingface: largest size of a weights file, such as 5GB or 200MB (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, help="file or folder to write (default: beside the checkpoint, named after it)"
    )
    options = parser.parse_args(argv)
    if not re.fullmatch(r"[1-9]\d*[KMG]B", options.shard_size):
        parser.error(f"--shard-size: {options.shard_size!r} is not a size; write for example 5GB or 200MB")
    out = export(options.checkpoint, options.to, options.dtype, options.out, shard_size=options.shard_size, say=_say)
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    _say(f"{out}: {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def export(
    path: Path,
    to: str = "safetensors",
    dtype: str = "float32",
    out: Path | None = None,
    *,
    shard_size: str = "5GB",
    say: Callable[[str], None] = _say,
) -> Path:
    """Writes the weights of the newest whole checkpoint that ``path`` means; returns the file. All of them are in memory once.

    ``to`` "universal": a folder with everything. ``say`` hears what could not be taken along. Raises CheckpointError where there
    is no checkpoint, where the file exists already, or where it cannot be written; TaskError where transformers is missing.
    """
    import torch
    from safetensors import SafetensorError

    from dsframe.checkpoint import portable, pretrained, store, universal
    from dsframe.checkpoint.portable import Checkpoint

    found = next((one for one in store.locate(path) if not store.verify(one)), None)
    if found is None:
        raise CheckpointError(f"{path}: damaged: {'; '.join(store.verify(store.locate(path)[0]))}")
    target = out or found.with_name(found.name + _SUFFIX[to])
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} cannot be written: there is no folder {target.parent}")
    partial = target.with_name(f".{target.name}.partial")
    try:
        if to == "universal":
            shutil.rmtree(partial, ignore_errors=True)
            checkpoint = Checkpoint(found)
            universal.write(checkpoint, partial, getattr(torch, dtype), say)
            checkpoint.close()
        elif to == "huggingface":
            shutil.rmtree(partial, ignore_errors=True)
            pretrained.write(store.read_manifest(found), read(found, dtype), dtype, partial, shard_size, say)
        elif to == "torch":
            torch.save(read(found, dtype), partial)
        else:
            partial.unlink(missing_ok=True)
            portable.write_tensors(partial, read(found, dtype), {"format": "pt"})
        partial.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"{target} cannot be written: {why}") from None
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
    return target


def read(path: Path, dtype: str = "float32") -> dict[str, Tensor]:
    """A checkpoint's weights as a ``state_dict``; shared parameters are one tensor. Raises CheckpointError."""
    import torch

    from dsframe.checkpoint.portable import Checkpoint

    checkpoint = Checkpoint(path)
    wanted = getattr(torch, dtype)
    tensors = {
        name: tensor.to(wanted) if tensor.is_floating_point() else tensor for name, tensor in checkpoint.weights()
    }
    checkpoint.close()
    return tensors | {alias: tensors[name] for alias, name in checkpoint.manifest["aliases"].items()}
