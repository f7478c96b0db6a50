"""Exports a model with an adapter, merged or as a folder for peft, and compares its outputs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsframe import values
from dsframe.errors import CheckpointError
from dsframe.model.adapter import FILE, NAME, PREFIX
from dsframe.model.persistent import persistent_buffers
from dsframe.tasks import hub
from dsframe.text import one_line
from dsframe.values import Tensors

TOLERANCE = 1e-3
"""Relative, between outputs before and after a merge."""


def merge(model: nn.Module) -> nn.Module:
    """Adds the adapter to the base, in place, and restores the model's own layers and names. Raises CheckpointError if
    the outputs change."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    expected = outputs_of(model)
    _untie(model)
    wrappers = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    merged = set()
    for name, module in list(model.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if name in wrappers:
            whole: Any = module.unload_and_optionally_merge_module(True, True, [NAME])
        elif isinstance(module, BaseTunerLayer) and not name.startswith(tuple(of + "." for of in wrappers)):
            try:
                module.merge(safe_merge=True)
            except Exception as error:  # such as of grouped convolutions, which peft cannot merge
                raise CheckpointError(f"peft cannot merge {name}: {one_line(error)}; write --to peft") from error
            whole = module.get_base_layer()
            merged.add(name)
            if parent in merged:  # one module with several adapted parameters: its outermost layer was replaced
                continue
        else:
            continue
        setattr(model.get_submodule(parent), attribute, whole)
    _compare_outputs(expected, outputs_of(model), "the adapter is merged")
    return model.requires_grad_(True)


def _untie(model: nn.Module) -> None:
    """Unties layers with an adapter: an addition to one of two tied layers must not change the other."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for module in model.modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        for name, weight in list(layer.named_parameters(recurse=False)) if layer is not None else ():
            if owners[id(weight)] > 1:
                setattr(layer, name, nn.Parameter(weight.detach().clone()))


def write(model: nn.Module, base: nn.Module, dtype: torch.dtype, out: Path) -> None:
    """Writes the folder ``out`` for ``PeftModel.from_pretrained``, and loads it into ``base``, which changes.
    ``model``: with the adapter, whose values are rounded to ``dtype``. Raises CheckpointError if peft loads anything
    else, or if the training has changed buffers of the base."""
    import peft
    from safetensors.torch import save_file

    before, after = persistent_buffers(base), persistent_buffers(model)
    both = before.keys() & after.keys()  # of an adapted layer the buffers have other names
    if changed := difference({name: before[name] for name in both}, {name: after[name] for name in both}):
        whose = "".join(f', or train with "{module}" in modules_to_save' for module in changed.split(".")[-2:-1])
        raise CheckpointError(
            f"the training has changed {changed}, and a folder of peft has nothing of the base: its readers would compute with "
            f"that of before; write --merge{whose}"
        )
    settings: Any = model.peft_config[NAME]  # type: ignore[index]  # peft has put it there
    settings.inference_mode = True
    source = getattr(model, "name_or_path", None)
    source = str(Path(source).resolve()) if source and Path(source).is_dir() else source  # the reader starts elsewhere
    settings.base_model_name_or_path, settings.revision = hub.origin(str(source)) or (source, settings.revision)
    values = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    values = {name: tensor.to(dtype, copy=True).contiguous() for name, tensor in values.items()}
    out.mkdir()
    save_file({PREFIX + name: tensor for name, tensor in values.items()}, out / FILE, {"format": "pt"})
    settings.save_pretrained(str(out))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.set_peft_model_state_dict(model, values)
        loaded = peft.PeftModel.from_pretrained(base, str(out)).eval()
    theirs = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    theirs = {name.removeprefix(PREFIX): tensor.to(dtype) for name, tensor in theirs.items()}
    if name := difference(values, theirs):
        raise CheckpointError(f"peft, which has loaded the written folder, has another {name}: the export is not kept")
    _compare_outputs(outputs_of(model), outputs_of(loaded.get_base_model()), "peft has loaded the written folder")


def difference(expected: Tensors, loaded: Tensors) -> str:
    """Returns the first name whose tensor is missing, or differs in shape, dtype or value; "" if none."""
    alone = sorted(expected.keys() ^ loaded.keys())
    both = (name for name in expected if not _same(expected[name], loaded[name])) if not alone else iter(alone)
    return next(both, "")


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return values.same(first, second)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def outputs_of(model: nn.Module) -> Tensor | None:
    """Returns the outputs of a transformers model for a small batch; None for other models or unknown inputs."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    try:
        if name == "input_ids":
            inputs = torch.linspace(0, config.get_text_config().vocab_size - 1, 64).long().view(8, 8)  # type: ignore[union-attr]
        elif name == "pixel_values":
            size = config.image_size  # type: ignore[union-attr]
            height, width = size if isinstance(size, Sequence) else (size, size)
            inputs = torch.linspace(-1, 1, 2 * config.num_channels * height * width)  # type: ignore[union-attr]
            inputs = inputs.view(2, -1, height, width)
        else:
            return None
        outputs: Tensor = model.eval()(**{name: inputs})[0]
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):  # a model that needs more inputs
        return None
    return outputs.float()


def _compare_outputs(expected: Tensor | None, given: Tensor | None, when: str) -> None:
    """Raises CheckpointError if outputs differ by more than the rounding of float32 sums."""
    if expected is None or given is None or not expected.isfinite().all():
        return
    off = float((expected - given).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not off <= TOLERANCE:
        raise CheckpointError(
            f"where {when}, the model's outputs for one batch are off by {off:.1e} of the largest: the export is not kept"
        )
