"""``dsframe export``: the command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.checkpoint import store
from dsframe.checkpoint.export import DTYPES, SUFFIX, averages, export, export_adapter, say_aloud
from dsframe.tools.commands import command

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dsframe.model.spill import Spill


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file, says so and returns 0. Raises CheckpointError where there is no whole checkpoint, or no room."""
    options = parser().parse_args(argv)
    to = options.to
    if options.merge and to in ("peft", "universal"):
        parser().error(f"--merge: {to} holds no merged model; choose huggingface, safetensors or torch")
    if not re.fullmatch(r"[1-9]\d*[KMG]B", options.shard_size):
        parser().error(f"--shard-size: {options.shard_size!r} is not a size; write for example 5GB or 200MB")
    if options.average and options.to == "universal":
        parser().error("--average: a universal checkpoint is to go on from, with the weights and the optimizer's state")
    weights = partial(merged, average=options.average) if options.merge else averages if options.average else None
    path = store.complete(options.checkpoint, best=True) if options.best else options.checkpoint
    if to == "peft":
        out = export_adapter(path, options.dtype, options.out, partial(with_base, average=options.average))
    else:
        out = export(path, to, options.dtype, options.out, shard_size=options.shard_size, weights=weights)
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    say_aloud(f"{out}: {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("export", "Write a checkpoint's weights into one file, or all of it for DeepSpeed.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest complete one)")
    add("--best", action="store_true", help="of a run's directory the best one (keep_best)")
    add(
        "--to",
        choices=sorted(SUFFIX),
        default="safetensors",
        help="format; huggingface: a folder for transformers' from_pretrained, with configuration and tokenizer; peft: a "
        "folder with the adapter alone, for peft's from_pretrained; universal: a "
        "folder for DeepSpeed's load_universal, with the optimizer's state (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of floating-point tensors; universal: of the model's copy, the rest is float32 (default: %(default)s)",
    )
    add(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="huggingface: largest size of a weights file, such as 5GB or 200MB (default: %(default)s)",
    )
    add("--average", action="store_true", help='the average of the weights ("ema") instead of them; not for universal')
    add(
        "--merge",
        action="store_true",
        help="add the adapter to the model that it was trained beside, which is built again",
    )
    add("--out", type=Path, help="file or folder to write (default: beside the checkpoint, named after it)")
    return parser


def with_base(path: Path, *, average: bool = False) -> tuple[nn.Module, nn.Module]:
    """The model of a checkpoint that has an adapter alone, and the model that the adapter is for."""
    from dsframe.inference import load_adapted

    return load_adapted(path, averages=average)


def merged(path: Path, dtype: str, spill: Spill | None, *, average: bool = False) -> dict[str, Tensor]:
    """The whole model of a checkpoint that has an adapter alone: built again, in memory. Raises CheckpointError, TaskError."""
    import torch

    from dsframe.inference import load_model
    from dsframe.model import adapter

    model = adapter.merge(load_model(path, averages=average)).to(getattr(torch, dtype))
    return dict(model.state_dict())
