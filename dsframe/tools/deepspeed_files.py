"""A checkpoint as DeepSpeed itself writes it, ZeRO 0 to 3, read parameter by parameter with its optimizer state.

The files are pickled. None of their code runs here: torch's restricted unpickler reads them, and every class that it does not
know (DeepSpeed's own) becomes an inert object that holds what was pickled. DeepSpeed need not be installed. A file that asks for
what only harm needs, such as ``os.system``, torch refuses altogether.

Layout, deepspeed 0.19.8 (``runtime/engine.py``: _save_checkpoint, ``utils/zero_to_fp32.py``): ``mp_rank_00_model_states.pt`` has
the module, the counts, and at stage 0 the optimizer. At stages 1 and 2 each rank's ``*optim_states.pt`` has a slice of one flat
tensor per parameter group; at stage 3, for each parameter in turn, its share of ceil(numel / ranks) elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsframe.errors import CheckpointError
from dsframe.model.state import WEIGHT, LossScaleState, Number, ParameterState, split

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00")
Shapes = Mapping[str, Sequence[int]]
_FLAT = (1,)
"""Stands for the shape of flat tensors, which are about many parameters at once."""


class Inert:
    """Stands for an object of a class that is not imported; its attributes are those that were pickled."""

    def __new__(cls, *arguments: Any) -> Inert:
        made = object.__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        """Takes anything."""


def load(path: Path) -> Any:
    """Returns what a pickled file holds. Runs none of its code. Raises CheckpointError where it cannot be read."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        inert: list[Any] = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in unknown]
        with torch.serialization.safe_globals(inert):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle can raise nearly anything
        lines = str(error).strip().splitlines()
        reason = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else repr(error))
        raise CheckpointError(f"{path} cannot be read: {reason}") from None


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """The contents of a DeepSpeed checkpoint."""

    path: Path
    stage: int
    """0, 2 (which reads like 1) or 3."""
    step: int
    updates: int
    ranks: int
    """Data-parallel ranks that wrote it."""
    learning_rate: float
    """Learning rate of the next update, from DeepSpeed's scheduler."""
    loss_scale: LossScaleState | None
    version: str
    module: Mapping[str, Tensor]
    """The module's ``state_dict``: buffers, and parameters where ranks hold them whole."""
    shapes: Shapes
    """Shape of every parameter that the file names (stages 1 to 3), else empty."""
    optimizers: Sequence[Mapping[str, Any]]
    """The optimizer's part of each rank; one at stage 0."""
    groups: Sequence[Shapes]
    """Stages 1 to 3: name -> shape of each parameter group, in the order of its flat tensor."""
    frozen: Mapping[str, Sequence[Tensor]]
    """Stage 3: each rank's shard of parameters that are not trained."""

    def parameters(self, is_trained: Mapping[str, bool], shapes: Shapes) -> Iterator[ParameterState]:
        """Every parameter of the model, one at a time. ``is_trained``: name -> whether it is trained, in the model's order.

        Raises CheckpointError where state and model do not fit together.
        """
        trained = {0: _stage_0, 2: _stage_1_2, 3: _stage_3}[self.stage](self, is_trained, shapes)
        done = set()
        for parameter in trained:
            done.add(parameter.name)
            yield parameter
        for name in is_trained:
            if name in done:
                continue
            if name in self.frozen:
                whole = torch.cat([part.flatten() for part in self.frozen[name]])
                yield ParameterState(name, whole[: math.prod(shapes[name])].view(*shapes[name]).float(), {}, {})
            elif name in self.module and tuple(self.module[name].shape) == tuple(shapes[name]):
                yield ParameterState(name, self.module[name].float(), {}, {})
            else:
                raise CheckpointError(f"{self.path} has no state for the parameter {name}")


def find(directory: Path, tag: str | None) -> Path:
    """A checkpoint's folder: ``directory``, or the one in it that ``tag`` or the file ``latest`` names. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist")
    if tag is None and any(directory.glob("*model_states.pt")):
        return directory
    if tag is None:
        try:
            tag = (directory / "latest").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            raise CheckpointError(
                f"{directory} has no file named latest and no *model_states.pt; is it DeepSpeed's save_checkpoint folder?"
            ) from None
    if not tag or Path(tag).name != tag or tag == "..":
        raise CheckpointError(f"{tag!r} is not the name of a folder in {directory}")
    if not (directory / tag).is_dir():
        raise CheckpointError(f"{directory / tag} does not exist")
    return directory / tag


def read(path: Path) -> DeepSpeedCheckpoint:
    """Returns what lies in a checkpoint's folder; tensors are mapped, not read. Raises CheckpointError with the reason."""
    names = {file.name for file in path.iterdir()}
    for pattern, what in (
        (r"mp_rank_0*[1-9]\d*", "is sharded among tensor-parallel ranks"),
        (r"layer_.*expert|expert_", "has experts"),
        (r"layer_\d+", "belongs to a pipeline"),
        (r"zero$", "is a universal checkpoint, which lacks part of the state"),
    ):
        if any(re.match(pattern, name) or re.search(rf"_{pattern}", name) for name in names):
            raise CheckpointError(f"{path} {what}, which cannot be imported; import one of ZeRO 0 to 3")
    main = next(
        (name for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt") if name in names),
        None,
    )
    if main is None:
        raise CheckpointError(f"{path} has no mp_rank_00_model_states.pt; is it a DeepSpeed checkpoint?")
    model = load(path / main)
    ranks = int(model["dp_world_size"])
    optim_files = _by_rank(name for name in names if name.endswith("optim_states.pt"))
    groups: list[Shapes] = []
    frozen: dict[str, list[Tensor]] = {}
    if not optim_files:
        if model.get("optimizer") is None:
            raise CheckpointError(f"{path} has no optimizer state; was it saved with one?")
        stage, optimizers = 0, [model["optimizer"]]
    else:
        if sorted(optim_files) != list(range(ranks)):
            raise CheckpointError(
                f"{path} has the optimizer files of {len(optim_files)} ranks, but {ranks} ranks wrote it"
            )
        optimizers = [load(path / optim_files[rank])["optimizer_state_dict"] for rank in range(ranks)]
        stage = 3 if "fp32_flat_groups" in optimizers[0] else 2
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        if stage == 3 and model.get("frozen_param_shapes"):
            files = _by_rank(name for name in names if name.endswith("model_states.pt"))
            for rank in range(ranks):
                for name, part in load(path / files[rank])["frozen_param_fragments"].items():
                    frozen.setdefault(name, []).append(part)
    return DeepSpeedCheckpoint(
        path=path,
        stage=stage,
        step=int(model["global_steps"]),
        updates=int(model["global_steps"]) - int(model["skipped_steps"]),
        ranks=ranks,
        learning_rate=float(_base(optimizers[0], stage)["param_groups"][0]["lr"]),
        loss_scale=_loss_scale(optimizers[0]),
        version=str(model.get("ds_version")),
        module=model["module"],
        shapes={name: shape for group in groups for name, shape in group.items()},
        optimizers=optimizers,
        groups=groups,
        frozen=frozen,
    )


def _by_rank(names: Iterator[str]) -> dict[int, str]:
    return {int(match[1]): name for name in names if (match := _RANK.search(name))}


def _base(optimizer: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """The state of torch's own optimizer inside DeepSpeed's."""
    inner = optimizer.get(
        "base_optimizer_state" if stage == 2 else "optimizer_state_dict", optimizer if stage == 0 else None
    )
    if not isinstance(inner, Mapping) or "state" not in inner:
        raise CheckpointError("the optimizer's state has an unknown form (elastic_checkpoint, or on NVMe?)")
    return inner


def _loss_scale(optimizer: Mapping[str, Any]) -> LossScaleState | None:
    scaler = optimizer.get("loss_scaler")
    kept: Mapping[str, Any] = dict(optimizer) if scaler is None else vars(scaler)
    if not optimizer.get("dynamic_loss_scale"):
        return None
    return LossScaleState(
        float(kept["cur_scale"]),
        int(kept.get("cur_hysteresis", 1)),
        int(kept["cur_iter"]),
        int(kept["last_overflow_iter"]),
    )


def _stage_0(
    checkpoint: DeepSpeedCheckpoint, is_trained: Mapping[str, bool], shapes: Shapes
) -> Iterator[ParameterState]:
    """The optimizer numbers its parameters: all of the model's, or those that are trained, in the model's order."""
    optimizer = checkpoint.optimizers[0]
    base = _base(optimizer, 0)
    if len(base["param_groups"]) > 1:
        raise CheckpointError(f"{checkpoint.path}: at stage 0 parameters in several groups have no names in the file")
    trained = [name for name, is_one in is_trained.items() if is_one]
    if flat := list(optimizer.get("fp32_groups_flat", ())):
        moments, scalars = split(base["state"].get(0, {}), _FLAT)
        yield from _cut({name: shapes[name] for name in trained}, [{WEIGHT: flat[0], **moments}], scalars)
        return
    masters = [master for group in optimizer.get("fp32_groups", ()) for master in group]
    for names in (list(is_trained), trained):
        if len(names) == len(base["param_groups"][0]["params"]) and all(
            tensor.shape == torch.Size(shapes[names[number]])
            for number, held in base["state"].items()
            for tensor in split(held, shapes[names[number]])[0].values()
        ):
            break
    else:
        raise CheckpointError(f"{checkpoint.path}: the optimizer's state does not fit the model's parameters")
    for number, name in enumerate(names):
        if is_trained[name]:
            moments, scalars = split(base["state"].get(number, {}), shapes[name])
            weight = masters[number] if masters else checkpoint.module[name]
            yield ParameterState(name, weight.float(), {key: value.float() for key, value in moments.items()}, scalars)


def _cut(
    shapes: Shapes, of_ranks: Sequence[Mapping[str, Tensor]], scalars: Mapping[str, Number]
) -> Iterator[ParameterState]:
    """Parameters that lie one after the other in flat tensors, each in equal parts on all ranks: weights and moments by key."""
    ranks, start = [{key: flat.flatten() for key, flat in of_rank.items()} for of_rank in of_ranks], 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        end = start - (-size // len(ranks))
        if any(flat.numel() < end for of_rank in ranks for flat in of_rank.values()):
            raise CheckpointError(f"the flat tensors end before {name}; is part of them on NVMe?")
        tensors = {
            key: torch.cat([of_rank[key][start:end] for of_rank in ranks])[:size].view(*shape).float()
            for key in ranks[0]
        }
        yield ParameterState(name, tensors.pop(WEIGHT), tensors, dict(scalars))
        start = end


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        key: torch.cat([part[key].flatten() for part in parts if key in part]) for key in (parts[0] if parts else ())
    }


def _stage_1_2(
    checkpoint: DeepSpeedCheckpoint, is_trained: Mapping[str, bool], shapes: Shapes
) -> Iterator[ParameterState]:
    for number, group in enumerate(checkpoint.groups):
        parts = []
        for optimizer in checkpoint.optimizers:
            if any((optimizer.get("param_alignment_paddings") or [[]])[number]):
                message = "parameters are padded one by one, which dsframe does not support"
                raise CheckpointError(f"{checkpoint.path}: {message}")
            moments, scalars = split(_base(optimizer, 2)["state"].get(number, {}), _FLAT)
            parts.append({WEIGHT: optimizer["single_partition_of_fp32_groups"][number], **moments})
        yield from _cut(group, [_joined(parts)], scalars)


def _stage_3(
    checkpoint: DeepSpeedCheckpoint, is_trained: Mapping[str, bool], shapes: Shapes
) -> Iterator[ParameterState]:
    of_ranks, scalars = [], {}
    for optimizer in checkpoint.optimizers:
        states = [split(state, _FLAT) for _, state in sorted(_base(optimizer, 3)["state"].items())]
        weights = torch.cat([flat.flatten() for flat in optimizer["fp32_flat_groups"]])
        of_ranks.append({WEIGHT: weights, **_joined([moments for moments, _ in states])})
        scalars = states[0][1] if states else {}
    yield from _cut(checkpoint.shapes, of_ranks, scalars)
