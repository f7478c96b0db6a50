"""Chooses a file's engine and checks the file against it, without loading it (engines: ``dsframe.engines.table``).

Imports nothing heavy, so that ``dsframe check`` is fast.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dsframe.engines.table import BUILT_IN as BUILT_IN
from dsframe.engines.table import DEFAULT as DEFAULT
from dsframe.engines.table import TABLE as TABLE
from dsframe.engines.table import Entry as Entry
from dsframe.engines.table import named as named
from dsframe.errors import EngineError, Problem

if TYPE_CHECKING:
    from dsframe.config.value import Config
    from dsframe.engine import Engine
    from dsframe.model.plan import Plan

# Features that no engine supports, and why.
_LATER = {
    "unmanaged_accumulation": "leaves it to the program when to step; dsframe steps after every global batch",
    "zenflow": "updates parameters between steps: it is another training than on any other engine",
    "seed_layers": "draws other dropout than any other engine",
    "hpz": "is for several nodes of GPUs, where dsframe was never measured; engine fsdp has hybrid shards",
    "zero_quantized": "rounds what is sent to 4 or 8 bits: it is another training than on any other engine",
    "low_precision_masters": "rounds each update to 16 bits: it is another training than with fp32 masters",
}

_FALLBACKS = ("deepspeed", "horovod", "ddp")
"""Order of preference for ``"engine": "auto"``; the first installed engine is used."""


class Choice(NamedTuple):
    """The chosen engine, and lines to print about it."""

    name: str
    announcements: tuple[str, ...] = ()

    @property
    def entry(self) -> Entry:
        """The engine's row in the table."""
        return TABLE[self.name]


def installed(name: str) -> bool:
    """True if the engine's package is installed (its import may still fail)."""
    package = TABLE[name].package
    return package is None or importlib.util.find_spec(package) is not None


def choose(config: Config, launcher: str) -> Choice:
    """Returns the engine for this file under this launcher.

    An explicit ``engine`` wins. "auto" follows the launcher: Horovod under ``horovodrun``, else DeepSpeed. If it is not
    installed, the first installed of DeepSpeed, Horovod and DDP replaces it, unless ``"fallback": "error"``.

    Raises:
        EngineError: the engine is not installed, and must not be replaced.
    """
    wanted = config.settings.engine
    if wanted != "auto":
        if not installed(wanted):
            raise EngineError(
                f'engine "{wanted}" needs the package {TABLE[wanted].package}, which is not installed; {_remedy(wanted)}'
            )
        return Choice(wanted)
    wanted = "horovod" if launcher == "horovodrun" else DEFAULT
    if installed(wanted):
        return Choice(wanted)
    if config.settings.fallback == "error":
        raise EngineError(f'{wanted} is not installed and the file says "fallback": "error"; {_remedy(wanted)}')
    name = next(name for name in _FALLBACKS if installed(name))
    return Choice(name, (f"{wanted} is not installed: falling back to {name}, the same training with full replicas",))


def examine(config: Config, name: str, processes: int | None = None) -> tuple[list[Problem], list[str]]:
    """Returns the problems of the file with engine ``name``, and notes on what it does differently (one line each).

    ``processes``: their number if known; some engines refuse some numbers.
    """
    entry = TABLE[name]
    reasons = {**_LATER, **entry.otherwise}
    used = [feature for feature in config.features if feature.name not in entry.supports]
    replicated = [feature.path for feature in used if feature.name in entry.replicates]
    ignored = [feature.path for feature in used if feature.name in entry.ignores]
    refused = [
        config.error(
            tuple(feature.path.split(".")),
            f"{feature.description} {reasons.get(feature.name, f'is not supported by engine {name}')}",
            'choose another "engine", or take it out'
            if any(feature.name in each.supports | each.replicates | each.ignores for each in TABLE.values())
            else "remove it",
            code="engine-cannot",
        )
        for feature in used
        if feature.name not in entry.replicates | entry.ignores
    ]
    refused += _size(config, name, processes)
    if config.deepspeed.optimizer is None:
        remedy = 'add "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}'
        refused.append(config.error("optimizer", "is required", remedy, code="missing"))
    notes = [entry.caution] if entry.caution else []
    if replicated:
        instead = ", ".join(replicated)
        notes.append(f"{name} keeps {entry.keeps} instead of {instead}: the same training, {entry.cost}")
    if ignored:
        notes.append(f"{name} ignores {', '.join(ignored)}: the same training; metrics.jsonl has the run's metrics")
    return refused, notes


def problems_with_several_models(config: Config, name: str) -> list[Problem]:
    """Returns the features of the file that engine ``name`` does not support for several models (``Task.models``)."""
    entry, settings, stage = TABLE[name], config.settings, config.deepspeed.zero_optimization.stage
    wanted = settings.model
    if not entry.several:
        raise EngineError(
            f'engine "{name}" trains one model, and the task has several (models()); choose another engine'
        )
    apart = entry.supports - entry.several
    refused = [
        (tuple(feature.path.split(".")), feature.description) for feature in config.features if feature.name in apart
    ]
    for key, on in (
        ("per_sample_randomness", settings.per_sample_randomness),
        ("model.compile", wanted.compile is True),
        # A block gathered as one unit reduces its gradients in any backward pass through it, its own model's or
        # another's.
        ("model.activation_checkpointing", bool(wanted.activation_checkpointing) and entry.by_deepspeed and stage == 3),
    ):
        if on:
            path = ("dsframe", *key.split("."))
            refused.append((path, path[-1]))
    why = "is not possible with several models (models() of the task)"
    return [config.error(path, f"{what} {why}", "take it out", code="engine-cannot") for path, what in refused]


def _size(config: Config, name: str, processes: int | None) -> list[Problem]:
    size, stages = TABLE[name].size, config.deepspeed.pipeline.stages
    if processes is None or size == "any" or processes == (1 if size == "one" else stages):
        return []
    what = "is one process" if size == "one" else f"has one process for each of pipeline.stages, which is {stages}"
    remedy = 'start one, or choose "ddp", "horovod" or "deepspeed"' if size == "one" else f"start {stages}"
    text = f'engine "{name}" {what}, not {processes}'
    return [config.error(("dsframe", "engine"), text, remedy, code="world")]


def _remedy(name: str) -> str:
    entry = TABLE[name]
    return entry.install or f"pip install 'dsframe[{entry.package}]'"


def load(name: str, config: Config, *, several: bool = False) -> Callable[[Plan], Engine]:
    """Returns what makes the engine for this file; **collective** to call. ``several``: for a task with several models.
    Raises EngineError if its package cannot be imported."""
    entry = TABLE[name]
    on = [feature.name for feature in config.features if feature.name in entry.variants]
    try:
        make = _imported(entry.variants[on[0]] if on else entry.target)
    except ImportError as error:
        raise EngineError(f'engine "{name}" cannot be loaded: {error}; {_remedy(name)}') from error
    return partial(_imported("dsframe.engines.parts:PartsEngine"), engine=make) if several else make


def _imported(target: str) -> Callable[..., Engine]:
    module, _, cls = target.partition(":")
    loaded: Callable[..., Engine] = getattr(importlib.import_module(module), cls)
    return loaded
