"""Builds a task's model, the same on every rank and engine, before a library wraps it."""

from __future__ import annotations

import copy
import math
import os
import re
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from xxhash import xxh3_64_hexdigest

from dsframe.cluster.exchange import Ranks, all_gather_text, by_value, failures, first_difference
from dsframe.config.read.secrets import is_secret
from dsframe.data.sample_draws import DrawTrial, SampleDraws
from dsframe.errors import DsframeError, TaskError, WorldError
from dsframe.host import generators
from dsframe.host.memory import give_back, keep_freed
from dsframe.model import adapter as adapters
from dsframe.model import batch_norm, derivatives, formats, gradient_hooks, groups, max_norm, overrides, switches
from dsframe.model.built import FROZEN, ON_RANKS, Adapter, BuiltModel, Dependence
from dsframe.model.built_memory import BuiltMemory
from dsframe.model.parts import parts_of
from dsframe.model.persistent import aliases
from dsframe.model.plain_buffers import integers_as_buffers, plain_buffers
from dsframe.model.plan import Plan
from dsframe.model.spill import Spill
from dsframe.model.untrainable import refuse_untrainable
from dsframe.model.weight_watch import WeightWatch
from dsframe.tasks.task import Task
from dsframe.values import attributes_of, elements, has_attributes

_DEPTH = 3
"""Levels of attributes below the task that are searched for numbers."""
_FEW = 100
"""Longest list or dict that is searched."""
_PIECE = 1 << 22
"""Elements of a tensor that are summed at once. A larger tensor of a task is data, of which only the shape is recorded."""
_LARGE = 1e9
"""Larger numbers are taken for times, addresses or hashes, which differ between processes."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_ON_MICRO_BATCHES = "so the training depends on the micro batch size"
LARGE = 1 << 24
"""Number of elements. A larger sharded model returns freed memory to the system; smaller ones keep it, for speed."""


def build_model(
    ranks: Ranks, *, keeps_float64: bool = False, spill: Spill | None = None
) -> tuple[nn.Module, BuiltModel]:
    """**Collective.** Builds the task's model, the same on every rank and engine.

    Raises TaskError if it differs between ranks, and on every rank if one of them could not build it.

    The model is built on the CPU and then moved to the plan's device, so that initial weights depend on neither the
    engine nor the device: CUDA's generator gives other numbers on other GPUs. (Each layer of a task has its own seed.)

    Args:
        ranks: The engine with its plan; it can already sum over ranks.
        keeps_float64: True if the engine trains a model in float64; else such a model is refused.
        spill: Stores large parameters outside memory. The model then stays on the CPU, where the engine shards it.
    """
    plan: Plan = ranks.plan
    task, settings = plan.task, plan.config.settings
    model, peft = _build_on_cpu(ranks, spill)
    manifest = {"course": {"modules": described(model), "attributes": attributes(model, task)}}
    memory = BuiltMemory(model.named_parameters())
    refuse_untrainable(model, type(task).__name__)
    integers_as_buffers(model)
    plain_buffers(model)
    formats.keep_in_fp32(plan.config, model)
    task.context = replace(task.context, ranks=weakref.proxy(ranks))
    dtype = formats.own_dtype(plan.config, task, model, keeps_float64=keeps_float64, part=plan.part)
    parameter_groups = groups.settle_groups(plan.config, task, model)
    parts = parts_of(model)
    adapter = _adapter(ranks, model, peft, spill) if peft else None
    origin = _place(plan, model, spill)
    # Loaded models are in evaluation mode.
    _to_training_mode(model, task)
    batch_norm.apply(model, weakref.proxy(ranks), formats.parameter_dtype(plan.config))
    # A task may return the same module again, with gradients of an earlier training, or of a step interrupted by a lost
    # process.
    for parameter in model.parameters():
        parameter.grad = None
    max_norm.share_limits(model, weakref.proxy(ranks))  # before a switch keeps the forward() of a table
    switches.apply(model, plan.config, plan.device)
    per_sample = settings.per_sample_randomness
    built = BuiltModel(
        dtype=dtype,
        groups=parameter_groups,
        adapter=adapter,
        parts=parts,
        origin=origin,
        manifest=manifest,
        depends=_all_dependences(plan, model),
        gradient_hooks=gradient_hooks.find(model),
        draws=DrawTrial(model, plan.device),
        memory=memory,
        watch=None if plan.part else WeightWatch(ranks, model, memory, max_norm.written(model)),
        sample_draws=SampleDraws(model, plan.seed, plan.batch.micro_batch_size, plan.device) if per_sample else None,
    )
    # Ranks see different samples, so their dropout must differ.
    generators.seed(plan.seed + 1 + plan.data_rank)
    return model, built


def _to_training_mode(model: nn.Module, task: Task) -> None:
    try:
        model.train()
    except NotImplementedError as error:
        raise TaskError(
            f"{type(task).__name__}: {type(model).__name__}.train() is not implemented ({error}), as of what torch.export gives; "
            "return the module that it was made from"
        ) from None


def _all_dependences(plan: Plan, model: nn.Module) -> tuple[Dependence, ...]:
    settings, task = plan.config.settings, plan.task
    depends = dependences(task, model, per_sample=settings.per_sample_randomness, synced=settings.model.sync_batch_norm)
    if kept := formats.kept_in_fp32(model, formats.parameter_dtype(plan.config)):
        text = (
            f"parts {', '.join(kept)} stay in fp32 in transformers, and become 16-bit here, as all weights (the optimizer's copies "
            'are fp32); "keep_in_fp32" names what is to stay, and "torch_autocast" in the place of bf16 or fp16 keeps all'
        )
        depends += (Dependence(text),)
    if task.over_micro_batches and plan.batch.accumulation_steps > 1:
        text = (
            f"{task.over_micro_batches} is over a micro-batch, so the training depends on gradient_accumulation_steps"
        )
        depends += (Dependence(text),)
    if (tied := max_norm.tied(model)) and plan.batch.accumulation_steps > 1:
        text = (
            f"{', '.join(tied)}, with a max_norm, is used by other modules too, and each micro-batch shortens the rows that "
            "it looks up, so the training depends on gradient_accumulation_steps"
        )
        depends += (Dependence(text),)
    return depends


def _adapter(ranks: Ranks, model: nn.Module, peft: str, spill: Spill | None) -> Adapter:
    """**Collective.** Returns the file's adapter; quantizes its base if the file asks for it."""
    plan = ranks.plan
    adapter = adapters.settle_adapter(
        plan.config,
        model,
        peft,
        (plan.world.rank, plan.world.size),
        lambda text: all_gather_text(ranks, text),
        (lambda size: None) if spill is None else spill.touched,
    )
    adapters.quantise(plan.config, model, formats.parameter_dtype(plan.config))
    return adapter


def _build_on_cpu(ranks: Ranks, spill: Spill | None) -> tuple[nn.Module, str]:
    """**Collective.** Returns the task's model with the file's adapter, and peft's settings, or ""."""
    plan = ranks.plan
    generators.seed(plan.seed)
    if spill is not None and plan.device.type == "cpu":
        give_back()
    model, peft, failed = None, "", None
    try:
        with torch.device("cpu"), nullcontext() if spill is None else spill.building():
            model = plan.task.model()
            overrides.refuse(model, type(plan.task).__name__)
            peft = adapters.add(plan.config, model)
    except DsframeError as error:
        failed = error
    problems = failures(ranks, str(failed or ""))
    if failed is not None:
        raise failed
    if model is None or problems:  # on another rank
        raise WorldError(f"the model could not be built: {'; '.join(problems)}")
    assert_same_model(ranks, model)
    return model, peft


def _place(plan: Plan, model: nn.Module, spill: Spill | None) -> str:
    """Moves the model to the device, or its remaining parameters to files. Describes where a large model was built."""
    if spill is None:
        dtype = formats.parameter_dtype(plan.config)
        for parameter in model.parameters():  # round first, so that the device never holds all in fp32
            if parameter.is_floating_point():
                rounded = dtype if dtype.itemsize < 4 and not formats.is_kept(parameter) else parameter.dtype
                parameter.data = parameter.data.to(rounded)
                parameter.data = parameter.data.to(plan.device)
        model.to(plan.device)  # buffers, and 4-bit weights with their scales
        return ""
    large = elements(model.parameters()) > LARGE
    if plan.device.type == "cpu" and not large:
        keep_freed()
    # Parameters that a constructor put there without registering them, such as deep copies.
    for parameter in model.parameters():
        spill.add(parameter)
    spill.evict()
    return spill.description if large else ""


def small_copy(model: nn.Module, what: Any) -> Any:
    """Returns a deep copy of ``what``, which is ``model`` or contains it; None if that needs much memory or fails."""
    if elements(model.parameters()) > LARGE:
        return None
    try:
        return copy.deepcopy(what)
    except Exception:  # modules may contain anything
        return None


def without_elements(model: nn.Module) -> str:
    """Returns the names of parameters without elements, which no library shards; "" if there are none."""
    return ", ".join(name for name, parameter in model.named_parameters() if not parameter.numel())


def dependences(
    task: Task, model: nn.Module, *, per_sample: bool = False, synced: bool = False
) -> tuple[Dependence, ...]:
    """Returns the known dependencies of the result on anything but the file.

    Args:
        task, model: Of the run, the model in training mode.
        per_sample: True if random numbers belong to samples.
        synced: True if BatchNorm uses the samples of all ranks.
    """
    training = [module for module in model.modules() if module.training]
    depends = []
    if not synced and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in training):
        names = _statistics(model, nn.modules.batchnorm._BatchNorm)
        depends.append(Dependence(f"BatchNorm sees one micro-batch at a time, {_ON_MICRO_BATCHES}", statistics=names))
    elif not synced and task.batch_dependent:
        depends.append(Dependence(f"outputs depend on the rest of a micro-batch, {_ON_MICRO_BATCHES}"))
    if names := _statistics(model, nn.modules.instancenorm._InstanceNorm):
        text = "InstanceNorm keeps statistics of micro-batches, so evaluations depend on the micro batch size"
        depends.append(Dependence(text, statistics=names))
    if any(getattr(module, "scale_grad_by_freq", False) for module in training):
        depends.append(Dependence(f"scale_grad_by_freq counts within one micro-batch, {_ON_MICRO_BATCHES}"))
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and 0 < module.p < 1 for module in training)
    if drops and not per_sample:
        depends.append(Dependence(f"dropout draws other masks on each rank, {ON_RANKS}", on_processes=True))
    if line := derivatives.line_of(task, model, derivatives.counts_ranks):
        depends.append(
            Dependence(f"code asks for the number of processes ({line}); with another number its result may differ")
        )
    if sparse := ", ".join(name for name, buffer in model.named_buffers() if buffer.layout != torch.strided):
        depends.append(Dependence(f"sparse buffer {sparse} is in no checkpoint: model() makes it again at each start"))
    return tuple(depends)


def _statistics(model: nn.Module, kind: type[nn.Module]) -> frozenset[str]:
    """Returns the names of the buffers in modules of class ``kind`` in training mode."""
    changing = {name for name, module in model.named_modules() if isinstance(module, kind) and module.training}
    return frozenset(name for name, _ in model.named_buffers() if name.rpartition(".")[0] in changing)


def described(model: nn.Module) -> dict[str, str]:
    """Returns a checkpoint's description of a newly built model: the same for every engine and number of ranks."""
    printed = re.sub("0x[0-9a-f]+", "", str(model))
    named = dict(model.named_parameters())
    # Parameters frozen by a group of an earlier training count as trained.
    trained = [name for name, of in named.items() if of.requires_grad or FROZEN in vars(of)]
    return {
        "digest of str(model)": xxh3_64_hexdigest(printed.encode()),
        "trained parameters": f"{len(trained):,} of {len(named):,}, digest {xxh3_64_hexdigest(' '.join(trained).encode())}",
        "digest of values that no checkpoint has": xxh3_64_hexdigest(" ".join(_sizes_of_others(model)).encode()),
    }


def _sizes_of_others(model: nn.Module) -> Iterator[str]:
    """Yields the size of each tensor and array in a transient buffer or an attribute, with few digits, because the last
    digits of sines depend on the processor."""
    for name, module in model.named_modules():
        transient = {key: module._buffers.get(key) for key in sorted(module._non_persistent_buffers_set)}
        for key, value in {**transient, **vars(module)}.items():
            if size := _size(value):
                yield f"{name}.{key} {size}"


def _size(value: Any) -> str:
    """Returns shape and sum of magnitudes of a tensor or an array; "" for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return f"{list(value.shape)} {np.abs(value).sum(dtype=np.float64):.3g}"
    if type(value) is not Tensor or value.layout != torch.strided:
        return ""
    if value.is_meta or value.is_quantized or value.is_nested:
        return ""
    wide = torch.complex128 if value.is_complex() else torch.float64
    pieces = torch.split(value.detach().reshape(-1), _PIECE)
    return f"{list(value.shape)} {sum(float(piece.to(wide).abs().sum()) for piece in pieces):.3g}"


def attributes(model: nn.Module, task: Task) -> dict[str, Any]:
    """Returns a checkpoint's record of arguments that neither weights nor source code show: the numbers and texts in
    attributes of the task by name (texts as digests, paths omitted), and one digest of the model's numbers."""
    # Settings of built-in tasks are in the file.
    values = {} if type(task).__module__.startswith("dsframe.") else vars(task)
    of_task = dict(_plain({key: values[key] for key in values if not hasattr(Task, key)}, "task", _DEPTH))
    of_model: list[str] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_TORCH and id(value) not in seen:  # modules share their configuration
                seen |= {id(value)} if has_attributes(value) else set()
                numbers = dict(_plain(value, f"{name}.{key}", _DEPTH - 1)).items()
                of_model += [f"{path} {number}" for path, number in numbers if not isinstance(number, str)]
    return {"digest of numbers in the model": xxh3_64_hexdigest(" ".join(of_model).encode()), **of_task}


def _plain(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yields the numbers and texts in ``value`` and in containers and objects in it, with their paths."""
    value = value.item() if isinstance(value, np.generic) else value
    if _is_of_one_start(value):
        return
    if isinstance(value, (bool, int, float, type(None))):
        yield path, value if value is None or math.isfinite(value) else repr(value)
    elif isinstance(value, str):
        if os.sep not in value and not is_secret(path):
            yield path, f"a text, digest {xxh3_64_hexdigest(value.encode('utf-8', 'replace'))}"
    elif isinstance(value, (Tensor, np.ndarray)):
        count = value.numel() if isinstance(value, Tensor) else value.size
        if size := f"{count} values" if count > _PIECE else _size(value):
            yield path, size
    elif isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in entries if depth and len(value) <= _FEW else ():
            yield from _plain(item, f"{path}.{key}", depth - 1)
    elif depth and _holds_arguments(value):
        for key, item in vars(value).items() if isinstance(value, nn.Module) else attributes_of(value).items():
            yield from _plain(item, f"{path}.{key}", depth - 1) if key not in _OF_TORCH else ()


def _is_of_one_start(value: Any) -> bool:
    """Returns True if another start of the same program may have another value: a time, an address, a path, a handle,
    a name with a date, a host or an identifier."""
    if isinstance(value, str):
        digits = sum(character.isdigit() for character in value)
        return digits >= 4 or value.startswith("tmp") or socket.gethostname() in value
    if isinstance(value, (int, float)):
        is_timer = value % 1 > 0 and 0 <= time.perf_counter() - value < 3600
        return is_timer or _LARGE <= abs(value) < math.inf or value == os.getpid() > 1000
    return isinstance(value, (PurePath, time.struct_time, RemovableHandle))


def _holds_arguments(value: Any) -> bool:
    """Returns True if attributes of ``value`` are searched: a loss without weights is, a network or an object of dsframe is not."""
    if isinstance(value, nn.Module):
        return not any(True for _ in value.parameters())
    return has_attributes(value) and not type(value).__module__.startswith("dsframe.")


def assert_same_model(ranks: Ranks, *models: nn.Module) -> None:
    """**Collective.** Raises TaskError on every rank if ``models`` differ between ranks in names, order, shapes,
    dtypes, trained parameters or module classes. Called before a library wraps them: engines match parameters by
    position, and would fail internally or mix them up."""
    differing = first_difference(ranks, [entry for model in models for entry in _entries(model)])
    if differing:
        first = by_value([text or "nothing more" for text in differing])
        raise TaskError(
            f"{type(ranks.plan.task).__name__}: the model differs between ranks. The first "
            f"difference: {first}. Every rank must build the same model: if your code iterates over "
            "a set, sort it first (a set has another order in each process), and let nothing depend "
            "on the rank or the host"
        )


def _entries(model: nn.Module) -> Iterator[str]:
    further = aliases(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in further:
            yield f"parameter {name}, which is {further[name]}"
        else:
            yield f"parameter {name} {_shape_and_dtype(parameter)}{'' if parameter.requires_grad else ' frozen'}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name} {_shape_and_dtype(buffer)}"
    for name, module in model.named_modules():
        # What torch's modules show is what they compute with; others may show a rank or device.
        is_torchs = type(module).__module__.startswith("torch.nn.modules.") and not list(module.children())
        yield f"module {name or '(the model)'} {type(module).__name__}({module.extra_repr() if is_torchs else ''})"


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{'' if is_lazy(tensor) else f'{list(tensor.shape)} '}{str(tensor.dtype).removeprefix('torch.')}"
