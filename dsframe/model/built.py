"""Information about a built model."""

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
"""Options of a parameter that differ from the optimizer's: ``weight_decay`` and ``lr_scale``."""


@dataclass(frozen=True)
class Dependence:
    """A dependency of the result that the file does not show."""

    text: str
    """Printed at the start, after "this model's"."""
    on_processes: bool = False
    """True if the result depends on the number of processes."""
    statistics: frozenset[str] = frozenset()
    """Names of buffers that differ between ranks for this reason."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in a model."""

    settings: Json
    """The file's section, without keys that are not set."""
    peft: str
    """peft's own settings, as JSON: the ``adapter_config.json`` of an export."""
    digest: str
    """Digest of the base's values as float32, the same for any number of ranks and any exact dtype."""
    line: str
    """Sizes, for the first lines of a run."""
    put_into: Callable[[nn.Module], object]
    """Inserts a new adapter with these settings into another model of the task."""

    @property
    def training(self) -> Json:
        """Returns what must be the same for a run to continue from a checkpoint."""
        kept = {key: value for key, value in self.settings.items() if key != "folder"}
        return {"adapter": kept, "adapter's base": self.digest}


@dataclass(frozen=True)
class ParameterGroups:
    """Options of parameters, by their names in the model."""

    options: Mapping[str, Options] = field(default_factory=dict)
    """Contains only parameters with options."""
    frozen: frozenset[str] = frozenset()
    """Parameters that a group freezes; the model may have frozen others."""
    asked: Json = field(default_factory=dict)
    """The groups as written in the file or task, for the checkpoint manifest."""
    lines: tuple[str, ...] = ()
    """The groups and their sizes, for the first lines of a run."""

    def freeze(self, model: nn.Module) -> None:
        """Freezes the groups' parameters in all or a part of the model."""
        for name, parameter in model.named_parameters():
            if name in self.frozen and parameter.requires_grad:
                parameter.requires_grad_(False)
                setattr(parameter, FROZEN, True)

    def split(self, named: Iterable[tuple[str, Tensor]]) -> list[Any]:
        """Returns the argument of torch's optimizers: the tensors if none has options, else one dict for each group."""
        by_options: dict[tuple[Any, ...], Json] = {}
        for name, tensor in named:
            options = self.options.get(name, {})
            by_options.setdefault(tuple(sorted(options.items())), {"params": [], **options})["params"].append(tensor)
        if not self.options:
            return [tensor for group in by_options.values() for tensor in group["params"]]
        return list(by_options.values())


@dataclass(frozen=True)
class BuiltModel:
    """Information about a built model. An engine keeps it as one value."""

    dtype: torch.dtype = torch.float32
    """Dtype of the weights that the optimizer updates: float32, or float64 if the model has that."""
    groups: ParameterGroups = field(default_factory=ParameterGroups)
    """Parameters with their own options."""
    adapter: Adapter | None = None
    """The adapter of a frozen base model, if the file asks for it."""
    parts: tuple[Part, ...] = ()
    """The parts of the model; empty with several models."""
    origin: str = ""
    """Where a large model was built before it was sharded; printed at start."""
    depends: tuple[Dependence, ...] = ()
    """Dependencies of the result that the file does not show, such as the micro-batch size; printed at start."""
    gradient_hooks: GradientHooks = field(default_factory=dict)
    """Hooks that the task registered on parameters by ``register_hook``."""
    draws: DrawTrial | None = None
    """Knows after the first step whether the model draws random numbers in training."""
    sample_draws: SampleDraws | None = None
    """Assigns random numbers to samples, if the file asks for it; the loop sets which samples come next."""
    memory: BuiltMemory = field(default_factory=lambda: BuiltMemory([]))
    """Memory of the weights when ``model()`` returned them."""
    watch: WeightWatch | None = None
    """Detects reads and writes of weights outside the engine; None for one of several models."""
    losses: Callable[[Any, Any], dict[str, Any]] | None = None
    """**Collective.** With several models: computes the losses of a batch by name, in evaluation mode, with gradients
    only if the task asks for them."""
    calls: Any = None
    """Knows which modules this rank has called, if all ranks must call the same (``engines.call_order``)."""
    manifest: Mapping[str, Json] = field(default_factory=dict)
    """Additions to a checkpoint's manifest, by section (``checkpoint.changes.about``)."""
