"""What is known of a model once it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.data.sample_draws import DrawTrial, SampleDraws
from dsframe.model.built_memory import BuiltMemory
from dsframe.model.gradient_hooks import GradientHooks
from dsframe.model.parts import Part
from dsframe.model.weight_watch import WeightWatch
from dsframe.text import Json

ON_RANKS = "so the training depends on the number of processes"
FROZEN = "_dsframe_frozen"
"""Attribute of a parameter that a group has frozen. A later training of the same module may have other groups."""
Options = Mapping[str, float]
"""Settings of a parameter that are not the optimizer's own: ``weight_decay`` and ``lr_scale``."""


@dataclass(frozen=True)
class Dependence:
    """What the result depends on, though the file does not say so."""

    text: str
    """Printed at the start, behind "this model's"."""
    on_processes: bool = False
    """True if it depends on the number of processes."""
    statistics: frozenset[str] = frozenset()
    """Names of buffers that differ between ranks for this reason."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in a model."""

    settings: Json
    """The file's section, without what is not set."""
    peft: str
    """peft's own settings, as JSON: the ``adapter_config.json`` of an export."""
    digest: str
    """Digest of the base's values as float32, the same on any number of ranks and in any number format that holds them."""
    line: str
    """Sizes, for the first lines of a run."""
    put_into: Callable[[nn.Module], object]
    """Puts such an adapter, with new weights, into another model of the task."""

    @property
    def training(self) -> Json:
        """Returns what must be the same for a run to continue from a checkpoint."""
        kept = {key: value for key, value in self.settings.items() if key != "folder"}
        return {"adapter": kept, "adapter's base": self.digest}


@dataclass(frozen=True)
class ParameterGroups:
    """What is different for which parameters, by the model's names."""

    options: Mapping[str, Options] = field(default_factory=dict)
    """Only of parameters that have some."""
    frozen: frozenset[str] = frozenset()
    """Parameters that a group freezes; the model may have frozen others."""
    asked: Json = field(default_factory=dict)
    """The file's or the task's groups as written, for a checkpoint's record."""
    lines: tuple[str, ...] = ()
    """The groups and their sizes, for the first lines of a run."""

    def freeze(self, model: nn.Module) -> None:
        """Freezes what the groups say, of all or a part of the model."""
        for name, parameter in model.named_parameters():
            if name in self.frozen and parameter.requires_grad:
                parameter.requires_grad_(False)
                setattr(parameter, FROZEN, True)

    def split(self, named: Iterable[tuple[str, Tensor]]) -> list[Any]:
        """Returns what torch's optimizers take: the tensors themselves where all are alike, else one dict for each group."""
        by_options: dict[tuple[Any, ...], Json] = {}
        for name, tensor in named:
            options = self.options.get(name, {})
            by_options.setdefault(tuple(sorted(options.items())), {"params": [], **options})["params"].append(tensor)
        if not self.options:
            return [tensor for group in by_options.values() for tensor in group["params"]]
        return list(by_options.values())


@dataclass(frozen=True)
class BuiltModel:
    """What is known of a model once it is built. An engine keeps it as one value."""

    dtype: torch.dtype = torch.float32
    """Number format of the weights that the optimizer updates: float32, or float64 if the model is."""
    groups: ParameterGroups = field(default_factory=ParameterGroups)
    """Parameters with options of their own."""
    adapter: Adapter | None = None
    """The adapter of a frozen base model, if the file asks for it."""
    parts: tuple[Part, ...] = ()
    """What the model is made of; nothing where there are several models."""
    origin: str = ""
    """Where a large model was built before it was sharded; printed at start."""
    depends: tuple[Dependence, ...] = ()
    """Dependencies of the result that the file does not show, such as the micro-batch size; printed
    at start."""
    gradient_hooks: GradientHooks = field(default_factory=dict)
    """What the task has given to ``register_hook`` of parameters."""
    draws: DrawTrial | None = None
    """Knows after the first step whether the model draws random numbers in training."""
    sample_draws: SampleDraws | None = None
    """Gives random numbers to samples, if the file asks for it; the loop says which come next."""
    memory: BuiltMemory = field(default_factory=lambda: BuiltMemory([]))
    """Where the weights lay when ``model()`` returned them."""
    watch: WeightWatch | None = None
    """Sees weights that are read or written outside of the engine; None for one of several models."""
    losses: Callable[[Any, Any], dict[str, Any]] | None = None
    """**Collective.** With several models: makes the losses of a batch by name, in evaluation mode, with gradients
    only if the task asks for them."""
    calls: Any = None
    """Knows which modules this rank has called, if all ranks must call the same
    (``engines.call_order``)."""
    manifest: Mapping[str, Json] = field(default_factory=dict)
    """What a checkpoint's manifest adds, by section (``checkpoint.changes.about``)."""
