"""The engines, as a table: name, class, the package it needs, and what it does with each feature of a file.

Adding an engine is one new file, one entry in TABLE, its name in the settings' ``EngineName``, and its cases in the tests.
Imports nothing heavy, so that ``dsframe check`` can ask what an engine would say about a file without loading it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsframe.errors import EngineError, Problem

if TYPE_CHECKING:
    from dsframe.config import Config
    from dsframe.engine import Engine

# Where state lives, not what is computed: an engine of full replicas trains the same without it, and says so.
_PLACEMENT = frozenset(
    {"zero1", "zero2", "zero3", "hpz", "tiling", "partition_activations"}
    | {"offload_optimizer_cpu", "offload_optimizer_nvme", "partial_offload", "offload_param_cpu", "offload_param_nvme"}
)
# What only a model that calls deepspeed.checkpointing itself can use, or ranks and blocks that the file does not have: DeepSpeed's
# engine does not read these keys either.
_MODELS_OWN = frozenset({"activation_checkpointing"})
# What makes ranks leave updates out, which they have to do together.
_OVERFLOWS = frozenset({"fp16", "fp16_stage0", "autocast_fp16", "autocast_unsaid"})
_REPLICA = frozenset({"bf16", "autocast", "whole_parameters"}) | _OVERFLOWS
# How one model, or its samples, are cut among ranks: placement as well, but such ranks also share their samples.
_CUTS = frozenset({"pipeline", "tensor_parallel", "sequence_parallel"})
# What DeepSpeed 0.19.8 takes and trains otherwise, and how: ``runtime/engine.py`` (backward), ``runtime/zero/stage_1_and_2.py``
# (unscale_and_clip_grads, step) and ``runtime/zero/stage3.py`` (backup_optimizer).
_OTHERWISE = {
    "fp16_stage0": "would divide gradients by a scale that their loss was never multiplied by",
    "autocast_fp16": "would be clipped while the gradients are still scaled, and end all updates at the first overflow",
    "partial_offload": "would leave the rest at its first learning rate, and its moments out of checkpoints; write 1.0",
}
# What no engine can do yet, and why.
_LATER = {
    "unmanaged_accumulation": "leaves it to the program when to step; dsframe steps after every global batch",
}


@dataclass(frozen=True)
class Entry:
    """One engine."""

    target: str
    """``module:Class``, imported when the engine is chosen."""
    package: str | None = None
    """What must be installed, beyond torch."""
    honours: frozenset[str] = frozenset()
    """Features (``dsframe.config.features``) that mean here what they mean to DeepSpeed."""
    replicates: frozenset[str] = frozenset()
    """Features that place state and do not change the training; this engine holds full replicas instead, and says so."""
    ignores: frozenset[str] = frozenset()
    """Features without which the training is the same; this engine goes without them, and says so."""
    otherwise: Mapping[str, str] = field(default_factory=dict)
    """Why a feature is refused, where there is more to say than that the engine cannot."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Feature -> the ``module:Class`` that takes the place of ``target`` where a file switches it on."""
    holds: str = "a full replica on every rank"
    """What this engine keeps instead of what it replicates."""
    at_the_price_of: str = "more memory"
    """What that costs."""
    size: str = "any"
    """Processes that it runs on: "any" number, "one", or one for each of the pipeline's "stages"."""
    launcher: str = "torchrun"
    """The one that belongs to this engine; any other may start it as well."""
    elastic: str = ""
    """``module:function`` that trains on while its launcher takes processes away and adds others; none: it cannot."""
    caution: str = ""
    """What the user is told whenever this engine runs."""

    @property
    def replicas(self) -> bool:
        """Whether every rank reads samples of its own, whatever the file says about cutting models and sequences."""
        return self.replicates >= _CUTS


TABLE: dict[str, Entry] = {
    "deepspeed": Entry(
        "dsframe.engines.zero:ZeroEngine",
        package="deepspeed",
        launcher="deepspeed",
        honours=(_PLACEMENT | _CUTS | _REPLICA) - _OTHERWISE.keys()
        | {
            "gradient_sum",
            "communication_data_type",
            "grad_accum_dtype",
            "low_precision_masters",
            "zero_quantized",
            "zenflow",
            "skip_nonfinite",
        }
        | {"lamb", "lion", "muon", "muadam"},
        ignores=_MODELS_OWN,
        otherwise={
            **_OTHERWISE,
            "adasum": "combines updates as only Horovod does",
            "fp16_compression": "is Horovod's; DeepSpeed's is communication_data_type",
            "gradient_hook": "is DDP's; DeepSpeed's is communication_data_type",
        },
        variants={"pipeline": "dsframe.engines.pipeline:PipelineEngine"},
    ),
    "horovod": Entry(
        "dsframe.engines.horovod:HorovodEngine",
        package="horovod",
        launcher="horovodrun",
        elastic="dsframe.engines.horovod_elastic:train",
        honours=_REPLICA | {"gradient_sum", "adasum", "fp16_compression", "skip_nonfinite"},
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
    ),
    "ddp": Entry(
        "dsframe.engines.ddp:DdpEngine",
        honours=_REPLICA | {"gradient_sum", "skip_nonfinite", "gradient_hook"},
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
    ),
    "fsdp": Entry(
        "dsframe.engines.fsdp:FsdpEngine",
        honours=_REPLICA - {"whole_parameters"} | {"gradient_sum", "skip_nonfinite", "zero3"},
        replicates=_PLACEMENT - {"zero3"} | _CUTS,
        ignores=_MODELS_OWN,
        holds="shares of everything on every rank, as at ZeRO stage 3 and where dsframe.fsdp says,",
        at_the_price_of="another share of memory",
    ),
    "single": Entry(
        "dsframe.engines.single:SingleEngine",
        honours=_REPLICA | {"gradient_sum", "skip_nonfinite"},
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
        size="one",
    ),
    # Textbook methods, to learn from and to compare with.
    "reference-allreduce": Entry(
        "dsframe.engines.references.allreduce:AllReduceEngine",
        honours=_REPLICA | {"gradient_sum", "skip_nonfinite"},
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
    ),
    "reference-parameter-averaging": Entry(
        "dsframe.engines.references.averaging:ParameterAveragingEngine",
        honours=_REPLICA - _OVERFLOWS,
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
        otherwise={
            **dict.fromkeys(_OVERFLOWS, "would let ranks skip different updates"),
            "gradient_sum": "has no meaning for weights",
        },
        caution="parameter averaging is not the training that this file means on other engines, unless the optimizer is plain "
        "SGD, no clipping bites and every step is averaged: each rank's optimizer sees its own samples alone",
    ),
    "reference-parameter-server": Entry(
        "dsframe.engines.references.server:ParameterServerEngine",
        honours=_REPLICA - _OVERFLOWS | {"gradient_sum"},
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
        otherwise=dict.fromkeys(_OVERFLOWS, "would need the server to tell everybody about overflows"),
        holds="all optimizer state on rank 0 and the whole model on every rank",
    ),
    "reference-model-parallel": Entry(
        "dsframe.engines.references.modelparallel:ModelParallelEngine",
        honours=_REPLICA | {"gradient_sum", "skip_nonfinite", "pipeline"},
        replicates=_PLACEMENT,
        ignores=_MODELS_OWN,
        holds="some layers, with all their state, on each rank",
        size="stages",
    ),
    "reference-dataparallel": Entry(
        "dsframe.engines.references.dataparallel:DataParallelEngine",
        honours=_REPLICA | {"gradient_sum", "skip_nonfinite"},
        replicates=_PLACEMENT | _CUTS,
        ignores=_MODELS_OWN,
        holds="everything in one process",
        size="one",
    ),
}

_FALLBACKS = ("deepspeed", "horovod", "ddp")
"""In this order, where ``engine`` is "auto": the next one that is installed."""


@dataclass(frozen=True)
class Choice:
    """Which engine runs, and what the user is told about it."""

    name: str
    announcements: tuple[str, ...] = ()

    @property
    def entry(self) -> Entry:
        """The engine's line in the table."""
        return TABLE[self.name]


def installed(name: str) -> bool:
    """Whether the engine's package is there (it may still fail to load)."""
    package = TABLE[name].package
    return package is None or importlib.util.find_spec(package) is not None


def choose(config: Config, launcher: str) -> Choice:
    """The engine for this file under this launcher.

    An explicit ``engine`` wins. "auto" follows the launcher: who types ``horovodrun`` wants Horovod, everybody else DeepSpeed;
    where that is not installed, the next of DeepSpeed, Horovod, DDP, unless ``"fallback": "error"``. Raises EngineError where
    the engine is not installed and nothing may stand in.
    """
    wanted = config.settings.engine
    if wanted != "auto":
        if not installed(wanted):
            raise EngineError(
                f'engine "{wanted}" needs the package {TABLE[wanted].package}, which is not installed; {_remedy(wanted)}'
            )
        return Choice(wanted)
    wanted = "horovod" if launcher == "horovodrun" else "deepspeed"
    if installed(wanted):
        return Choice(wanted)
    if config.settings.fallback == "error":
        raise EngineError(f'{wanted} is not installed and the file says "fallback": "error"; {_remedy(wanted)}')
    name = next(name for name in _FALLBACKS if installed(name))
    return Choice(name, (f"{wanted} is not installed: falling back to {name}, the same training with full replicas",))


def examine(config: Config, name: str, processes: int | None = None) -> tuple[list[Problem], list[str]]:
    """What engine ``name`` refuses of the file (problems), and what it does another way (one line each).

    ``processes``: of the run, where that is known; some engines refuse a number of them.
    """
    from dsframe.config import features
    from dsframe.config.features import WATCHING

    entry = TABLE[name]
    found = [
        feature for feature in features(config) if feature.name not in entry.honours and feature.name not in WATCHING
    ]
    replicated = [feature.path for feature in found if feature.name in entry.replicates]
    ignored = [feature.path for feature in found if feature.name in entry.ignores]
    refused = [
        Problem(
            "error",
            feature.path,
            f"{feature.description} {_reason(entry, feature.name)}",
            'choose another "engine", or take it out',
            str(config.path or ""),
            feature.line,
            feature.column,
            code="engine-cannot",
        )
        for feature in found
        if feature.name not in entry.replicates | entry.ignores
    ]
    refused += _size(config, name, processes)
    notes = [entry.caution] if entry.caution else []
    if replicated:
        instead = ", ".join(replicated)
        notes.append(f"{name} keeps {entry.holds} instead of {instead}: the same training, {entry.at_the_price_of}")
    if ignored:
        notes.append(
            f"{name} goes without {', '.join(ignored)}: the same training; metrics.jsonl has the run's figures"
        )
    return refused, notes


def _size(config: Config, name: str, processes: int | None) -> list[Problem]:
    size, stages = TABLE[name].size, config.deepspeed.pipeline.stages
    if processes is None or size == "any" or processes == (1 if size == "one" else stages):
        return []
    what = "is one process" if size == "one" else f"has one process for each of pipeline.stages, which is {stages}"
    remedy = 'start one, or choose "ddp", "horovod" or "deepspeed"' if size == "one" else f"start {stages}"
    place = config.position(("dsframe", "engine"))
    text = f'engine "{name}" {what}, not {processes}'
    return [Problem("error", "dsframe.engine", text, remedy, str(config.path or ""), *place, code="world")]


def _reason(entry: Entry, feature: str) -> str:
    return entry.otherwise.get(feature) or _LATER.get(feature) or "is nothing that this engine can do"


def _remedy(name: str) -> str:
    return f"run make setup, or: pip install {TABLE[name].package}"


def elastic(name: str) -> Callable[..., Any]:
    """What trains on while processes come and go. Raises EngineError where this engine cannot."""
    refuse_fixed(name)
    module, _, function = TABLE[name].elastic.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def refuse_fixed(name: str) -> None:
    """Raises EngineError where this engine cannot train on while processes come and go."""
    if not TABLE[name].elastic:
        able = ", ".join(f'"{other}"' for other, entry in TABLE.items() if entry.elastic)
        raise EngineError(
            f'engine "{name}" cannot train on while processes come and go: choose {able}, or leave out --min-np, --max-np and '
            "--host-discovery-script"
        )


def load(name: str, config: Config) -> type[Engine]:
    """The engine's class for this file. Raises EngineError where its package cannot be imported."""
    from dsframe.config import features

    entry = TABLE[name]
    on = [feature.name for feature in features(config) if feature.name in entry.variants]
    module, _, cls = (entry.variants[on[0]] if on else entry.target).partition(":")
    try:
        loaded: type[Engine] = getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise EngineError(f'engine "{name}" cannot be loaded: {error}; {_remedy(name)}') from error
    return loaded
