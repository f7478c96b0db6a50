"""``dsframe export``: a checkpoint for other programs.

Only weights, in one file that needs no dsframe, or as the folder that transformers' ``from_pretrained`` reads; or, for
DeepSpeed's universal loader, everything. The file holds every name of the model's ``state_dict``: parameters, buffers, and
shared parameters under each of their names.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from dsframe.model.spill import Spill

SUFFIX = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "huggingface": "-huggingface",
    "peft": "-peft",
    "universal": "-universal",
}
DTYPES = ("float32", "bfloat16", "float16")


Weights = Callable[[Path, str, "Spill | None"], "dict[str, Tensor]"]
"""Gives the weights of a checkpoint in a dtype; as :func:`read`."""


def say_aloud(line: str) -> None:
    """Writes a line on standard error."""
    print(line, file=sys.stderr)


def export(
    path: Path,
    to: str = "safetensors",
    dtype: str = "float32",
    out: Path | None = None,
    *,
    shard_size: str = "5GB",
    weights: Weights | None = None,
    say: Callable[[str], None] = say_aloud,
) -> Path:
    """Writes the weights of the newest whole checkpoint that ``path`` means; returns the file.

    They are read from the checkpoint's files as they are written. In 16 bits they lie in files meanwhile, so that memory holds no
    more than the largest tensor; for ``to`` "huggingface", than one of its files (``shard_size``).

    ``to`` "universal": a folder with everything. ``weights``: gives others, such as the averages, or an adapter's with the model's.
    ``say`` hears what could not be taken along. Raises CheckpointError where there is no checkpoint, where the file exists already,
    or where it cannot be written; TaskError where transformers is missing.
    """
    from safetensors import SafetensorError

    from dsframe.checkpoint import store
    from dsframe.model.spill import on_disk

    checkpoint = store.complete(path)
    target = _target(out or checkpoint.with_name(checkpoint.name + SUFFIX[to]))
    if weights in (None, averages) and to != "peft" and "adapter" in store.read_manifest(checkpoint):
        raise CheckpointError(
            f"{checkpoint} has only an adapter, not the model that it was trained with: write --to peft, "
            "or --merge to add it to that model, which is built again"
        )
    partial = target.with_name(f".{target.name}.partial")
    spill = on_disk(target.parent)
    try:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        if to == "universal":
            _universal(checkpoint, dtype, partial, spill, say)
        else:
            _write(checkpoint, to, dtype, partial, (weights or read)(checkpoint, dtype, spill), shard_size, say)
        partial.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"{target} cannot be written: {why}") from None
    finally:
        spill.close()
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
    return target


def _universal(path: Path, dtype: str, out: Path, spill: Spill, say: Callable[[str], None]) -> None:
    import torch

    from dsframe.checkpoint import universal
    from dsframe.checkpoint.portable import Checkpoint

    checkpoint = Checkpoint(path)
    universal.write(checkpoint, out, lambda weight: spill.converted(weight, getattr(torch, dtype)), say)
    checkpoint.close()


def _write(
    checkpoint: Path,
    to: str,
    dtype: str,
    out: Path,
    weights: dict[str, Tensor],
    shard_size: str,
    say: Callable[[str], None],
) -> None:
    import torch

    from dsframe.checkpoint import portable, pretrained, store
    from dsframe.model import adapter

    if to == "huggingface":
        pretrained.write(store.read_manifest(checkpoint), weights, dtype, out, shard_size, say)
    elif to == "peft":
        adapter.write(store.read_manifest(checkpoint), weights, out)
    elif to == "torch":
        torch.save(weights, out)
    else:
        portable.write_tensors(out, weights, {"format": "pt"})


def _target(target: Path) -> Path:
    """``target`` itself, which can be written. Raises CheckpointError."""
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} cannot be written: there is no folder {target.parent}")
    return target


def read(path: Path, dtype: str = "float32", spill: Spill | None = None, key: str = "weight") -> dict[str, Tensor]:
    """A checkpoint's weights as a ``state_dict``; shared parameters are one tensor. Raises CheckpointError.

    ``key``: among a parameter's tensors. ``spill``: where weights of another format than the checkpoint's lie, not in memory.
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


def averages(path: Path, dtype: str = "float32", spill: Spill | None = None) -> dict[str, Tensor]:
    """As :func:`read`: the averages of the weights. Raises CheckpointError where there are none."""
    from dsframe.checkpoint import store
    from dsframe.model import ema

    if not any(ema.KEY in entry["moments"] for entry in store.read_manifest(path)["parameters"].values()):
        raise CheckpointError(f'{path} has no averages: its training had no "ema"; leave out --average')
    return read(path, dtype, spill, ema.KEY)
