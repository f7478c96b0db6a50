"""Table of the engines: class, package, and supported features.

dsframe's engines are in ``BUILT_IN``. An external engine is an installed package with an entry point in the group
``dsframe.engines``: name in files -> ``module:ENTRY``, an ``Entry`` or a function that returns one, in a module that
imports nothing heavy. This module is below the configuration, which checks names in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsframe.errors import EngineError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "dsframe.engines"
"""Group of the entry points."""
DEFAULT = "deepspeed"
"""The meaning of ``"engine": "auto"`` without a launcher, as in ``dsframe check``."""

# Features that decide where state is stored, not what is computed: replica engines train the same without them, and say
# so.
PLACEMENT = frozenset(
    {"zero1", "zero2", "zero3"}
    | {"offload_optimizer_cpu", "offload_optimizer_nvme", "partial_offload", "offload_param_cpu", "offload_param_nvme"}
)
# Keys for models that call deepspeed.checkpointing themselves. DeepSpeed's engine does not read them either.
MODELS_OWN = frozenset({"activation_checkpointing"})
# Features that can skip updates; all ranks must skip the same ones.
OVERFLOWS = frozenset({"fp16", "fp16_stage0", "autocast_fp16", "autocast_unsaid"})
REPLICA = (
    frozenset({"bf16", "autocast", "keep_in_fp32", "whole_parameters", "parameter_groups", "ema", "adapter"})
    | OVERFLOWS
)
# Features that shard one model, or its samples, among ranks: also placement, but such ranks read the same samples.
CUTS = frozenset({"pipeline", "tensor_parallel", "sequence_parallel"})
# Experts on different ranks: also placement, and such ranks read their own samples.
EXPERTS = frozenset({"expert_parallel"})
# Features that mean the same if a task has several models, each with its own engine.
SEVERAL = frozenset(
    {"zero1", "zero2", "zero3", "offload_optimizer_cpu", "offload_param_cpu", "gradient_sum"}
) | frozenset({"bf16", "whole_parameters", "parameter_groups", "ema", "fp16_compression"})
# Features that DeepSpeed 0.19.8 accepts, but then trains differently. Source: ``runtime/engine.py`` (backward),
# ``runtime/zero/stage_1_and_2.py`` (unscale_and_clip_grads, step) and ``runtime/zero/stage3.py`` (backup_optimizer).
_OTHERWISE = {
    "fp16_stage0": "is refused: DeepSpeed 0.19.8 un-scales an unscaled loss at stage 0, so gradients would be too small",
    "autocast_fp16": "is refused: DeepSpeed 0.19.8 clips before it un-scales, and makes no update after the first overflow",
    "partial_offload": "is refused: the part that is not offloaded would ignore the schedule, and be missing in checkpoints; "
    "write 1.0",
}


@dataclass(frozen=True, eq=False, repr=False)
class Entry:
    """One engine."""

    target: str
    """``module:Class``, imported when the engine is chosen."""
    package: str | None = None
    """The required package in addition to torch."""
    install: str = ""
    """How to install it, if ``pip install`` is not enough."""
    supports: frozenset[str] = frozenset()
    """Features (``dsframe.config.features``) that mean the same as with DeepSpeed."""
    replicates: frozenset[str] = frozenset()
    """Features that place state and do not change the training; this engine has full replicas instead, and says so."""
    ignores: frozenset[str] = frozenset()
    """Features that do not change the training; this engine ignores them, and says so."""
    otherwise: Mapping[str, str] = field(default_factory=dict)
    """Reason why a feature is refused, if it is not only that the engine does not support it."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Feature -> ``module:Class`` that replaces ``target`` if the file uses it."""
    keeps: str = "a full replica on every rank"
    """What this engine has instead of what it replicates."""
    cost: str = "more memory"
    """The cost of that."""
    size: str = "any"
    """Number of processes: "any", "one", or one for each of the pipeline's "stages"."""
    launcher: str = "torchrun"
    """The launcher of this engine; any other can start it too."""
    by_deepspeed: bool = False
    """True if DeepSpeed itself runs the file, so that its restrictions apply."""
    rules: str = ""
    """``module:function`` that checks the ``RuleContext`` of a file for this engine, beyond features."""
    options: str = ""
    """``module:Class``, a ``Section``: the keys of ``engine_options`` in the file's dsframe section; empty for none."""
    several: frozenset[str] = frozenset()
    """Features that mean the same for several models (``Task.models``); empty: this engine trains one model."""
    caution: str = ""
    """Note to the user, printed whenever this engine runs."""

    @property
    def replicas(self) -> bool:
        """True if every rank reads its own samples, even if the file shards models and sequences."""
        return self.replicates >= CUTS


BUILT_IN: dict[str, Entry] = {
    "deepspeed": Entry(
        "dsframe.engines.deepspeed.engine:ZeroEngine",
        package="deepspeed",
        launcher="deepspeed",
        supports=(PLACEMENT | CUTS | EXPERTS | REPLICA) - _OTHERWISE.keys() - {"keep_in_fp32"}
        | {"gradient_sum", "communication_data_type", "grad_accum_dtype", "skip_nonfinite"}
        | {"lamb", "lion", "muon", "quantized_base"},
        ignores=MODELS_OWN,
        otherwise={
            **_OTHERWISE,
            "keep_in_fp32": "is refused: DeepSpeed converts all parameters; torch_autocast instead of bf16 keeps all in fp32",
            "fp16_compression": "is an option of engine horovod; for DeepSpeed write communication_data_type",
            "gradient_hook": "is an option of engine ddp; for DeepSpeed write communication_data_type",
        },
        variants={"pipeline": "dsframe.engines.deepspeed.pipeline:PipelineEngine"},
        by_deepspeed=True,
        several=SEVERAL,
    ),
    "ddp": Entry(
        "dsframe.engines.ddp:DdpEngine",
        several=SEVERAL,
        supports=REPLICA | {"gradient_sum", "skip_nonfinite", "gradient_hook", "quantized_base"},
        replicates=PLACEMENT | CUTS | EXPERTS,
        ignores=MODELS_OWN,
    ),
    "horovod": Entry(
        "dsframe.engines.horovod.engine:HorovodEngine",
        package="horovod",
        install="compile it against this torch as docs/coming_from/horovod.md says (plain pip install horovod fails)",
        launcher="horovodrun",
        several=SEVERAL,
        supports=REPLICA | {"gradient_sum", "fp16_compression", "skip_nonfinite", "quantized_base"},
        replicates=PLACEMENT | CUTS | EXPERTS,
        ignores=MODELS_OWN,
    ),
    "fsdp": Entry(
        "dsframe.engines.fsdp:FsdpEngine",
        rules="dsframe.engines.rules:fsdp",
        several=SEVERAL,
        supports=REPLICA - {"whole_parameters"} | {"gradient_sum", "skip_nonfinite", "zero3"},
        replicates=PLACEMENT - {"zero3"} | CUTS | EXPERTS,
        ignores=MODELS_OWN,
        keeps="shards of everything on every rank, as at ZeRO stage 3 and where dsframe.fsdp says,",
        cost="another amount of memory",
    ),
    "single": Entry(
        "dsframe.engines.single:SingleEngine",
        several=SEVERAL,
        supports=REPLICA | {"gradient_sum", "skip_nonfinite", "quantized_base"},
        replicates=PLACEMENT | CUTS | EXPERTS,
        ignores=MODELS_OWN,
        size="one",
    ),
}


class _Table(Mapping[str, Entry]):
    """``BUILT_IN``, then installed packages, which are searched only for other names, or to list all."""

    def __init__(self) -> None:
        self._outside: dict[str, list[EntryPoint]] | None = None
        self._loaded: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        """Raises KeyError for an unknown name, EngineError if the package does not return an ``Entry``."""
        if name in BUILT_IN:
            return BUILT_IN[name]
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._installed()[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from BUILT_IN
        yield from (name for name in self._installed() if name not in BUILT_IN)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in BUILT_IN or name in self._installed()  # without loading it

    def _installed(self) -> dict[str, list[EntryPoint]]:
        if self._outside is None:
            from importlib.metadata import entry_points  # 20 ms, and more with each installed package

            self._outside = {}
            for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
                self._outside.setdefault(point.name, []).append(point)
        return self._outside


def _load(name: str, points: list[EntryPoint]) -> Entry:
    packages = " and ".join(sorted({point.dist.name if point.dist else point.value for point in points}))
    if len({point.value for point in points}) > 1:
        raise EngineError(f'engine "{name}" is offered by {packages}; uninstall all but one')
    try:
        loaded: Any = points[0].load()
        entry = loaded() if callable(loaded) else loaded
    except Exception as error:  # an external package may raise anything on import
        raise EngineError(f'engine "{name}" of the package {packages} cannot be loaded: {error}') from error
    if not isinstance(entry, Entry):
        raise EngineError(
            f'engine "{name}" of the package {packages} is {type(entry).__name__}, not dsframe.engines.Entry'
        )
    return entry


TABLE: Mapping[str, Entry] = _Table()
"""Name -> engine: first dsframe's, then those of installed packages, by name."""


def named(wanted: str) -> str:
    """Returns the engine that a file names; ``DEFAULT`` if the launcher would choose."""
    return DEFAULT if wanted == "auto" else wanted
