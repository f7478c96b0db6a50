"""State of DeepSpeed's engine, for every ZeRO stage, with or without offload. All of it is **collective**.

DeepSpeed's public accessors (``deepspeed.utils.safe_get_full_fp32_param`` and similar) are not enough. They omit the
optimizer's step count. What they set reaches the model's weights only after further calls. A new engine has no
optimizer state to set. At stage 3 they fail to set a parameter that does not divide evenly. None of this raises; the
restored training would be a different one. So this module uses internals, and a round-trip test checks it for every
stage.

Source: deepspeed 0.19.8, ``runtime/zero/stage3.py``, ``runtime/zero/stage_1_and_2.py``, ``runtime/bf16_optimizer.py``,
``runtime/fp16/{fused,unfused}_optimizer.py``, ``utils/tensor_fragment.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.engines import state_replica
from dsframe.engines.deepspeed.state_flat import Piece, fill
from dsframe.engines.state_replica import ParameterView
from dsframe.model.persistent import aliases, compare, load_buffers, saved_buffers, saved_parameters
from dsframe.model.state import (
    WEIGHT,
    EngineState,
    LossScaleState,
    ParameterShard,
    ParameterState,
    SavedState,
    ShardedParameters,
    TensorShard,
)


def state(engine: Any, model: nn.Module, updates: int) -> EngineState:
    """**Collective** to read to its end. ``engine``: DeepSpeed's. ``model``: the trained one, with the state's
    names."""
    parameters = _parameters(engine, model)
    return EngineState(updates, _loss_scale(engine), saved_buffers(model), aliases(model), parameters)


@torch.no_grad()
def load_state(
    engine: Any, model: nn.Module, saved: SavedState, accumulation_steps: int, train_batch_size: int
) -> None:
    """**Collective.** Raises CheckpointError if the checkpoint belongs to another model or this stage cannot hold it."""
    compare("parameter", shapes(model), saved.shapes)
    load_buffers(model, saved)
    optimizer = engine.optimizer
    if _is_stage_3(optimizer):
        _load_stage_3(engine, model, saved)
    elif _flat_partitions(optimizer) is not None:
        _load_stage_1_2(engine, model, saved)
    else:
        slots, frozen = _stage_0(engine, model)
        state_replica.write(slots, frozen, engine.basic_optimizer, saved)
        _round_masters_into_model(optimizer)
    _put_loss_scale(engine, saved.loss_scale)
    # Counters of DeepSpeed's monitors and gradient accumulation.
    engine.global_steps = saved.updates
    engine.micro_steps = saved.updates * accumulation_steps
    engine.global_samples = saved.updates * train_batch_size


def _parameters(engine: Any, model: nn.Module) -> ShardedParameters:
    optimizer = engine.optimizer
    whole: Iterable[ParameterState]
    if _is_stage_3(optimizer):
        shards, whole = _shards_stage_3(engine, model), _read_stage_3(engine, model)
    elif _flat_partitions(optimizer) is not None:
        trained = views(engine, model)
        names = {view.name for view in trained}
        frozen = [ParameterView(n, p.shape, p) for n, p in saved_parameters(model) if n not in names]
        held = trained, frozen, optimizer.optimizer
        shards, whole = state_replica.shards(*held), state_replica.read(*held)
    else:
        held = *_stage_0(engine, model), engine.basic_optimizer
        shards, whole = state_replica.shards(*held), state_replica.read(*held)
    return ShardedParameters(shards, whole)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in saved_parameters(model)}


def views(engine: Any, model: nn.Module) -> list[ParameterView]:
    """Returns the trained parameters' views in the tensors that this rank's optimizer updates; not for NVMe."""
    optimizer = engine.optimizer
    names = _names(model)
    if _is_stage_3(optimizer):
        return [view for _, group in _sub_groups(optimizer, names) for view in group]
    if _flat_partitions(optimizer) is not None:
        return list(_views_stage_1_2(optimizer, names))
    return _stage_0(engine, model)[0]


@dataclass(frozen=True)
class _FlatView(ParameterView):
    """A parameter of which this rank has a range, in a flat tensor with other parameters."""

    size: int = 0
    first: int = 0
    """First element of the range in the flattened parameter."""
    gather: Callable[[Tensor], Tensor] = torch.clone
    """**Collective.** Returns the whole parameter in fp32, given this rank's range."""

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(0, self.start or 0, self.size)

    def whole(self, piece: Tensor) -> Tensor:
        return self.gather(piece)

    def span(self, tensor: Tensor) -> tuple[int, int]:
        return self.first, self.size


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns every parameter's shape before stage 3 sharded it."""
    return {name: _shape(parameter) for name, parameter in saved_parameters(model)}


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # stage 3 leaves an empty tensor as the parameter


# Stage 0: a plain optimizer, or one of two wrappers with fp32 masters of a 16-bit model.


def _stage_0(engine: Any, model: nn.Module) -> tuple[list[ParameterView], list[ParameterView]]:
    optimizer = engine.optimizer
    named = list(saved_parameters(model))
    slots_by_id: dict[int, tuple[Tensor, int | None]] = {}
    if hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            start = 0
            for parameter in group:
                slots_by_id[id(parameter)] = (flat, start)
                start += parameter.numel()
    elif hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            slots_by_id |= {id(p): (master, None) for p, master in zip(group, masters, strict=True)}
    else:
        # Not by requires_grad: the parameters are frozen while another model trains.
        slots_by_id = {id(p): (p, None) for group in optimizer.param_groups for p in group["params"]}
    slots = [ParameterView(name, tuple(p.shape), *slots_by_id[id(p)]) for name, p in named if id(p) in slots_by_id]
    return slots, [ParameterView(name, tuple(p.shape), p) for name, p in named if id(p) not in slots_by_id]


def _round_masters_into_model(optimizer: Any) -> None:
    if hasattr(optimizer, "fp32_groups_flat"):
        for rounded, flat in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            rounded.copy_(flat)
    elif hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            torch._foreach_copy_([p.data for p in group], [master.data for master in masters])


# Stages 1 and 2: each rank's optimizer has one flat fp32 tensor for each parameter group, a slice of all its
# parameters.


def _flat_partitions(optimizer: Any) -> list[Tensor] | None:
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            flats: list[Tensor] = getattr(optimizer, name)
            return flats
    return None


def _bit16_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    return groups


def _views_stage_1_2(optimizer: Any, names: dict[int, str]) -> Iterator[ParameterView]:
    for group, flat in zip(_bit16_groups(optimizer), _flat_partitions(optimizer) or (), strict=True):
        for parameter in group:
            piece = _piece(names.pop(id(parameter)), parameter)
            gather = partial(_gather_stage_1_2, parameter, piece)
            yield _FlatView(piece.name, parameter.shape, flat, piece.start, piece.size, piece.first, gather)


def _gather_stage_1_2(parameter: Any, piece: Piece, held: Tensor) -> Tensor:
    full = torch.zeros(parameter.numel(), device=parameter.device)
    full.narrow(0, piece.first, piece.size).copy_(held)
    dist.all_reduce(full, group=parameter._dp_group)  # DeepSpeed's group
    return full.view(parameter.shape)


def _piece(name: str, parameter: Any) -> Piece:
    if (mapping := parameter._hp_mapping) is None:  # another rank has all of it
        return Piece(name, 0, 0, 0)
    address, here = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return Piece(name, here.start, address.numel, address.start)


def _load_stage_1_2(engine: Any, model: nn.Module, saved: SavedState) -> None:
    optimizer = engine.optimizer
    names = _names(model)
    flats = _flat_partitions(optimizer)
    assert flats is not None
    for group, flat in zip(_bit16_groups(optimizer), flats, strict=True):
        pieces = [_piece(names.pop(id(parameter)), parameter) for parameter in group]
        fill(optimizer.optimizer, flat, pieces, saved)
    optimizer.update_lp_params()
    for name, parameter in saved_parameters(model):
        if id(parameter) in names:
            parameter.data.copy_(saved.parameter(name).weight)


# Stage 3: each parameter is sharded separately. Each rank's pieces lie one after another in flat fp32 tensors, one for
# each sub-group of parameters. With NVMe these are in files, and read and written one sub-group at a time.


def _is_stage_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _sub_groups(optimizer: Any, names: dict[int, str]) -> Iterator[tuple[int, list[_FlatView]]]:
    """Yields each sub-group's number and parameters; removes these from ``names``."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for index, (group, flat) in enumerate(groups):
        yield index, [_view_stage_3(optimizer, names.pop(id(parameter)), parameter, flat) for parameter in group]


def _view_stage_3(optimizer: Any, name: str, parameter: Any, flat: Tensor) -> _FlatView:
    piece = _piece_stage_3(optimizer, name, parameter)
    gather = partial(_gather_stage_3, optimizer, parameter)
    return _FlatView(name, _shape(parameter), flat, piece.start, piece.size, piece.first, gather)


def _gather_stage_3(optimizer: Any, parameter: Any, held: Tensor) -> Tensor:
    _, _, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
    padded = torch.zeros(count, dtype=held.dtype, device=parameter.device)
    padded.narrow(0, 0, held.numel()).copy_(held)
    gathered: Tensor = optimizer._fp32_state_allgather(parameter, padded)
    return gathered.float()


def _read_stage_3(engine: Any, model: nn.Module) -> Iterator[ParameterState]:
    optimizer = engine.optimizer
    names = _names(model)
    for index, group in _sub_groups(optimizer, names):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        yield from state_replica.read(group, (), optimizer.optimizer)
        if swapped:
            optimizer._release_swap_buffers(index)
    for name, parameter in saved_parameters(model):
        if id(parameter) in names:
            yield _gather_frozen(name, parameter)


def _shards_stage_3(engine: Any, model: nn.Module) -> list[ParameterShard]:
    optimizer = engine.optimizer
    names = _names(model)
    shards: list[ParameterShard] = []
    for index, group in _sub_groups(optimizer, names):
        of_group = state_replica.shards(group, (), optimizer.optimizer)
        swapped = optimizer._swappable_optimizer_subgroup(index)
        shards += _swapping(optimizer, index, of_group) if swapped else of_group
    return shards + [_shard_frozen(name, p) for name, p in saved_parameters(model) if id(p) in names]


def _swapping(optimizer: Any, index: int, shards: list[ParameterShard]) -> Iterator[ParameterShard]:
    """Yields shards on NVMe: reading the first loads its sub-group into memory, reading the last releases it."""
    for number, shard in enumerate(shards):
        keys = list(shard.tensors)
        tensors = {}
        for key, tensor in shard.tensors.items():
            at = number == 0 and key == keys[0], number == len(shards) - 1 and key == keys[-1]
            read = partial(_swapped_in, optimizer, index, tensor.read, at)
            tensors[key] = replace(tensor, read=read, in_order=True)
        yield replace(shard, tensors=tensors)


def _piece_stage_3(optimizer: Any, name: str, parameter: Any) -> Piece:
    _, start, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
    first = count * optimizer._get_param_partition_rank(parameter)
    whole = math.prod(_shape(parameter))
    size = max(0, min(count, whole - first))  # the last rank's piece may end in padding
    return Piece(name, start, size, min(first, whole))


def _shard_frozen(name: str, parameter: Any) -> ParameterShard:
    shape = _shape(parameter)
    gather = lambda: _gather_frozen(name, parameter).weight.flatten()  # noqa: E731
    return ParameterShard(
        name, {WEIGHT: TensorShard(shape, torch.float32, 0, math.prod(shape), gather, in_order=True)}, {}
    )


def _swapped_in(optimizer: Any, index: int, read: Callable[[], Tensor], at: tuple[bool, bool]) -> Tensor:
    """Returns a copy of a piece on NVMe. ``at``: whether it is the first, and the last, piece of its sub-group."""
    if at[0]:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    copy = read().clone()
    if at[1]:
        optimizer._release_swap_buffers(index)
    return copy


def _gather_frozen(name: str, parameter: Any) -> ParameterState:
    parameter.all_gather(param_list=[parameter])
    weight = parameter.detach().float().clone()
    parameter.partition(param_list=[parameter], has_been_updated=False)
    return ParameterState(name, weight, {}, {})


def _load_stage_3(engine: Any, model: nn.Module, saved: SavedState) -> None:
    optimizer = engine.optimizer
    names = _names(model)
    optimizer._partition_all_parameters()  # otherwise persistent parameters would keep their old values
    for index, (group, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        pieces = [_piece_stage_3(optimizer, names.pop(id(parameter)), parameter) for parameter in group]
        fill(optimizer.optimizer, flat, pieces, saved)
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_out(index)
    frozen: Any
    for name, frozen in saved_parameters(model):
        if id(frozen) in names:
            frozen.all_gather(param_list=[frozen])
            frozen.data.copy_(saved.parameter(name).weight)
            frozen.partition(param_list=[frozen], has_been_updated=True)


# The masters, for every stage that has them in memory.


def masters(engine: Any, model: nn.Module) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Returns the optimizer and the tensors that it updates: parameters, fp32 masters, or this rank's flat shards."""
    optimizer = engine.optimizer
    if _is_stage_3(optimizer):
        return optimizer.optimizer, list(optimizer.fp32_partitioned_groups_flat)
    flats = _flat_partitions(optimizer)
    if flats is not None:
        return optimizer.optimizer, list(flats)
    unique = {id(slot.master): slot.master for slot in _stage_0(engine, model)[0]}
    return engine.basic_optimizer, list(unique.values())


@torch.no_grad()
def publish(engine: Any) -> None:
    """**Collective.** Copies the masters to the model on every rank."""
    optimizer = engine.optimizer
    if _is_stage_3(optimizer):
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        _gather_kept(optimizer)
    elif _flat_partitions(optimizer) is not None:
        optimizer.update_lp_params()
    else:
        _round_masters_into_model(optimizer)


def _gather_kept(optimizer: Any) -> None:
    """**Collective.** At stage 3, gathers the new values of persistent parameters."""
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


# The loss scale, in any wrapper.


def _loss_scale(engine: Any) -> LossScaleState | None:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and getattr(scaler, "dynamic", False):
        return LossScaleState(
            float(scaler.cur_scale), int(scaler.cur_hysteresis), int(scaler.cur_iter), int(scaler.last_overflow_iter)
        )
    config = getattr(engine.optimizer, "loss_scale_config", None)
    if config is not None and config.dynamic_loss_scale:
        return LossScaleState(float(config.cur_scale), 1, int(config.cur_iter), int(config.last_overflow_iter))
    return None


def _put_loss_scale(engine: Any, saved: LossScaleState | None) -> None:
    if saved is None:
        return
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and getattr(scaler, "dynamic", False):
        scaler.cur_scale, scaler.cur_hysteresis = saved.scale, saved.hysteresis_left
        scaler.cur_iter, scaler.last_overflow_iter = saved.steps, saved.last_overflow
    config = getattr(engine.optimizer, "loss_scale_config", None)
    if config is not None and config.dynamic_loss_scale:
        config.cur_scale = saved.scale
        config.cur_iter = saved.steps
        config.last_overflow_iter = saved.last_overflow
