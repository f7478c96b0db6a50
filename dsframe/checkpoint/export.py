"""``dsframe export``: a checkpoint's weights alone, in one file that needs no dsframe.

The file holds every name of the model's ``state_dict``: parameters, buffers, and shared parameters under each of their names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = {"safetensors": ".safetensors", "torch": ".pt"}
_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file, says so and returns 0. Raises CheckpointError where there is no whole checkpoint, or no room."""
    parser = argparse.ArgumentParser(prog="dsframe export", description="Write a checkpoint's weights into one file.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest whole one)")
    parser.add_argument("--to", choices=sorted(_SUFFIX), default="safetensors", help="format (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="float32", help="of floating-point tensors (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="file to write (default: CHECKPOINT.safetensors or .pt, beside it)")
    options = parser.parse_args(argv)
    out = export(options.checkpoint, options.to, options.dtype, options.out)
    print(f"{out}: {out.stat().st_size / 1e6:,.1f} MB", file=sys.stderr)
    return 0


def export(path: Path, to: str = "safetensors", dtype: str = "float32", out: Path | None = None) -> Path:
    """Writes the weights of the newest whole checkpoint that ``path`` means; returns the file. All of them are in memory once.

    Raises CheckpointError where there is none, where the file is there already, or where it cannot be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from dsframe.checkpoint import store

    found = next((one for one in store.locate(path) if not store.verify(one)), None)
    if found is None:
        raise CheckpointError(f"{path}: damaged: {'; '.join(store.verify(store.locate(path)[0]))}")
    target = out or found.with_name(found.name + _SUFFIX[to])
    if target.exists():
        raise CheckpointError(f"{target} is there already")
    tensors = read(found, dtype)
    partial = target.with_name(f".{target.name}.partial")
    try:
        if to == "torch":
            torch.save(tensors, partial)
        else:
            # safetensors refuses tensors that share memory
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
        partial.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
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
