"""A checkpoint as DeepSpeed's universal loader reads it (``"checkpoint": {"load_universal": true}``), at ZeRO 1, 2 and 3.

    OUT/latest_universal                                   the name of the folder below
        step-00000042/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt
                      zero/optimizer_state.pt              the learning rate, the step
                      mp_rank_00_model_states.pt           module and counts, for stages 1 and 2
                      zero_pp_rank_0_mp_rank_00_model_states.pt   the same for stage 3, where parameters come from zero/ alone

DeepSpeed's own converter writes the one or the other; this folder serves both. Source: deepspeed 0.19.8,
``checkpoint/ds_to_universal.py``, ``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py`` (load_hp_checkpoint_state).
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from dsframe.checkpoint.portable import Checkpoint
from dsframe.errors import CheckpointError

LAYOUT = "0.19.8"
"""DeepSpeed's version whose layout this is."""
_MOMENTS = ["exp_avg", "exp_avg_sq"]


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Writes the folder ``out``, one parameter at a time. Raises OSError, and CheckpointError for optimizers other than Adam."""
    entries = checkpoint.manifest["parameters"]
    kept = {tuple(entry["moments"]) for entry in entries.values()} - {()}
    if kept != {tuple(_MOMENTS)}:
        raise CheckpointError(
            f"{checkpoint.path}: DeepSpeed's universal loader knows {' and '.join(_MOMENTS)} alone (Adam), not "
            f"{' or '.join('+'.join(keys) for keys in sorted(kept)) or 'a state before the first update'}"
        )
    folder = out / checkpoint.path.name
    module: dict[str, torch.Tensor] = dict(checkpoint.buffers())
    shapes: OrderedDict[str, torch.Size] = OrderedDict()
    step = 0.0
    for name, entry in entries.items():
        one = checkpoint.parameter(name)
        place = folder / "zero" / name
        place.mkdir(parents=True)
        module[name] = one.weight
        torch.save({"cat_dim": 0, "param": one.weight}, place / "fp32.pt")
        if not entry["moments"]:
            continue  # not trained
        shapes[name], step = one.weight.shape, one.scalars["step"]
        torch.save(torch.tensor(step), place / "step.pt")
        for key in _MOMENTS:
            torch.save({"cat_dim": 0, "param": one.moments[key]}, place / f"{key}.pt")
    module |= {alias: module[name] for alias, name in checkpoint.manifest["aliases"].items()}
    _write_states(checkpoint, folder, module, shapes, step)
    (out / "latest_universal").write_text(folder.name)


def _write_states(
    checkpoint: Checkpoint,
    folder: Path,
    module: dict[str, torch.Tensor],
    shapes: OrderedDict[str, torch.Size],
    step: float,
) -> None:
    manifest = checkpoint.manifest
    groups = [{"lr": manifest["learning_rate"], "params": [0]}]
    inner = {"state": {0: {"step": torch.tensor(step)}}, "param_groups": groups}
    torch.save(
        {"ds_version": LAYOUT, "param_groups": groups, "optimizer_state_dict": inner},
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
