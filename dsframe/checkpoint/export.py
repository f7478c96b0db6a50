"""``dsframe export``: a checkpoint for other programs.

Weights alone, in one file that needs no dsframe; or, for DeepSpeed's universal loader, everything. The file holds every name of
the model's ``state_dict``: parameters, buffers, and shared parameters under each of their names.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = {"safetensors": ".safetensors", "torch": ".pt", "universal": "-universal"}
_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file, says so and returns 0. Raises CheckpointError where there is no whole checkpoint, or no room."""
    parser = argparse.ArgumentParser(
        prog="dsframe export", description="Write a checkpoint's weights into one file, or all of it for DeepSpeed."
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest whole one)")
    parser.add_argument(
        "--to",
        choices=sorted(_SUFFIX),
        default="safetensors",
        help="format; universal: a folder for DeepSpeed's load_universal, with the optimizer's state (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="float32", help="of floating-point tensors (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="what to write (default: beside the checkpoint, named after it)")
    options = parser.parse_args(argv)
    out = export(options.checkpoint, options.to, options.dtype, options.out)
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    print(f"{out}: {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB", file=sys.stderr)
    return 0


def export(path: Path, to: str = "safetensors", dtype: str = "float32", out: Path | None = None) -> Path:
    """Writes the weights of the newest whole checkpoint that ``path`` means; returns the file. All of them are in memory once.

    ``to`` "universal": a folder with everything, in fp32. Raises CheckpointError where there is none, where the file is there
    already, or where it cannot be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from dsframe.checkpoint import store, universal
    from dsframe.checkpoint.portable import Checkpoint

    if to == "universal" and dtype != "float32":
        raise CheckpointError("the universal form is float32")
    found = next((one for one in store.locate(path) if not store.verify(one)), None)
    if found is None:
        raise CheckpointError(f"{path}: damaged: {'; '.join(store.verify(store.locate(path)[0]))}")
    target = out or found.with_name(found.name + _SUFFIX[to])
    if target.exists():
        raise CheckpointError(f"{target} is there already")
    partial = target.with_name(f".{target.name}.partial")
    try:
        if to == "universal":
            shutil.rmtree(partial, ignore_errors=True)
            checkpoint = Checkpoint(found)
            universal.write(checkpoint, partial)
            checkpoint.close()
        elif to == "torch":
            torch.save(read(found, dtype), partial)
        else:
            tensors = read(found, dtype)
            # safetensors refuses tensors that share memory
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
        partial.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise CheckpointError(f"{target} cannot be written: {error}") from None
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
