"""``dsframe export``: writes a checkpoint's weights for other programs.

Writes one file that does not need dsframe, or a folder for transformers or peft. The file has every name of the model's
``state_dict``: parameters, buffers, and shared parameters under each name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.checkpoint import store
from dsframe.checkpoint.byte_files import remove
from dsframe.errors import CheckpointError
from dsframe.text import Say
from dsframe.tools.commands import Argv, add_average, command
from dsframe.values import Tensors

if TYPE_CHECKING:
    from torch import nn

    from dsframe.model.spill import Spill

SUFFIX = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "huggingface": "-huggingface",
    "peft": "-peft",
}
DTYPES = ("float32", "bfloat16", "float16")
_WINDOW_BYTES = 8 << 20
"""When a model is loaded for comparison, memory holds only the newest parameters up to this many bytes."""


Weights = Callable[[Path, str, "Spill | None"], "Tensors"]
"""Returns the weights of a checkpoint in a dtype, as :func:`read`."""
Adapted = Callable[[Path], "tuple[nn.Module, nn.Module]"]
"""Returns a checkpoint's model with its adapter, and the model without, as :func:`dsframe.inference.load_adapted`."""


def say_aloud(line: str) -> None:
    """Writes a line to standard error."""
    print(line, file=sys.stderr)


def export(
    path: Path,
    to: str = "safetensors",
    dtype: str = "float32",
    out: Path | None = None,
    *,
    shard_size: str = "5GB",
    weights: Weights | None = None,
    say: Say = say_aloud,
) -> Path:
    """Writes the weights of a checkpoint, or of a run's newest complete one; returns the file. For "peft":
    :func:`export_adapter`.

    The result is loaded again with the target library, and gets its name only if it has every tensor of the checkpoint.

    Weights are streamed from the checkpoint's files. 16-bit copies are kept in temporary files, so that memory holds at
    most the largest tensor; for ``to`` "huggingface", at most one of its files (``shard_size``).

    ``weights``: returns other weights, such as those of model and adapter. None: what the run evaluated, the weights or
    their averages. ``say`` is told of averages that were not asked for, and of what could not be exported.

    Raises CheckpointError if there is no checkpoint, the file exists, cannot be written, or loads differently;
    TaskError if transformers is missing.
    """
    from torch import Tensor

    from dsframe.model.spill import on_disk

    checkpoint = store.complete(path)
    if weights in (None, read, averages) and "adapter" in store.read_manifest(checkpoint):
        raise CheckpointError(
            f"{checkpoint} has only an adapter, not the model that it was trained with: write --to peft, "
            "or --merge to add it to that model, which is built again"
        )
    target = out or checkpoint.with_name(checkpoint.name + SUFFIX[to])
    spill = on_disk(target.parent)
    try:
        with _replacing(target) as unfinished:
            weights = weights or (averages if _average(checkpoint, None, say) else read)
            tensors = weights(checkpoint, dtype, spill)
            if to != "torch" and (others := [name for name, value in tensors.items() if not isinstance(value, Tensor)]):
                say(f"{', '.join(others)}: no tensor, so it is left out; --to torch writes it")
                tensors = {name: value for name, value in tensors.items() if name not in others}
            _write(checkpoint, to, dtype, unfinished, tensors, shard_size, say)
            _verify(to, unfinished, tensors)
    finally:
        spill.close()
    return target


def export_adapter(path: Path, dtype: str, out: Path | None, adapted: Adapted) -> Path:
    """Writes the adapter of a checkpoint, or of a run's newest complete one, as a peft folder; returns the folder.

    peft must load it as the same model. Raises CheckpointError as :func:`export`, and if there is no adapter.
    """
    import torch

    from dsframe.model import adapter_export

    checkpoint = store.complete(path)
    if "adapter" not in store.read_manifest(checkpoint):
        raise CheckpointError('the checkpoint has no adapter: its training had no "adapter"; choose another format')
    target = out or checkpoint.with_name(checkpoint.name + SUFFIX["peft"])
    with _replacing(target) as unfinished:
        adapter_export.write(*adapted(checkpoint), getattr(torch, dtype), unfinished)
    return target


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary name, renamed to ``target`` at the end. Raises CheckpointError if it cannot be written."""
    from safetensors import SafetensorError

    _check(target)
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        remove(unfinished)
        yield unfinished
        unfinished.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"{target} cannot be written: {why}") from None
    finally:
        remove(unfinished)


def _write(
    checkpoint: Path,
    to: str,
    dtype: str,
    out: Path,
    weights: Tensors,
    shard_size: str,
    say: Say,
) -> None:
    import torch

    from dsframe.checkpoint import pretrained
    from dsframe.checkpoint.tensor_file import write_tensors

    if to == "huggingface":
        pretrained.write(store.read_manifest(checkpoint), weights, dtype, out, shard_size, say)
    elif to == "torch":
        torch.save(weights, out)
    else:
        write_tensors(out, weights, {"format": "pt"})


def _verify(to: str, out: Path, weights: Tensors) -> None:
    """Loads the result as its readers do. Raises CheckpointError if a tensor differs."""
    import torch
    from safetensors.torch import load_file

    from dsframe.model.adapter_export import difference
    from dsframe.model.spill import on_disk
    from dsframe.tasks import _transformers

    if to == "huggingface":
        spill = on_disk(out.parent, window_bytes=_WINDOW_BYTES)
        with spill.building():
            loaded = _transformers.load(out).state_dict()
        spill.close()
    else:
        loaded = torch.load(out, mmap=True) if to == "torch" else load_file(out)
    if name := difference(weights, loaded):
        library = {"huggingface": "transformers"}.get(to, to)
        raise CheckpointError(
            f"{library}, which has loaded what was written, has another {name}: the export is not kept"
        )


def _check(target: Path) -> None:
    """Raises CheckpointError if ``target`` cannot be written."""
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} cannot be written: there is no folder {target.parent}")


def read(path: Path, dtype: str = "float32", spill: Spill | None = None, key: str = "weight") -> Tensors:
    """Returns a checkpoint's weights as a ``state_dict``; shared parameters are one tensor. Raises CheckpointError.

    ``key``: which of a parameter's tensors. ``spill``: keeps converted weights on disk instead of in memory.
    """
    import torch
    from torch import Tensor

    from dsframe.checkpoint.reader import Checkpoint
    from dsframe.model import extra_state

    checkpoint = Checkpoint(path)
    wanted = getattr(torch, dtype)
    convert = spill.converted if spill is not None else Tensor.to
    tensors = {
        name: convert(tensor, wanted) if tensor.is_floating_point() else extra_state.unpacked(name, tensor)
        for name, tensor in checkpoint.weights(key)
    }
    checkpoint.close()
    return tensors | {alias: tensors[name] for alias, name in checkpoint.manifest["aliases"].items()}


def averages(path: Path, dtype: str = "float32", spill: Spill | None = None) -> Tensors:
    """Like :func:`read`, for the averages of the weights. Raises CheckpointError if there are none."""
    from dsframe.checkpoint.reader import Checkpoint
    from dsframe.model import ema

    if not Checkpoint(path).keeps(ema.KEY):
        raise CheckpointError(f'{path} has no averages: its training had no "ema"; leave out --average')
    return read(path, dtype, spill, ema.KEY)


def main(argv: Argv = None) -> int:
    """Writes the file, prints its name and returns 0. Raises CheckpointError without a complete checkpoint or space."""
    options = parser().parse_args(argv)
    to = options.to
    if options.merge and to == "peft":
        parser().error("--merge: peft holds no merged model; choose huggingface, safetensors or torch")
    if not re.fullmatch(r"[1-9]\d*[KMG]B", options.shard_size):
        parser().error(f"--shard-size: {options.shard_size!r} is not a size; write for example 5GB or 200MB")
    asked = {None: None, True: averages, False: read}[options.average]
    weights = partial(merged, average=options.average) if options.merge else asked
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
    parser = command("export", "Write a checkpoint's weights for other programs.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest complete one)")
    add("--best", action="store_true", help="of a run's directory the best one (keep_best)")
    add(
        "--to",
        choices=sorted(SUFFIX),
        default="safetensors",
        help="format; huggingface: a folder for transformers' from_pretrained, with configuration and tokenizer; peft: a "
        "folder with the adapter alone, for peft's from_pretrained (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of floating-point tensors (default: %(default)s)",
    )
    add(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="huggingface: largest size of a weights file, such as 5GB or 200MB (default: %(default)s)",
    )
    add_average(parser)
    add(
        "--merge",
        action="store_true",
        help="add the adapter to the model that it was trained with, which is built again",
    )
    add("--out", type=Path, help="file or folder to write (default: next to the checkpoint, named after it)")
    return parser


def _average(path: Path, asked: bool | None, say: Say = say_aloud) -> bool:
    """True if averages are to be written: as ``asked``, or if that is None as the run evaluated, which is printed."""
    from dsframe.checkpoint.reader import Checkpoint
    from dsframe.inference import evaluated_averages

    if asked is None and evaluated_averages(Checkpoint(path)):
        say("the averages of the weights are written, as the run evaluated them; --no-average writes the weights")
        return True
    return bool(asked)


def with_base(path: Path, *, average: bool | None = None) -> tuple[nn.Module, nn.Module]:
    """Returns the model of a checkpoint that has only an adapter, and the model without it."""
    from dsframe.inference import load_adapted

    return load_adapted(path, averages=_average(path, average))


def merged(path: Path, dtype: str, spill: Spill | None, *, average: bool | None = None) -> Tensors:
    """Returns the model of an adapter checkpoint, merged in memory. Raises CheckpointError, TaskError."""
    import torch

    from dsframe.inference import load_model
    from dsframe.model import adapter_export

    if number_format := store.read_manifest(path)["training"].get("adapter", {}).get("base_format"):
        say_aloud(f"the base is merged in full; the training rounded it to {number_format}, so outputs differ")
    model = load_model(path, averages=_average(path, average))
    model = adapter_export.merge(model).to(getattr(torch, dtype))
    return dict(model.state_dict())
