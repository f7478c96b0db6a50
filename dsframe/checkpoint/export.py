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

    from dsframe.model.spill import Spill

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
        "--average", action="store_true", help='the average of the weights ("ema") instead of them; not for universal'
    )
    parser.add_argument(
        "--out", type=Path, help="file or folder to write (default: beside the checkpoint, named after it)"
    )
    options = parser.parse_args(argv)
    from dsframe.checkpoint.state import WEIGHT
    from dsframe.model import ema

    if not re.fullmatch(r"[1-9]\d*[KMG]B", options.shard_size):
        parser.error(f"--shard-size: {options.shard_size!r} is not a size; write for example 5GB or 200MB")
    if options.average and options.to == "universal":
        parser.error("--average: a universal checkpoint is to go on from, with the weights and the optimizer's state")
    key = ema.KEY if options.average else WEIGHT
    path, to, size = options.checkpoint, options.to, options.shard_size
    out = export(path, to, options.dtype, options.out, shard_size=size, key=key, say=_say)
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
    key: str = "weight",
    say: Callable[[str], None] = _say,
) -> Path:
    """Writes the weights of the newest whole checkpoint that ``path`` means; returns the file.

    They are read from the checkpoint's files as they are written. In 16 bits they lie in files meanwhile, so that memory holds no
    more than the largest tensor; for ``to`` "huggingface", than one of its files (``shard_size``).

    ``to`` "universal": a folder with everything. ``key``: ``ema`` for the averages of the weights. ``say`` hears what could
    not be taken along. Raises CheckpointError where there is no checkpoint or no averages, where the file exists already, or where
    it cannot be written; TaskError where transformers is missing.
    """
    import torch
    from safetensors import SafetensorError

    from dsframe.checkpoint import portable, pretrained, store, universal
    from dsframe.checkpoint.portable import Checkpoint
    from dsframe.model.spill import on_disk

    found = store.complete(path)
    target = _target(out or found.with_name(found.name + _SUFFIX[to]))
    kept = {one for entry in store.read_manifest(found)["parameters"].values() for one in entry["moments"]}
    if key not in {"weight", *kept}:
        raise CheckpointError(f'{found} has no averages: its training had no "ema"; leave out --average')
    partial = target.with_name(f".{target.name}.partial")
    spill = on_disk(target.parent)
    try:
        if to == "universal":
            shutil.rmtree(partial, ignore_errors=True)
            checkpoint = Checkpoint(found)
            universal.write(checkpoint, partial, lambda weight: spill.converted(weight, getattr(torch, dtype)), say)
            checkpoint.close()
        elif to == "huggingface":
            shutil.rmtree(partial, ignore_errors=True)
            pretrained.write(
                store.read_manifest(found), read(found, dtype, spill, key), dtype, partial, shard_size, say
            )
        elif to == "torch":
            torch.save(read(found, dtype, spill, key), partial)
        else:
            partial.unlink(missing_ok=True)
            portable.write_tensors(partial, read(found, dtype, spill, key), {"format": "pt"})
        partial.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"{target} cannot be written: {why}") from None
    finally:
        spill.close()
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
    return target


def _target(target: Path) -> Path:
    """``target`` itself, which can be written. Raises CheckpointError."""
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} cannot be written: there is no folder {target.parent}")
    return target


def read(path: Path, dtype: str = "float32", spill: Spill | None = None, key: str = "weight") -> dict[str, Tensor]:
    """A checkpoint's weights as a ``state_dict``; shared parameters are one tensor. Raises CheckpointError.

    ``key``: as for :func:`export`. ``spill``: where weights of another format than the checkpoint's lie, instead of in memory.
    """
    import torch
    from torch import Tensor

    from dsframe.checkpoint.portable import Checkpoint

    checkpoint = Checkpoint(path)
    wanted = getattr(torch, dtype)
    convert = spill.converted if spill is not None else Tensor.to
    tensors = {
        name: convert(tensor, wanted) if tensor.is_floating_point() else tensor
        for name, tensor in checkpoint.weights(key)
    }
    checkpoint.close()
    return tensors | {alias: tensors[name] for alias, name in checkpoint.manifest["aliases"].items()}
