"""A checkpoint as DeepSpeed's universal loader reads it (``"checkpoint": {"load_universal": true}``), at ZeRO 1, 2 and 3.

    OUT/latest_universal                                   the name of the folder below
        step-00000042/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt
                      zero/optimizer_state.pt              the learning rate, the step, the loss scale of fp16
                      mp_rank_00_model_states.pt           module and counts, for stages 1 and 2
                      zero_pp_rank_0_mp_rank_00_model_states.pt   the same for stage 3, where parameters come from zero/ alone

        untrained.pt                                       frozen parameters and buffers, a state_dict

DeepSpeed's own converter writes the one or the other; this folder serves both. Its loader puts back what the optimizer updates and
nothing else: frozen parameters and buffers silently stay as the program has made them (0.19.8). So they have a file of their own,
and the export says what to do with it. Source: deepspeed 0.19.8,
``checkpoint/ds_to_universal.py``, ``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py`` (load_hp_checkpoint_state).
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsframe.checkpoint.reader import Checkpoint
from dsframe.errors import CheckpointError

LAYOUT = "0.19.8"
"""The version of DeepSpeed that has this layout."""
_MOMENTS = ["exp_avg", "exp_avg_sq"]


UNTRAINED = "untrained.pt"
"""Frozen parameters and buffers."""


def write(
    checkpoint: Checkpoint, out: Path, convert: Callable[[torch.Tensor], torch.Tensor], say: Callable[[str], None]
) -> None:
    """Writes the folder ``out``, one parameter at a time. Raises OSError, and CheckpointError for optimizers other than Adam.

    ``convert``: to the dtype of the model's copy; masters and moments are float32. ``say``: hears what DeepSpeed will not
    load by itself.
    """
    kept = {tuple(checkpoint.moments(name)) for name in checkpoint.shapes} - {()}
    if kept != {tuple(_MOMENTS)}:
        raise CheckpointError(
            f"{checkpoint.path}: DeepSpeed's universal loader reads only {' and '.join(_MOMENTS)} (Adam), not "
            f"{' or '.join('+'.join(keys) for keys in sorted(kept)) or 'a state before the first update'}"
        )
    folder = out / checkpoint.path.name
    module: dict[str, torch.Tensor] = dict(checkpoint.buffers())
    untrained = dict(module)
    shapes: OrderedDict[str, torch.Size] = OrderedDict()
    step = 0.0
    for name in checkpoint.shapes:
        parameter = checkpoint.parameter(name)
        parameter_folder = _inside(folder / "zero", name)
        parameter_folder.mkdir(parents=True)
        module[name] = convert(parameter.weight)
        torch.save({"cat_dim": 0, "param": parameter.weight}, parameter_folder / "fp32.pt")
        if not parameter.moments:
            untrained[name] = parameter.weight
            continue
        shapes[name], step = parameter.weight.shape, parameter.scalars["step"]
        torch.save(torch.tensor(step), parameter_folder / "step.pt")
        for key in _MOMENTS:
            torch.save({"cat_dim": 0, "param": parameter.moments[key]}, parameter_folder / f"{key}.pt")
    if untrained:
        torch.save(untrained, folder / UNTRAINED)
        say(
            f"DeepSpeed's loader does not load {len(untrained)} frozen parameters and buffers (such as "
            f"{next(iter(untrained))}): before deepspeed.initialize, "
            f'model.load_state_dict(torch.load(".../{folder.name}/{UNTRAINED}"), strict=False)'
        )
    module |= {alias: module[name] for alias, name in checkpoint.manifest["aliases"].items()}
    if any(checkpoint.manifest["course"].get(key) for key in ("parameter_groups", "no_decay", "layer_decay")):
        say(
            "DeepSpeed 0.19.8 counts the optimizer's steps wrong at stage 3 with parameter groups: load it at stage 1 or 2"
        )
    _write_states(checkpoint, folder, module, shapes, step)
    (out / "latest_universal").write_text(folder.name)


def _inside(folder: Path, name: str) -> Path:
    """A parameter's folder. DeepSpeed's layout makes it of the name, which a forged manifest may lead out of ``folder``.

    Raises CheckpointError.
    """
    if Path(name).is_absolute() or {"..", "."} & set(name.split("/")):
        raise CheckpointError(
            f"parameter {name!r}: its name is no place below {folder}, where DeepSpeed's layout has a folder for it"
        )
    return folder / name


def _write_states(
    checkpoint: Checkpoint,
    folder: Path,
    module: dict[str, torch.Tensor],
    shapes: OrderedDict[str, torch.Size],
    step: float,
) -> None:
    manifest = checkpoint.manifest
    scaled = any("lr_scale" in group for group in manifest["course"].get("parameter_groups", ()))
    groups = [{**({} if scaled else {"lr": manifest["learning_rate"]}), "params": [0]}]
    inner = {"state": {0: {"step": torch.tensor(step)}}, "param_groups": groups}
    # At stages 1 and 2 the loader goes through these and the program's groups at once: what is left over stays as it was made.
    enough = groups * len(shapes)
    _save(
        {"ds_version": LAYOUT, "param_groups": enough, "optimizer_state_dict": inner, **_loss_scaler(checkpoint)},
        folder / "zero" / "optimizer_state.pt",
    )
    buffers = list(checkpoint.buffers())
    scheduled = manifest["course"].get("scheduler") is not None
    states: dict[str, Any] = {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": checkpoint.updates - 1} if scheduled else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": checkpoint.step - checkpoint.updates,
        "global_steps": checkpoint.step,
        "global_samples": checkpoint.step * manifest["training"]["train_batch_size"],
        "dp_world_size": manifest["run"]["world_size"],
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": LAYOUT,
    }
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    bare = {name: tensor if name in buffers else torch.empty(0) for name, tensor in module.items()}
    torch.save({**states, "module": bare}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


class DynamicLossScaler:
    """Stands for DeepSpeed's class of this name, of which its loader wants an object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


_PythonsPickler: Any = pickle._Pickler
"""The one in C cannot be told what to call a class."""


class _Pickler(_PythonsPickler):  # type: ignore[misc]
    """Writes our stand-in under the name of DeepSpeed's class, so that neither export nor its machine need DeepSpeed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not DynamicLossScaler:
            super().save_global(obj, name)
            return
        self.write(b"cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n")  # "c": opcode GLOBAL
        self.memoize(obj)


def _save(states: dict[str, Any], path: Path) -> None:
    torch.save(states, path, pickle_module=SimpleNamespace(Pickler=_Pickler, __name__=__name__))


def _loss_scaler(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns where fp16's dynamic loss scaling stands, as DeepSpeed's optimizers keep it; nothing where there is none.

    Source: deepspeed 0.19.8, ``runtime/fp16/loss_scaler.py`` and ``_load_global_state`` of its ZeRO optimizers.
    """
    state, section = checkpoint.loss_scale, checkpoint.manifest["course"].get("fp16") or {}
    if state is None or not section.get("enabled"):
        return {}
    scaler = DynamicLossScaler(
        cur_scale=state.scale,
        dynamic=True,
        cur_iter=state.steps,
        last_overflow_iter=state.last_overflow,
        scale_factor=2.0,
        scale_window=section["loss_scale_window"],
        min_scale=section["min_loss_scale"],
        delayed_shift=section["hysteresis"],
        cur_hysteresis=state.hysteresis_left,
        consecutive_hysteresis=section["consecutive_hysteresis"],
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    return {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False}
